"""A tokenizer for a model that has embeddings for fewer tokens: T5's, whose 100 sentinels no plain text needs."""

import json
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import UserError


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
