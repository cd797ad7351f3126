"""Data: files and hub datasets, checked and reduced to what TRL reads, and an account of what it will train on."""

from .columns import COLUMNS, Task
from .mixture import load_mixture
from .preview import Account, account, show_example
from .rendering import refuse_endless
from .split import Loaded, load_split
from .templates import check_template, set_template

__all__ = [
    "COLUMNS",
    "Account",
    "Loaded",
    "Task",
    "account",
    "check_template",
    "load_mixture",
    "load_split",
    "refuse_endless",
    "set_template",
    "show_example",
]
