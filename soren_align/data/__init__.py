"""Data: files and hub datasets, validated and converted to TRL's columns, and an account of their tokens."""

from .columns import COLUMNS, Task
from .empty_answers import without_empty_answers
from .encoding import ChatEncoder
from .held_out import hold_out
from .loss_masks import FIRST, TRAINED, LossMasks
from .mixture import mix
from .preview import Account, account, show_example
from .rendering import check_rendering_cost, template_errors
from .split import LoadedSplit, has_turns, load_split
from .templates import check_template, set_template
from .texts import texts_of
from .token_cache import tokenize
from .tokens import TOKEN_COLUMNS, Tokens, from_token_columns

__all__ = [
    "COLUMNS",
    "FIRST",
    "TOKEN_COLUMNS",
    "TRAINED",
    "Account",
    "ChatEncoder",
    "LoadedSplit",
    "LossMasks",
    "Task",
    "Tokens",
    "account",
    "check_rendering_cost",
    "check_template",
    "from_token_columns",
    "has_turns",
    "hold_out",
    "load_split",
    "mix",
    "set_template",
    "show_example",
    "template_errors",
    "texts_of",
    "tokenize",
    "without_empty_answers",
]
