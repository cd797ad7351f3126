"""The scores of one model on one task: a few bytes for each question, so that files of 5 GB are
compared within 1 GB.

Of an id, 8 bytes of its hash are in memory, of a question and of its prompt 4 bytes each, of a
right or wrong answer 1 byte. Questions of two models are matched by sorting the hashes. The text of
an id, which only errors print, is read from the file again.
"""

import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

NUM_PARTS = 64
"""Of the hashes' range, which are sorted one by one: sorting 33 million hashes at once would need
0.5 GB."""
BLOCK = 1 << 20


@dataclass
class Scores:
    """The scores of one model on one task, in the order of its file."""

    metric: str
    source: str
    """The file or folder, for messages."""
    find: Callable[[int], tuple[str, str]] = lambda number: ("", str(number))
    """Find the place and the id of a question, by its number from 0."""
    ids: array = field(default_factory=lambda: array("Q"))
    """Hashes of the ids."""
    points: array = field(default_factory=lambda: array("b"))
    """In [0, 1]: bytes until one is neither 0 nor 1, then float64."""
    contents: array = field(default_factory=lambda: array("I"))
    """Hashes of the questions; 0: unknown. Empty: all are unknown."""
    prompts: array = field(default_factory=lambda: array("I"))
    """Hashes of the prompts, as `contents`."""
    clusters: array = field(default_factory=lambda: array("Q"))
    """Hashes of the clusters' names. Empty: the questions are independent."""
    digest: str = ""
    """Of an evaluation of our own: the hash of all questions and prompts, in place of
    `contents`."""
    score: dict[str, Any] | None = None
    """Of an evaluation of our own: the score in its results.json."""
    has_average: bool = False
    """Of an evaluation of our own: whether its suite compares averages too."""

    def add(self, key: str, point: float, content: Any = None, prompt: Any = None) -> None:
        """Add the next question.
        content, prompt: anything that JSON has, or a hash; None: unknown.
        """
        if self.points.typecode == "b" and point not in (0.0, 1.0):
            self.points = array("d", self.points)
        self.points.append(point if self.points.typecode == "d" else int(point))
        if content is not None or self.contents:
            self._add_hash(self.contents, content)
        if prompt is not None or self.prompts:
            self._add_hash(self.prompts, prompt)
        self.ids.append(hash_bits(key, 8))

    def _add_hash(self, hashes: array, value: Any) -> None:
        if not hashes:
            hashes.frombytes(bytes(hashes.itemsize * len(self.ids)))
        hashes.append(0 if value is None else hash_bits(value, 4))


def hash_bits(content: Any, num_bytes: int) -> int:
    """Return so many bytes of the hash of a text, or of a JSON value.

    With 8 bytes, two of 4 million ids have the same hash with a probability of 4e-7. With 4 bytes,
    a question that differs between two files has the same hash with a probability of 2e-10.
    """
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
    return int.from_bytes(
        blake2b(text.encode("utf-8", "surrogatepass"), digest_size=num_bytes).digest()
    )


def numbers(values: array) -> np.ndarray:
    """Return the values without a copy."""
    return np.frombuffer(values, values.typecode) if values else np.empty(0, values.typecode)


def _parts(hashes: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices of the hashes in each part of their range, ascending."""
    size = 2**64 // NUM_PARTS
    for part in range(NUM_PARTS):
        low, high = np.uint64(part * size), np.uint64((part + 1) * size - 1)
        starts = range(0, max(len(hashes), 1), BLOCK)
        blocks = ((start, hashes[start : start + BLOCK]) for start in starts)
        yield np.concatenate(
            [start + np.flatnonzero((block >= low) & (block <= high)) for start, block in blocks]
        )


def first_repeat(ids: np.ndarray) -> int | None:
    """Return the number of the first question whose id an earlier one has; None: all ids differ."""
    repeats = []
    for indices in _parts(ids):
        own = ids[indices]
        if (np.diff(np.sort(own)) == 0).any():
            order = np.argsort(own, kind="stable")
            repeats.append(int(indices[order[1:][np.diff(own[order]) == 0]].min()))
    return min(repeats, default=None)


def match(ids: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return where each id is in `others`, as int32; -1: nowhere."""
    places = np.full(len(ids), -1, np.int32)
    for indices, other_indices in zip(_parts(ids), _parts(others), strict=True):
        if not len(other_indices):
            continue
        order = other_indices[np.argsort(others[other_indices])]
        own, sorted_others = ids[indices], others[order]
        nearest = np.minimum(np.searchsorted(sorted_others, own), len(order) - 1)
        places[indices] = np.where(sorted_others[nearest] == own, order[nearest], -1)
    return places
