"""Data: files and hub datasets, validated and converted to TRL's columns, and an account of their tokens."""

from .arrow import dataset_of, iterable_dataset
from .byte_pairs import trained_tokenizer
from .columns import COLUMNS, Task
from .empty_answers import drop_reason_of, without_empty_answers
from .encoding import BATCH_SIZE, ChatEncoder, encode
from .held_out import hold_out
from .loss_masks import FIRST, TRAINED, LossMasks
from .mixture import mix
from .preview import Account, account, show_example
from .rendering import template_errors
from .split import LoadedSplit, has_turns, load_split
from .stream import Preview, State, Stream, open_split, open_stream
from .templates import check_template, set_template
from .texts import texts_of
from .token_cache import tokenize
from .tokens import TOKEN_COLUMNS, EncodedExample, Tokens, from_token_columns, token_columns
from .vocabulary import within_vocabulary

__all__ = [
    "BATCH_SIZE",
    "COLUMNS",
    "FIRST",
    "TOKEN_COLUMNS",
    "TRAINED",
    "Account",
    "ChatEncoder",
    "EncodedExample",
    "LoadedSplit",
    "LossMasks",
    "Preview",
    "State",
    "Stream",
    "Task",
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
