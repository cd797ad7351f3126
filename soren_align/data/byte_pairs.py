"""A tokenizer trained on the training examples: byte-level BPE, which has a token for every byte and no unknown text.

It depends on texts and size alone, and is cached in the user's cache folder: plan, run, resume, all ranks and all runs
of a study have the same tokens.
"""

import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ..errors import UserError
from .arrow import cache_key
from .texts import texts_of
from .token_cache import prune, written_whole

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
