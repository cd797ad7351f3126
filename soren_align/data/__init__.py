"""Data: files and hub datasets, validated and converted to TRL's columns, and statistics of their tokens."""

from .arrow import dataset_of, has_turns, iterable_dataset
from .cache import tokenize
from .encode import BATCH_SIZE, drop_reason_of, encode, without_empty_answers
from .masks import FIRST, TRAINED, EncodedExample, LossMasks, Tokens, from_token_columns, token_columns
from .rendering import template_errors
from .split import LoadedSplit, hold_out, load_split, mix
from .stats import DatasetStats, dataset_stats, show_example
from .stream import Preview, State, Stream, open_split, open_stream
from .tokenizer import check_template, set_template, texts_of, trained_tokenizer, within_vocabulary

__all__ = [
    "BATCH_SIZE",
    "FIRST",
    "TRAINED",
    "DatasetStats",
    "EncodedExample",
    "LoadedSplit",
    "LossMasks",
    "Preview",
    "State",
    "Stream",
    "Tokens",
    "check_template",
    "dataset_of",
    "dataset_stats",
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
