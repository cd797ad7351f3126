"""Data: files and hub datasets, validated and converted to TRL's columns, and an account of their tokens."""

from .arrow import dataset_of, iterable_dataset
from .cache import tokenize
from .encode import BATCH_SIZE, ChatEncoder, drop_reason_of, encode, without_empty_answers
from .masks import FIRST, TRAINED, EncodedExample, LossMasks, Tokens, from_token_columns, token_columns
from .rendering import template_errors
from .split import LoadedSplit, has_turns, load_split
from .stats import Account, account, show_example
from .stream import Preview, State, Stream, hold_out, mix, open_split, open_stream
from .templates import check_template, set_template
from .vocabulary import texts_of, trained_tokenizer, within_vocabulary

__all__ = [
    "BATCH_SIZE",
    "FIRST",
    "TRAINED",
    "Account",
    "ChatEncoder",
    "EncodedExample",
    "LoadedSplit",
    "LossMasks",
    "Preview",
    "State",
    "Stream",
    "Tokens",
    "account",
    "check_template",
    "dataset_of",
    "drop_reason_of",
    "encode",
    "from_token_columns",
    "has_turns",
    "hold_out",
    "iterable_dataset",
    "load_split",
    "mix",
    "open_split",
    "open_stream",
    "set_template",
    "show_example",
    "template_errors",
    "texts_of",
    "token_columns",
    "tokenize",
    "trained_tokenizer",
    "within_vocabulary",
    "without_empty_answers",
]
