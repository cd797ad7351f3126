"""Faults and biases of preference pairs: copies, contradictions, and answers that their length
gives away.

Pairs are compared as the loss sees them: as tokens, truncated to max_length. A pair takes 24 bytes
here, of hashes, and some more while they are sorted; no text is held in memory.
"""

import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset

from ..core.errors import printable
from .masks import EQUAL_ANSWERS, Tokens

COPIED_SHARE = 0.01
"""Share of the pairs from which a notice reports exact copies. Fewer change a training as little as
a second epoch of them.
"""
LENGTH_AUC, SIGMAS = 0.1, 3.3
"""Distance from 0.5, and in standard deviations of the sign test (p = 0.001): a notice reports an
AUC that is further away."""
_MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so that a pair of hashes and the swapped pair have different keys."""


@dataclass(frozen=True)
class PairStats:
    """Numbers of preference pairs.
    Answers with equal tokens are dropped, and are not among `num_pairs`.
    """

    num_pairs: int
    num_equal: int
    """Pairs whose two answers have the same tokens within max_length."""
    num_copies: int
    """Pairs that are equal to an earlier pair, also those that a weight above 1 repeats."""
    num_contradictory: int
    """Pairs beside which there is the same pair with its answers swapped."""
    num_chosen_longer: int
    num_rejected_longer: int
    length_auc: float
    """The share of pairs whose chosen answer has more tokens, where a pair of equal lengths counts
    as half: 0.5 if length does not predict the label."""
    first: dict[str, int] = field(default_factory=dict)
    """"equal", "copy", "contradictory" -> the index of the first such pair."""

    def notices(self, dataset: Dataset, *, repeats: bool) -> list[str]:
        """A line about each number that matters. dataset: the counted examples, in TRL's columns.

        repeats: whether a weight above 1 repeats pairs; copies are then no fault.
        """
        lines, num_all = [], f"{self.num_pairs + self.num_equal:,}"
        places = {
            fault: f"the first one is {_place(dataset, index)}"
            for fault, index in self.first.items()
        }
        if self.num_equal:
            lines.append(
                f"{self.num_equal:,} of {num_all} pairs have {EQUAL_ANSWERS} and are dropped;"
                f" {places['equal']}. If truncation makes them equal, raise trainer.max_length;"
                " else the chat template leaves out what differs"
            )
        if self.num_contradictory:
            lines.append(
                f"{self.num_contradictory:,} of {num_all} pairs contradict another pair: prompt and"
                " answers are the same, but chosen and rejected are swapped. Both pairs are"
                f" trained on; {places['contradictory']}"
            )
        if self.num_copies >= COPIED_SHARE * self.num_pairs and self.num_copies and not repeats:
            lines.append(
                f"{self.num_copies:,} of {num_all} pairs are copies of earlier pairs, and are"
                f" trained on more than once; {places['copy']}"
            )
        num_longer, num_shorter = self.num_chosen_longer, self.num_rejected_longer
        sigmas = abs(num_longer - num_shorter) / math.sqrt(max(1, num_longer + num_shorter))
        if abs(self.length_auc - 0.5) >= LENGTH_AUC and sigmas >= SIGMAS:
            number, word = max((num_longer, "longer"), (num_shorter, "shorter"))
            lines.append(
                f"the chosen answer is the {word} one in {number / self.num_pairs:.0%} of the"
                " pairs, so that length alone predicts which answer was chosen (AUC"
                f" {self.length_auc:.2f}, where 0.5 is chance): DPO may make the model's answers"
                f" {word}"
            )
        return lines


class PairCounter:
    """Counts pairs, one by one."""

    def __init__(self) -> None:
        # For each pair: a key, the key of the swapped pair, and the pair's index.
        self._keys, self._swapped, self._indices = array("Q"), array("Q"), array("q")
        self._num_equal = self._num_longer = self._num_shorter = 0
        self._first: dict[str, int] = {}

    def add(self, index: int, sides: Sequence[Tokens] | None) -> None:
        """Add a pair. sides: after truncation; None: equal answers, so that the pair is dropped."""
        if sides is None:
            self._num_equal += 1
            self._first.setdefault("equal", index)
            return
        # Hashes of tokens, as the loss sees a pair: texts that are tokenized alike are copies.
        digests = (
            hashlib.blake2b(array("q", side.ids).tobytes(), digest_size=8).digest()
            for side in sides
        )
        chosen, rejected = map(int.from_bytes, digests)
        self._keys.append((chosen * _MULTIPLIER + rejected) % 2**64)
        self._swapped.append((rejected * _MULTIPLIER + chosen) % 2**64)
        self._indices.append(index)
        difference = len(sides[0].ids) - len(sides[1].ids)  # the prompt is in both
        self._num_longer += difference > 0
        self._num_shorter += difference < 0

    def stats(self) -> PairStats:
        """Return the numbers of all pairs."""
        keys, swapped = (
            np.frombuffer(numbers, np.uint64) for numbers in (self._keys, self._swapped)
        )
        # Of equal keys the first is no copy; a contradiction has the key of a pair with its answers
        # swapped.
        is_copy = np.ones(len(keys), bool)
        is_copy[np.unique(keys, return_index=True)[1]] = False
        is_contradictory = np.isin(swapped, keys)
        faults, first = {"copy": is_copy, "contradictory": is_contradictory}, dict(self._first)
        first |= {
            fault: self._indices[int(marks.argmax())]
            for fault, marks in faults.items()
            if marks.any()
        }
        num_equal_lengths = len(keys) - self._num_longer - self._num_shorter
        return PairStats(
            num_pairs=len(keys),
            num_equal=self._num_equal,
            num_copies=int(is_copy.sum()),
            num_contradictory=int(is_contradictory.sum()),
            num_chosen_longer=self._num_longer,
            num_rejected_longer=self._num_shorter,
            length_auc=(self._num_longer + num_equal_lengths / 2) / len(keys) if len(keys) else 0.5,
            first=first,
        )


def _place(dataset: Dataset, index: int) -> str:
    """ "pair 7 ('What does an owl eat?')": its number, and the start of its prompt."""
    example: Any = dataset[index]
    prompt = example["prompt"] if "prompt" in example else example["chosen"][-2]["content"]
    return f"pair {index + 1:,} ({printable(' '.join(prompt.split())[:50])!r})"
