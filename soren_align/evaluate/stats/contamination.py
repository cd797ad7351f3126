"""The questions of a suite that training examples contain: by 13 equal words in a row, or as a whole.

As in GPT-3's check (Brown et al. 2020, appendix C) and lm-eval's `decontamination/janitor.py`, a word is lower-case,
between whitespace, and without punctuation. (lm-eval 0.4.13 still has that file, but nothing calls it; it reads n-grams
of the Pile that were written beforehand.) A question of fewer words counts only if it equals a text of an example.

The examples are read once. Memory is bounded by the questions: about 60 bytes for each of their n-grams, which are
found by 64-bit hashes. A hash only finds a candidate, whose words are then compared, so that no collision counts as an
overlap.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np

NGRAM = 13
"""Words of an n-gram: GPT-3's largest, and lm-eval's."""
MIN_FIXED = 10
"""An n-gram in more questions than this, and in more than half of a column's, is the task's own wording."""
BATCH_WORDS = 1 << 18
"""Words that are hashed at once."""
_NOT_WORDS = re.compile(r"[^\w\s]|_")
_ASCII = {code: None for code in range(128) if not (chr(code).isalnum() or chr(code).isspace())}
_BASE = 0x9E3779B97F4A7C15
"""Of the polynomial hash modulo 2^64: the golden ratio's fraction, which is odd."""


@dataclass(frozen=True)
class Overlaps:
    """Indices of a suite's questions, by column, in the order of the questions."""

    questions: dict[str, int]
    """The number of questions."""
    overlapping: dict[str, list[int]]
    """Those with an n-gram of an example, or equal to a text of one."""
    exact: dict[str, list[int]]
    """Those that equal a text of an example."""
    examples_read: int

    def by_column(self) -> dict[str, dict[str, Any]]:
        """Return by column {"questions", "overlapping", "exact", "examples_read", "indices": of the overlapping}."""
        return {
            column: {
                "questions": number,
                "overlapping": len(self.overlapping[column]),
                "exact": len(self.exact[column]),
                "examples_read": self.examples_read,
                "indices": self.overlapping[column],
            }
            for column, number in self.questions.items()
        }

    def __or__(self, other: "Overlaps") -> "Overlaps":
        """The overlaps of the same questions with both sets of examples."""
        overlapping, exact = (
            {column: sorted({*mine[column], *theirs[column]}) for column in mine}
            for mine, theirs in ((self.overlapping, other.overlapping), (self.exact, other.exact))
        )
        return Overlaps(self.questions, overlapping, exact, self.examples_read + other.examples_read)


def overlaps(
    columns: Mapping[str, Sequence[str]],
    examples: Iterable[Sequence[str]],
    on_examples: Callable[[int], object] | None = None,
) -> Overlaps:
    """Return the questions that the examples contain.

    columns: the texts of the questions. examples: the texts of each. on_examples: called with the number of examples
    just read.
    """
    index = _Index(columns)
    texts: list[str] = []
    num_characters = num_read = num_reported = 0
    for num_read, example in enumerate(examples, start=1):
        texts += example
        num_characters += sum(map(len, example))
        if num_characters > 6 * BATCH_WORDS:
            index.mark(texts)
            texts, num_characters = [], 0
            if on_examples is not None:
                on_examples(num_read - num_reported)
                num_reported = num_read
    index.mark(texts)
    if on_examples is not None:
        on_examples(num_read - num_reported)
    return index.overlaps(num_read)


def words_of(text: str) -> list[str]:
    """Return the words of a text: lower-case, without any character that is neither letter, digit nor whitespace.

    A label before and after is left out, as in ARC's "Question: ... Answer:", which training data need not have.
    """
    text = text.lower()
    # translate is several times faster on ASCII, and several times slower on any other text.
    words = (text.translate(_ASCII) if text.isascii() else _NOT_WORDS.sub("", text)).split()
    start = int(words[:1] in (["question"], ["q"]))
    end = len(words) - (words[-1:] in (["answer"], ["a"]))
    return words[start:end] if start or end < len(words) else words


class _Index:
    """All n-grams of the questions of a suite, and which questions are marked as overlapping."""

    def __init__(self, columns: Mapping[str, Sequence[str]]):
        self.columns = {column: len(texts) for column, texts in columns.items()}
        questions = [words_of(text) for texts in columns.values() for text in texts]
        self.vocabulary: dict[str, int] = {}
        for word in chain.from_iterable(questions):
            self.vocabulary.setdefault(word, len(self.vocabulary) + 1)
        # 0 is the value of every word that no question has, and of the end of a text.
        values = np.random.default_rng(0).integers(1, 1 << 64, len(self.vocabulary), dtype=np.uint64, endpoint=False)
        self.values = np.concatenate([np.zeros(1, np.uint64), values])
        self.ids, ends = self._encode(questions)
        self.by_words: dict[bytes, list[int]] = defaultdict(list)
        for number, (start, end) in enumerate(ends):
            if end > start:
                self.by_words[self.ids[start:end].tobytes()].append(number)
        self.lengths = {len(key) // self.ids.itemsize for key in self.by_words}
        self._add_ngrams(np.array([end - start for start, end in ends]))
        self.is_overlapping, self.is_exact = np.zeros((2, len(questions)), bool)

    def _add_ngrams(self, num_words: np.ndarray) -> None:
        """Set the n-grams' sorted hashes, and of each its question and its place in `ids`."""
        hashes = _hashes(self.values[self.ids])
        question = np.repeat(np.arange(len(num_words)), num_words + 1)
        starts = np.arange(len(hashes))
        last = starts + NGRAM - 1
        is_within = (question[starts] == question[last]) & (self.ids[last] > 0)
        starts = starts[is_within]
        starts = starts[~self._are_fixed(hashes[starts], question[starts])]
        order = np.argsort(hashes[starts], kind="stable")
        self.starts = starts[order]
        self.hashes, self.question = hashes[self.starts], question[self.starts]
        # 16 entries or more per n-gram: a table of bits without which each n-gram of an example costs a binary search.
        self.shift = np.uint64(64 - min(30, len(self.hashes).bit_length() + 4))
        self.has_prefix = np.zeros(1 << int(64 - self.shift), bool)
        self.has_prefix[self.hashes >> self.shift] = True

    def _are_fixed(self, hashes: np.ndarray, question: np.ndarray) -> np.ndarray:
        """Whether each n-gram is a task's own wording, see MIN_FIXED."""
        are_fixed = np.zeros(len(hashes), bool)
        first = 0
        for number in self.columns.values():
            begin, end = np.searchsorted(question, (first, first + number))
            each, kind = np.unique(hashes[begin:end], return_inverse=True)
            pairs = np.unique(kind * max(1, number) + question[begin:end] - first)
            num_questions = np.bincount(pairs // max(1, number), minlength=len(each))
            are_fixed[begin:end] = (num_questions > max(MIN_FIXED, number / 2))[kind]
            first += number
        return are_fixed

    def _encode(self, texts: Sequence[Sequence[str]]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Return the numbers of all words, with a 0 after each text, and the (start, end) of each text among them."""
        with_ends = chain.from_iterable(chain(words, ("",)) for words in texts)
        lengths = np.array([len(words) + 1 for words in texts], np.int64)
        numbers = map(self.vocabulary.get, with_ends, repeat(0))
        ids = np.fromiter(numbers, np.int32, int(lengths.sum()))
        ends = np.cumsum(lengths)
        return ids, list(zip((ends - lengths).tolist(), (ends - 1).tolist(), strict=True))

    def mark(self, texts: Sequence[str]) -> None:
        """Mark the questions that these texts contain."""
        ids, ends = self._encode([words_of(text) for text in texts])
        for start, end in ends:
            if end - start in self.lengths and (equal := self.by_words.get(ids[start:end].tobytes())):
                self.is_exact[equal] = self.is_overlapping[equal] = True
        hashes = _hashes(self.values[ids])
        candidates = np.flatnonzero(self.has_prefix[hashes >> self.shift])
        # Each n-gram once: a phrase of many questions that is in many examples would fill the memory.
        each, places = np.unique(hashes[candidates], return_index=True)
        first = np.searchsorted(self.hashes, each, "left")
        counts = np.searchsorted(self.hashes, each, "right") - first
        place = np.repeat(candidates[places], counts)
        entry = np.repeat(first, counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        is_new = ~self.is_overlapping[self.question[entry]]
        place, entry = place[is_new], entry[is_new]
        window = np.arange(NGRAM)
        is_equal = (ids[place[:, None] + window] == self.ids[self.starts[entry][:, None] + window]).all(axis=1)
        self.is_overlapping[self.question[entry[is_equal]]] = True

    def overlaps(self, num_read: int) -> Overlaps:
        """Return what is marked."""
        overlapping, exact, first = {}, {}, 0
        for column, number in self.columns.items():
            part = slice(first, first + number)
            overlapping[column] = np.flatnonzero(self.is_overlapping[part]).tolist()
            exact[column] = np.flatnonzero(self.is_exact[part]).tolist()
            first += number
        return Overlaps(self.columns, overlapping, exact, num_read)


def _hashes(values: np.ndarray) -> np.ndarray:
    """Return the hash of the NGRAM values from each place on: sum of v[i + j] * _BASE^(12 - j), modulo 2^64."""
    num = max(0, len(values) - NGRAM + 1)
    power = [np.uint64(pow(_BASE, exponent, 1 << 64)) for exponent in range(6)]
    two = values[:-1] * power[1] + values[1:]
    four = two[:-2] * power[2] + two[2:]
    eight = four[:-4] * power[4] + four[4:]
    return eight[:num] * power[5] + four[8 : 8 + num] * power[1] + values[12 : 12 + num]
