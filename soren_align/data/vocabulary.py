"""A tokenizer for a model that has embeddings for fewer tokens: T5's, whose 100 sentinels no plain text needs."""

import json
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..core.errors import UserError
from .arrow import cache_key, examples_of
from .cache import prune, written_whole
from .tool_calls import OPTIONS


def within_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> PreTrainedTokenizerBase:
    """Return the tokenizer with ids below vocab_size only: itself, or one without its last added tokens.

    A text that contains the name of such a token is then made of other tokens. Raises UserError if a token from
    vocab_size on is a piece of texts.
    """
    if len(tokenizer) <= vocab_size:
        return tokenizer
    beyond = {token for token, index in tokenizer.get_vocab().items() if index >= vocab_size}
    whole: Any = tokenizer  # whose types have no such names
    backend = getattr(whole, "backend_tokenizer", None)
    if backend is None or beyond - set(whole.get_added_vocab()):
        raise UserError(
            f"model.tokenizer: it has {len(tokenizer):,} tokens, and the config's vocab_size is {vocab_size:,}; write "
            "a larger one into config.json"
        )
    described = json.loads(backend.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < vocab_size]
    described["model"]["vocab"] = _without(described["model"]["vocab"], beyond)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: token for name in names if (token := getattr(tokenizer, name)) is not None}
    # Not the tokenizer's own class: T5's adds its sentinels again whenever it is loaded.
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)), **special)


def _without(vocabulary: Any, beyond: set[str]) -> Any:
    """vocabulary: of a model of `tokenizers`: {token: id}, or Unigram's list of (token, score)."""
    if isinstance(vocabulary, dict):
        return {token: index for token, index in vocabulary.items() if token not in beyond}
    return [entry for entry in vocabulary if entry[0] not in beyond]


# ---
# A tokenizer trained on the training examples: byte-level BPE, which has a token for every byte and no unknown text.
#
# It depends on texts and size alone, and is cached in the user's cache folder: plan, run, resume, all ranks and all
# runs of a study have the same tokens.

END, PAD = "<|endoftext|>", "<|pad|>"
"""Two tokens: LLaMA's embedding of the padding token is not trained."""


def train_tokenizer(texts: Iterator[list[str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocab_size` tokens, trained on the texts of examples. Deterministic.

    Raises UserError if the texts have too few words for so many.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (size := tokenizer.get_vocab_size()) < vocab_size:
        raise UserError(
            f"model.tokenizer.vocab_size: the training texts give {size} tokens, not {vocab_size}; write {size} or less"
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def trained_tokenizer(dataset: Dataset, vocab_size: int, cache: Path) -> Path:
    """The folder in the user's cache folder of a tokenizer trained on a dataset from `load_split`.

    Raises UserError if it cannot be written, or if the texts have too few words.
    """
    root = cache / "tokenizers"
    folder = root / cache_key(dataset._fingerprint, len(dataset), vocab_size, metadata.version("tokenizers"))
    try:
        if folder.is_dir():
            os.utime(folder)
            return folder
        with written_whole(folder) as part:
            train_tokenizer(texts_of(dataset), vocab_size).save_pretrained(part)
        prune(root)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{root}: the tokenizer cannot be cached there (SOREN_ALIGN_CACHE): {reason}") from None
    return folder


# ---
# The texts of examples, as they stand in the data, without a chat template.


def texts_of(dataset: Dataset) -> Iterator[list[str]]:
    """The texts of each example from `load_split`, each once: all turns with their reasoning, or plain texts.

    Of a preference pair those of both sides. Tools are left out.
    """
    for example in examples_of(dataset):
        parts = (part for column, value in example.items() if column not in OPTIONS for part in _parts(value))
        yield list(dict.fromkeys(parts))


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for turn in value:
            yield from (text for key, text in turn.items() if key != "role" and isinstance(text, str))
