"""Convert the keys of other tools by the tables of keys.toml."""

import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from ..tasks import TaskName

Tool = Literal["TRL", "Axolotl", "LLaMA-Factory"]
# Every key of a source ends as one of these: none is passed over in silence, since a key without an
# effect would train something else than its author meant.
Outcome = Literal["unchanged", "renamed", "dropped", "yours", "unknown"]
TABLES: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "keys.toml").read_text(encoding="utf-8")
)
RENAMED: dict[str, str] = TABLES["renamed"]
"""Other names of the same setting: name -> the recipe's key."""
VALUES = {
    (name, row[0]): (row[1], "".join(row[2:]))
    for name, rows in TABLES["values"].items()
    for row in rows
}
"""Other names of the same value: (the source's key, its value) -> (the recipe's value, its effect
on the training)."""
# The file's order counts: the first row whose pattern matches is taken.
NOT_CONVERTED: list[tuple[str, str, Outcome]] = [
    (names, reason, outcome)
    for outcome in ("dropped", "yours")
    for reason, names in TABLES[outcome].items()
]
"""(names, reason or remedy, whether the key is left to the user)."""


@dataclass(frozen=True)
class Note:
    """The outcome of a key's conversion."""

    key: str
    """The key as in the source; dotted, or with [an index], if it is inside another."""
    outcome: Outcome
    """`yours`: the user has to set it, because the import does not convert it."""
    explanation: str = ""
    """The recipe's key, the reason for dropping this one, or the remedy."""
    changes_training: bool = False
    """Whether the trained weights of the recipe as it is written differ from the source's."""
    value: Any = None
    """The source's value of a key that the user has to set."""

    @property
    def label(self) -> str:
        """The key, with its value if the user has to set it."""
        return f"{self.key} ({self.value})" if self.outcome == "yours" else self.key


@dataclass
class Conversion:
    """A recipe made from another tool's file."""

    task: TaskName
    flat: dict[str, Any]
    """The source's keys, those inside other sections by dotted names."""
    tool: Tool
    template_path: str | None = None
    """The file into which an inline template may be written; None: there is none."""
    recipe: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {
            section: {} for section in ("model", "data", "optimizer", "trainer", "run")
        }
    )
    """The recipe's sections, `task` aside."""
    ours: dict[str, str] = field(default_factory=dict)
    """Dotted key of each value that is not from the source -> its reason."""
    notes: list[Note] = field(default_factory=list)
    """One per key of the source, and one per key inside a mixture."""
    template: str | None = None
    """The inline template to write there."""

    @property
    def trains_lora(self) -> bool:
        """Whether the source trains a LoRA adapter."""
        # LLaMA-Factory trains an adapter by default, Axolotl and TRL only if a key asks for it.
        if self.tool == "LLaMA-Factory":
            return self.flat.get("finetuning_type", "lora") == "lora"
        if self.tool == "Axolotl":
            return self.flat.get("adapter") in ("lora", "qlora")
        return self.flat.get("use_peft") is True

    def drop(self, key: str, reason: str) -> None:
        """Note that `key` has no effect, or none that a recipe needs."""
        self.notes.append(Note(key, "dropped", reason))

    def rename(self, key: str, explanation: str, changes_training: bool = False) -> None:
        """Note that `key` has another name in the recipe."""
        self.notes.append(Note(key, "renamed", explanation, changes_training))

    def leave(self, key: str, value: Any, remedy: str = "") -> None:
        """Note that the user has to set `key`."""
        # Always a change of the training: the source's value is not in the recipe as it stands.
        self.notes.append(Note(key, "yours", remedy, True, value))


def matches(name: str, names: str) -> bool:
    """Whether `name` is one of the space-separated `names`, in which `*` matches anything."""
    return any(fnmatchcase(name, pattern) for pattern in names.split())


def number(value: Any) -> Any:
    """The number in a text, such as 1e-6, which YAML 1.1 reads as text; any other value
    unchanged.
    """
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
