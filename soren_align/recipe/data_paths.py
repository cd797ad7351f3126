"""The files that a path of the data section names: a file, the files of a folder, or those that a pattern matches."""

import glob
import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from .. import shipped
from ..errors import UserError, did_you_mean

SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet")
"""Of data files. All but .parquet may be followed by .gz."""
PYTHON = "python:"
STDLIB = f"{PYTHON}stdlib"
"""The path of the standard library's text: see data.stdlib."""
STDLIB_SPLITS = ("train", "validation")
FILE_KINDS = ".jsonl, .json, .csv, .txt (each also as .gz) or .parquet"
MAX_ENTRIES = 100_000
"""Of a folder or a pattern, data files or not."""
_TEST = re.compile(r"(?<![a-z])(tests?|val|valid|validation|eval|evaluation|dev|held_?out)(?![a-z])")


def data_suffix(file: Path) -> str:
    """The suffix of a file's format: .jsonl of a.jsonl and of a.jsonl.gz."""
    inner = Path(file.stem).suffix
    return inner if file.suffix == ".gz" and inner != ".parquet" else file.suffix


def is_pattern(path: str) -> bool:
    """Whether a path has wildcards, which the hub's names never have."""
    return any(character in path for character in "*?[") and not shipped.resolve(path).exists()


def data_files(path: str) -> dict[str, Path]:
    """The data files that a path names, in alphabetical order, by their names for messages.

    Of a folder, all data files at any depth. Hidden files and folders, and links to folders, are left out. Raises
    UserError if there is no file, if a single one is of no kind that can be read, or if there are too many.
    """
    place, has_wildcards = shipped.resolve(path), is_pattern(path)
    if not has_wildcards and not place.is_dir():
        return {path: _single(path, place)}
    if not has_wildcards and place.resolve() in (Path("~").expanduser().resolve(), Path("/")):
        raise UserError(f"{path}: is a whole home or disk; name a folder of data")
    if "**" in path:
        raise UserError(f"{path}: '**' is not read; name the folder, whose data files are read at any depth")
    names = list(islice(glob.iglob(str(place)) if has_wildcards else _walk(place), MAX_ENTRIES + 1))
    if len(names) > MAX_ENTRIES:
        raise UserError(f"{path}: names more than {MAX_ENTRIES:,} files and folders; name fewer")
    files = [file for name in names if data_suffix(file := Path(name)) in SUFFIXES and file.is_file()]
    if not files:
        raise UserError(f"{path}: has no data file ({FILE_KINDS})")
    root = _root(path)
    start = root if has_wildcards else Path(path)
    return {str(start / file.relative_to(root)): file for file in sorted(files)}


def data_problems(path: str, may_be_test: bool) -> list[str]:
    """The problems of the files at `path`. may_be_test: whether a file of a folder may be a test split's."""
    if path.startswith(PYTHON):
        return [] if path == STDLIB else [f"found {path!r}; write {STDLIB}, the only text of Python's own"]
    try:
        files = data_files(path)
    except UserError as error:
        return list(error.problems)
    if path in files:
        return [f"{path} is empty"] if files[path].stat().st_size == 0 else []
    root = _root(path)
    tests = (name for name, file in files.items() if is_test_split(str(file.relative_to(root))))
    if not may_be_test and (name := next(tests, None)):
        return [
            f"{name} is a test split by its name, and scores on training data are meaningless; name the others by a "
            "pattern, such as train*.jsonl, or write train_on_test: true beside the path"
        ]
    return []


def is_test_split(split: str) -> bool:
    """Whether a split's name is that of a held-out split: test_sft, validation, eval."""
    return _TEST.search(split.lower()) is not None


def _single(path: str, file: Path) -> Path:
    if not file.exists():
        names: Iterable[str] = os.listdir(file.parent) if file.parent.is_dir() else ()
        raise UserError(f"no file {path}{did_you_mean(file.name, names)}")
    if not file.is_file():
        raise UserError(f"{path} is no regular file; name a file: {FILE_KINDS}")
    if data_suffix(file) not in SUFFIXES:
        raise UserError(f"{path}: cannot read '{file.suffix}' files; write one of {FILE_KINDS}")
    return file


def _root(path: str) -> Path:
    """The folder itself, or the part of a pattern that has no wildcard."""
    place = shipped.resolve(path)
    if not is_pattern(path):
        return place
    return next(parent for parent in place.parents if not any(c in str(parent) for c in "*?["))


def _walk(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield parent
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))
