"""Checks of the splits of the data section, each of which may be one of several."""

from collections.abc import Iterator
from typing import Any

from ..yaml_reader import Key
from .data_paths import STDLIB, STDLIB_SPLITS, is_test_split
from .references import is_local


def splits(data: Any) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Every split of the data section, with its key."""
    for name in ("train", "eval", "retention"):
        value = data.get(name) if isinstance(data, dict) else None
        splits = enumerate(value) if isinstance(value, list) else [(None, value)]
        for i, split in splits:
            if isinstance(split, dict):
                yield ("data", name) if i is None else ("data", name, i), split


NOT_STREAMED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_train_epochs": ((None,), "the examples of a stream are not counted; leave it out, and write max_steps"),
    "dataloader_num_workers": (
        (None, 0),
        "a stream is read by the training process itself, so that a run can be resumed at the exact example; leave it "
        "out",
    ),
    "precompute_ref_log_probs": (
        (None, False),
        "needs the examples before training, and a stream's are read while training; leave it out",
    ),
    "train_sampling_strategy": ((None, "random"), "needs the examples before training; leave it out"),
    "shuffle_dataset": ((None, False), "a stream is shuffled by data.streaming.shuffle_buffer; leave it out"),
    "save_strategy": ((None, "steps", "no", False, "best"), "a stream has no epochs; write steps, and save_steps"),
}
"""Keys of `trainer` -> the values that data.streaming allows, and the reason for others."""


def streaming_problems(data: dict[str, Any], trainer: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """(key, message) of each setting that data.streaming does not allow. data, trainer: the raw sections."""
    if data.get("streaming") in (None, False):
        return
    max_steps = trainer.get("max_steps")
    if not isinstance(max_steps, int) or max_steps < 1:
        yield (
            ("trainer", "max_steps"),
            "is required with data.streaming, as the number of examples is unknown; write the number of optimizer "
            "steps",
        )
    for key, (allowed, reason) in NOT_STREAMED.items():
        if trainer.get(key) not in allowed:
            yield ("trainer", key), reason
    if isinstance(evaluation := data.get("eval"), dict) and "examples" in evaluation:
        message = "the examples of a stream cannot be compared before training; write {fraction: 0.01}, or a split"
        yield ("data", "eval"), message
    for at, split in splits(data):
        name, path = split.get("split"), split.get("path")
        is_part = isinstance(name, str) and ("[" in name or "+" in name)
        if at[1] == "train" and is_part and isinstance(path, str) and not is_local(path):
            yield (*at, "split"), "only a whole split can be streamed; write limit for a part, or a list of splits"


def split_problems(path: str, split: dict[str, Any], is_trained: bool) -> list[str]:
    """The problems of a raw split's `split`. is_trained: it is one of data.train."""
    name = split.get("split", "train")
    if not isinstance(name, str):
        return []
    if path == STDLIB:
        if name not in STDLIB_SPLITS:
            return [f"found {name!r}; {STDLIB} has {' and '.join(STDLIB_SPLITS)}"]
    elif is_local(path):
        is_part = "[" in name
        return [f"found {name!r}, but a file is always taken whole; write limit"] if is_part else []
    if is_trained and is_test_split(name) and split.get("train_on_test") is not True:
        return [
            f"'{name}' is a test split, and scores on training data are meaningless; name another, or write "
            "train_on_test: true beside it"
        ]
    return []
