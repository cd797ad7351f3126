"""Convert the keys of other tools by the tables of keys.toml."""

import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from ..tasks import TaskName

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
ADAPTERS = (
    "of all adapters, only plain LoRA is supported (model.lora). The recipe trains all weights instead; lower "
    "optimizer.lr, because learning rates for adapters are usually ten times those for all weights"
)
LEFT_OUT = [(names, reason, False) for reason, names in TABLES["dropped"].items()]
LEFT_OUT += [(TABLES["adapters"], ADAPTERS, True)]
LEFT_OUT += [(names, reason, True) for reason, names in TABLES["changes"].items()]
"""(names, reason, whether the trained weights change unless the key was off in the source)."""
ONLY_WITH: dict[str, list[str]] = {TABLES["adapters"]: ["use_peft", "adapter"]} | TABLES[
    "only_with"
]
"""Without effect unless one of these is set: names -> keys."""
START = ("adapter_name_or_path", "lora_model_dir")
"""Keys of the adapter that is trained further."""


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


@dataclass
class Conversion:
    """A recipe made from another tool's file."""

    task: TaskName
    recipe: dict[str, dict[str, Any]]
    """The recipe's sections, `task` aside."""
    flat: dict[str, Any]
    """The source's keys, those inside other sections by dotted names."""
    tool: str
    """TRL's, Axolotl's, LLaMA-Factory's or torchtune's."""
    ours: dict[str, str] = field(default_factory=dict)
    """Dotted key of each value that is not from the source -> its reason."""
    notes: list[Note] = field(default_factory=list)
    """One per key of the source, and one per key inside a mixture."""
    template_path: str | None = None
    """Where an inline template may be written; None: nowhere."""
    template: str | None = None
    """The inline template to write there."""
    trains_completions: bool = False
    """Whether all examples are read as prompts and completions, of which the completions alone are
    trained anyway."""

    @property
    def trains_lora(self) -> bool:
        """Whether the source trains a LoRA adapter."""
        if self.tool == "LLaMA-Factory's":
            return self.flat.get("finetuning_type", "lora") == "lora"
        if self.tool == "Axolotl's":
            return self.flat.get("adapter") in ("lora", "qlora")
        return self.flat.get("use_peft") is True

    @property
    def start(self) -> str | None:
        """The adapter that the source trains further; None if it trains a new one."""
        path = next((self.flat[key] for key in START if self.flat.get(key)), None)
        return (
            path
            if isinstance(path, str) and "," not in path and not self.flat.get("create_new_adapter")
            else None
        )

    def add(self, note: Note) -> Note:
        """Add and return a note."""
        self.notes.append(note)
        return note

    def drop(self, key: str, reason: str, changes_training: bool = False) -> Note:
        """Add and return the note that `key` was dropped."""
        return self.add(Note(key, "dropped", reason, changes_training))

    def rename(self, key: str, explanation: str, changes_training: bool = False) -> Note:
        """Add and return the note that `key` has another name in the recipe."""
        return self.add(Note(key, "renamed", explanation, changes_training))


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
