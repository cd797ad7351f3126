"""Data: files and hub datasets, validated and converted to TRL's columns, and an account of their tokens."""

from .columns import COLUMNS, Task
from .encoding import ChatEncoder
from .held_out import hold_out
from .mixture import mix
from .preview import Account, account, show_example
from .rendering import check_rendering_cost
from .split import LoadedSplit, load_split
from .templates import check_template, set_template
from .token_cache import tokenize
from .tokens import TOKEN_COLUMNS

__all__ = [
    "COLUMNS",
    "TOKEN_COLUMNS",
    "Account",
    "ChatEncoder",
    "LoadedSplit",
    "Task",
    "account",
    "check_rendering_cost",
    "check_template",
    "hold_out",
    "load_split",
    "mix",
    "set_template",
    "show_example",
    "tokenize",
]
