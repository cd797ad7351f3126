"""The texts of examples, as they stand in the data, without a chat template."""

from collections.abc import Iterator
from typing import Any

from datasets import Dataset

from .arrow import examples_of
from .tool_calls import OPTIONS


def texts_of(dataset: Dataset) -> Iterator[list[str]]:
    """The texts of each example from `load_split`, each once: all turns with their reasoning, or plain texts.

    Of a preference pair those of both sides. Tools are left out.
    """
    for example in examples_of(dataset):
        parts = (part for column, value in example.items() if column not in OPTIONS for part in _parts(value))
        yield list(dict.fromkeys(parts))


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for turn in value:
            yield from (text for key, text in turn.items() if key != "role" and isinstance(text, str))
