"""The tables of keys.toml, and what becomes of a key."""

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

TABLES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "keys.toml").read_text(encoding="utf-8"))
RENAMED: dict[str, str] = TABLES["renamed"]
"""Other names of the same setting: name -> the recipe's key."""
VALUES = {(name, row[0]): (row[1], "".join(row[2:])) for name, rows in TABLES["values"].items() for row in rows}
"""Other names of the same value: (the source's key, its value) -> (the recipe's value, its effect on the training)."""
ADAPTERS = (
    "only plain LoRA is supported (model.lora), without variants; instead of another adapter all weights are trained: "
    "then lower optimizer.lr, adapters' rates are usually ten times those of full training"
)
LEFT_OUT = [(names, reason, False) for reason, names in TABLES["dropped"].items()]
LEFT_OUT += [(TABLES["adapters"], ADAPTERS, True)]
LEFT_OUT += [(names, reason, True) for reason, names in TABLES["changes"].items()]
"""(names, reason, whether the trained weights change unless the key was off in the source)."""
ONLY_WITH: dict[str, list[str]] = {TABLES["adapters"]: ["use_peft", "adapter"]} | TABLES["only_with"]
"""Without effect unless one of these is set: names -> keys."""


@dataclass(frozen=True)
class Note:
    """The outcome of a key's conversion."""

    key: str
    """As in the source; dotted, or with [an index], if it is inside another."""
    outcome: Literal["unchanged", "renamed", "dropped", "unknown"]
    explanation: str = ""
    """The recipe's key, or the reason for dropping it."""
    changes_training: bool = False
    """Whether the trained weights differ from the source's."""


def matches(name: str, names: str) -> bool:
    """Whether `name` is one of the space-separated `names`, in which `*` matches anything."""
    return any(fnmatchcase(name, pattern) for pattern in names.split())


def number(value: Any) -> Any:
    """The number in a text, such as 1e-6, which YAML 1.1 reads as text; any other value unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
