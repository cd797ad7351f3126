"""Faults and biases of preference pairs and of labelled answers: copies, contradictions, and
answers that their length gives away.

They are compared as the loss sees them: as tokens, truncated to max_length. A pair takes 24 bytes
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
from scipy.stats import rankdata

from ..core.errors import UserError, printable
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


@dataclass(frozen=True)
class LabelStats:
    """Numbers of labelled answers."""

    num_good: int
    num_bad: int
    num_copies: int
    """Answers that are equal to an earlier one, with the same prompt and label."""
    num_contradictory: int
    """Answers beside which there is the same one with the other label."""
    length_auc: float
    """The share of all pairs of a good and a bad answer in which the good one has more tokens;
    equal lengths count as half."""
    first: dict[str, int] = field(default_factory=dict)
    """"copy", "contradictory" -> the index of the first such answer."""

    def refuse_one_class(self, place: str) -> None:
        """Raise UserError, starting with `place`, if all labels are equal."""
        if not (self.num_good and self.num_bad):
            label = "true" if self.num_good else "false"
            raise UserError(
                f"{place}: all {self.num_good + self.num_bad:,} labels are {label}, but KTO needs"
                " good and bad answers; add the others, or train good answers by `soren-align sft`"
            )

    def notices(
        self, dataset: Dataset, desirable_weight: float, undesirable_weight: float, repeats: bool
    ) -> list[str]:
        """A line about each number that matters. dataset: the counted examples, in TRL's columns.
        The weights are TRL's; repeats: see `PairStats.notices`.
        """
        lines, num_all = [], self.num_good + self.num_bad
        # Eq. 8 of the paper (arXiv:2402.01306): together, good answers weigh 1 to 4/3 of bad ones.
        ratio = desirable_weight * self.num_good / (undesirable_weight * self.num_bad)
        if not 0.995 <= ratio <= 1.34:
            key, weight = "desirable_weight", self.num_bad / self.num_good
            if weight < 1:
                key, weight = "undesirable_weight", 1 / weight
            lines.append(
                f"{self.num_good:,} answers are labelled good and {self.num_bad:,} bad, so that"
                f" one kind counts {max(ratio, 1 / ratio):.2g} times the other in the loss; to"
                f" balance them, write trainer.{key}: {weight:.3g}"
            )
        if self.num_contradictory:
            lines.append(
                f"{self.num_contradictory:,} of {num_all:,} answers contradict another example:"
                " prompt and answer are the same, but one is labelled good and one bad. All are"
                f" trained on; the first one is {_place(dataset, self.first['contradictory'])}"
            )
        if self.num_copies >= COPIED_SHARE * num_all and self.num_copies and not repeats:
            lines.append(
                f"{self.num_copies:,} of {num_all:,} examples are copies of earlier ones, and are"
                " trained on more than once; the first one is"
                f" {_place(dataset, self.first['copy'])}"
            )
        chance = auc_error(self.num_good, self.num_bad)
        if abs(self.length_auc - 0.5) >= max(LENGTH_AUC, SIGMAS * chance):
            word = "longer" if self.length_auc > 0.5 else "shorter"
            lines.append(
                f"good answers are {word} than bad ones, so that length alone predicts the label"
                f" (AUC {self.length_auc:.2f}, where 0.5 is chance): KTO may make the model's"
                f" answers {word}"
            )
        return lines


def auc(values: Sequence[float], labels: Any) -> float:
    """The share of all pairs of a true and a false label in which the value of the true one is
    larger; equal values count as half. 0.5 without both labels."""
    is_true = np.asarray(labels, bool)
    m, n = int(is_true.sum()), int((~is_true).sum())
    if not (m and n):
        return 0.5
    return float((rankdata(values)[is_true].sum() - m * (m + 1) / 2) / (m * n))  # Mann-Whitney's U


def auc_error(num_true: int, num_false: int) -> float:
    """The standard deviation of `auc` by chance alone, without ties."""
    return math.sqrt((num_true + num_false + 1) / (12 * max(1, num_true * num_false)))


class LabelCounter:
    """Counts labelled answers, one by one."""

    def __init__(self) -> None:
        self._keys, self._indices, self._lengths = array("Q"), array("q"), array("l")
        self._labels = bytearray()

    def add(self, index: int, side: Tokens, label: bool) -> None:
        """Add an answer. side: after truncation."""
        digest = hashlib.blake2b(array("q", side.ids).tobytes(), digest_size=8).digest()
        self._keys.append(int.from_bytes(digest))
        self._indices.append(index)
        self._lengths.append(sum(side.trained))
        self._labels.append(label)

    def stats(self) -> LabelStats:
        """Return the numbers of all answers."""
        keys, is_good = np.frombuffer(self._keys, np.uint64), np.frombuffer(self._labels, bool)
        is_copy = np.ones(len(keys), bool)
        for label in (True, False):
            own = np.flatnonzero(is_good == label)
            is_copy[own[np.unique(keys[own], return_index=True)[1]]] = False
        faults = {
            "copy": is_copy,
            "contradictory": np.isin(keys, keys[is_good]) & np.isin(keys, keys[~is_good]),
        }
        return LabelStats(
            num_good=int(is_good.sum()),
            num_bad=int((~is_good).sum()),
            num_copies=int(is_copy.sum()),
            num_contradictory=int(faults["contradictory"].sum()),
            length_auc=auc(self._lengths, is_good),
            first={
                fault: self._indices[int(marks.argmax())]
                for fault, marks in faults.items()
                if marks.any()
            },
        )


def _place(dataset: Dataset, index: int) -> str:
    """ "pair 7 ('What does an owl eat?')": its number, and the start of its prompt."""
    example: Any = dataset[index]
    prompt = example["prompt"] if "prompt" in example else example["chosen"][:-1]
    prompt = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    kind = "example" if "label" in example else "pair"
    return f"{kind} {index + 1:,} ({printable(' '.join(prompt.split())[:50])!r})"
