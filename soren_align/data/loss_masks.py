"""The loss masks of all examples as a dataset of one column, which is packed as their tokens will be."""

import numpy as np
import pyarrow as pa
from datasets import Dataset

TRAINED, FIRST = 1, 2
"""Bits of a token in the column: the loss includes it; it is the first of its example."""


class LossMasks:
    """The masks of examples in the order of their dataset; a byte per token."""

    def __init__(self) -> None:
        self.masks: list[bytes] = []

    def add(self, trained: list[bool]) -> None:
        """Add the mask of the next example."""
        self.masks.append(bytes(trained))

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each example."""
        return np.array([len(mask) for mask in self.masks], np.int64)

    def dataset(self) -> Dataset:
        """Return {"tokens": a list of bits per example}."""
        starts = np.concatenate(([0], self.lengths.cumsum()))
        tokens = np.frombuffer(b"".join(self.masks), np.uint8).copy()
        tokens[starts[:-1][self.lengths > 0]] |= FIRST
        return Dataset(pa.table({"tokens": pa.LargeListArray.from_arrays(starts, tokens)}))
