"""Checks of the splits of the data section, each of which may be one of several."""

from collections.abc import Iterator
from typing import Any

from ..yaml_reader import Key
from .data_paths import is_test_split
from .references import is_local


def splits(data: Any) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Every split of the data section, with its key."""
    for name in ("train", "eval", "retention"):
        value = data.get(name) if isinstance(data, dict) else None
        splits = enumerate(value) if isinstance(value, list) else [(None, value)]
        for i, split in splits:
            if isinstance(split, dict):
                yield ("data", name) if i is None else ("data", name, i), split


def split_problems(path: str, split: dict[str, Any], is_trained: bool) -> list[str]:
    """The problems of a raw split's `split`. is_trained: it is one of data.train."""
    name = split.get("split", "train")
    if not isinstance(name, str):
        return []
    if is_local(path):
        is_part = "[" in name
        return [f"found {name!r}, but a file is always taken whole; write limit"] if is_part else []
    if is_trained and is_test_split(name) and split.get("train_on_test") is not True:
        return [
            f"'{name}' is a test split, and scores on training data are meaningless; name another, or write "
            "train_on_test: true beside it"
        ]
    return []
