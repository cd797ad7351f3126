"""Conversion of the keys about streaming: training examples that are read while the model trains."""

from typing import Any

from ..recipe.checks import NOT_STREAMED
from .key_tables import RENAMED, Note, number

KEYS = ("streaming", "dataset_streaming")


def convert(key: str, name: str, value: Any, flat: dict[str, Any], recipe: dict[str, dict[str, Any]]) -> Note | None:
    """Write one key about streaming into the recipe's data section; None for a key about anything else.

    A source is streamed here where it names its number of steps, and no number of held-out examples.
    """
    if not _is_streamed(flat, recipe["data"]):
        return None
    if name in KEYS and value is True:
        size = number(flat.get("buffer_size"))
        has_size = isinstance(size, int) and size > 0
        recipe["data"]["streaming"] = {"shuffle_buffer": size} if has_size else True
        return Note(key, "renamed", "data.streaming")
    if name == "buffer_size":
        return Note(key, "renamed", "data.streaming.shuffle_buffer")
    target = RENAMED.get(name, f"trainer.{name}").removeprefix("trainer.")
    if target in NOT_STREAMED and value not in NOT_STREAMED[target][0]:
        return Note(key, "dropped", NOT_STREAMED[target][1].partition(";")[0])
    return None


def _is_streamed(flat: dict[str, Any], data: dict[str, Any]) -> bool:
    steps, evaluation = number(flat.get("max_steps")), data.get("eval")
    counts_held_out = isinstance(evaluation, dict) and "examples" in evaluation
    has_steps = isinstance(steps, int | float) and steps > 0
    return any(flat.get(key) is True for key in KEYS) and has_steps and not counts_held_out
