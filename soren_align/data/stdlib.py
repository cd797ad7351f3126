"""The standard library of the Python that runs this, as texts: a dataset that every machine has.

`python:stdlib` in a recipe. An example is the source of one module, or one topic of `help`, which is English
(pydoc_data/topics.py). Tests, installed packages, blank modules and those that are not UTF-8 are left out.

A hash of an example's name chooses its split, so that a module stays in its split in every version of Python, and
modules of one package can be in both. A module of `validation` with the content of one in `train` is left out; modules
that are similar, such as the code pages of `encodings`, are not.
"""

import ast
import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..core.errors import UserError
from ..recipe import STDLIB
from .files import LocalFiles

VALIDATION_SHARE = 0.05
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Names of folders."""
_TOPICS = "pydoc_data/topics.py"
Split = Literal["train", "validation"]


class Entry(NamedTuple):
    """An example: where it is, and its content's hash."""

    name: str
    """`json/decoder.py`, or `pydoc_data/topics.py:assert`."""
    file: Path
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class StandardLibrary(LocalFiles):
    """The examples of one split, one per name."""

    split: str
    entries: tuple[Entry, ...]

    @classmethod
    def of_split(cls, split: str) -> "StandardLibrary":
        """Raises UserError if Python has no source of its standard library here."""
        root = Path(sysconfig.get_path("stdlib"))
        chosen = entries(root, "train" if split == "train" else "validation")
        if not chosen:
            raise UserError(f"{STDLIB}: this Python has no source of its standard library in {root}")
        return cls({f"{STDLIB}/{entry.name}": entry.file for entry in chosen}, split, chosen)

    def origin(self) -> dict[str, Any]:
        """For run.json: `split`, `sha256` of names and contents, the Python, and the number of modules and bytes."""
        contents = [(entry.name, entry.sha256) for entry in self.entries]
        return {
            "split": self.split,
            "sha256": hashlib.sha256(repr(contents).encode()).hexdigest(),
            "python": platform.python_version(),
            "num_modules": sum(not entry.name.startswith(_TOPICS) for entry in self.entries),
            "num_bytes": sum(entry.num_bytes for entry in self.entries),
        }

    def sampled_origin(self) -> dict[str, Any]:
        """As `origin`."""
        return self.origin()

    def of_file(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, record) of one example."""
        _, _, topic = name.partition(f"{_TOPICS}:")
        file = self.files[name]
        yield name, {"text": topics(file)[topic] if topic else file.read_text(encoding="utf-8")}


@cache
def entries(root: Path, split: Split) -> tuple[Entry, ...]:
    """The examples of a split of the standard library at `root`, sorted by name."""
    if split == "train":
        return tuple(entry for entry in _all_entries(root) if not is_validation(entry.name))
    trained = {entry.sha256 for entry in entries(root, "train")}
    return tuple(e for e in _all_entries(root) if is_validation(e.name) and e.sha256 not in trained)


def is_validation(name: str) -> bool:
    """Whether the example with this name is in the split `validation`."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    return number < VALIDATION_SHARE * 2**64


@cache
def _all_entries(root: Path) -> tuple[Entry, ...]:
    contents = ((name, file, text.encode()) for name, file, text in sorted(_texts(root)) if text.strip())
    return tuple(Entry(name, file, hashlib.sha256(text).hexdigest(), len(text)) for name, file, text in contents)


def _texts(root: Path) -> Iterator[tuple[str, Path, str]]:
    for file in root.rglob("*.py"):
        name = file.relative_to(root)
        if _LEFT_OUT.isdisjoint(name.parts[:-1]) and file.is_file():
            try:
                text = file.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if name.as_posix() == _TOPICS:
                yield from ((f"{_TOPICS}:{topic}", file, content) for topic, content in topics(file).items())
            else:
                yield name.as_posix(), file, text


@cache
def topics(file: Path) -> dict[str, str]:
    """The topics of `help` by name; read from the source, without running it."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return ast.literal_eval(statement.value)
    return {}
