"""The tokens of an example: loss mask and truncation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..tasks import TASKS, TaskName

EQUAL_ANSWERS = "two answers with the same tokens"
"""The start of the reason to drop such pairs."""


class Tokens(NamedTuple):
    """A conversation's token ids, and for each whether the loss includes it."""

    ids: list[int]
    trained: list[bool]

    def truncated(self, max_length: int | None) -> "Tokens":
        """The first max_length tokens (TRL's truncation_mode keep_start)."""
        return Tokens(self.ids[:max_length], self.trained[:max_length])


class EncodedExample(NamedTuple):
    """The tokens of an example before truncation."""

    sides: tuple[Tokens, ...]
    """One for SFT; for DPO chosen and rejected, each with the prompt before it."""
    num_prompt: int
    """Leading tokens that both sides share and that are not trained; 0 for SFT."""
    left_out: tuple[str, ...] = ()
    """The kinds of parts, such as tools or reasoning, that the chat template does not print."""

    @property
    def length(self) -> int:
        """Tokens of the longest side."""
        return max(len(side.ids) for side in self.sides)

    def drop_reason(self, max_length: int | None) -> str | None:
        """Why the example is not trained on; None if it is.

        TRL drops the same examples, except pairs of two equal answers, whose sigmoid loss has no
        gradient.
        """
        first, *others = self.sides
        # Before the answers are compared: cut to the prompt they would be equal, and the reason
        # would mislead.
        if others and max_length is not None and self.num_prompt >= max_length:
            return f"the prompt alone fills max_length {max_length}"
        if others:
            is_equal = first.ids[:max_length] == others[0].ids[:max_length]
            within = f" within max_length {max_length}" * (
                max_length is not None and self.length > max_length
            )
            return f"{EQUAL_ANSWERS}{within}" if is_equal else None
        if max_length is not None and not any(first.truncated(max_length).trained):
            return f"no token to train on within max_length {max_length}"
        return None


def token_columns(examples: Iterable[EncodedExample], task: TaskName) -> dict[str, list[Any]]:
    """The examples as columns: TRL's own of tokenized examples, and `left_out`."""
    columns: dict[str, list[Any]] = {name: [] for name in (*TASKS[task].token_columns, "left_out")}
    for example in examples:
        if "labels" in TASKS[task].token_columns:
            (ids, trained), *_ = example.sides
            # -100 is what torch's cross entropy ignores: a mask needs no column of its own.
            labels = [
                token if is_trained else -100
                for token, is_trained in zip(ids, trained, strict=True)
            ]
            values: list[Any] = [ids, labels]
        elif len(example.sides) == 1:
            (ids, trained), *_ = example.sides
            start = trained.index(True) if True in trained else len(ids)
            values = [ids[:start], ids[start:]]
        else:
            chosen, rejected = (side.ids for side in example.sides)
            values = [
                chosen[: example.num_prompt],
                chosen[example.num_prompt :],
                rejected[example.num_prompt :],
            ]
        for column, value in zip(columns.values(), [*values, list(example.left_out)], strict=True):
            column.append(value)
    return columns


def from_token_columns(columns: dict[str, list[Any]], task: TaskName) -> Iterator[EncodedExample]:
    """Yield the examples of columns that `token_columns` made."""
    for *parts, kinds in zip(
        *(columns[name] for name in (*TASKS[task].token_columns, "left_out")), strict=True
    ):
        if "labels" in TASKS[task].token_columns:
            ids, labels = parts
            yield EncodedExample(
                (Tokens(ids, [label != -100 for label in labels]),), 0, tuple(kinds)
            )
        else:
            row = dict(zip(TASKS[task].token_columns, parts, strict=True))
            yield answered(row)._replace(left_out=tuple(kinds))


def answered(tokens: Mapping[str, list[int]]) -> EncodedExample:
    """The example in a row of TRL's columns prompt_ids, and completion_ids or chosen_ids and
    rejected_ids.
    """
    prompt = tokens["prompt_ids"]
    names = [name for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in tokens]
    return after_prompt(prompt, [prompt + tokens[name] for name in names], len(prompt))


def after_prompt(
    prompt: list[int], sides: list[list[int]], start: int | None = None
) -> EncodedExample:
    """The example whose sides start with the prompt; trained are the tokens after it.

    A template may render the prompt alone differently, and tokens may merge across its end: the
    completion starts at the first difference. start: where that is, if it is known.
    """
    if start is None:
        # The earlier of the two differences: what only one side shares with the prompt is not the
        # prompt's.
        start = min(num_shared(prompt, ids) for ids in sides)
    return EncodedExample(
        tuple(Tokens(ids, [i >= start for i in range(len(ids))]) for ids in sides), start
    )


def num_shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The number of equal tokens, or characters, at the start."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def last_visible(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """The position of the last token that is eos or not blank: of a conversation, the token that
    ends the last answer.

    0 if there is none.
    """
    eos = tokenizer.eos_token_id
    return next(
        (
            i
            for i in reversed(range(len(ids)))
            if ids[i] == eos or str(tokenizer.decode([ids[i]])).strip()
        ),
        0,
    )


def text_spans(
    sides: Sequence[Tokens], num_prompt: int, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, bool]]:
    """(text, trained) spans of an example: a chat is split where `trained` changes, a pair has
    three spans.
    """
    if len(sides) == 1:
        (ids, trained), *_ = sides
        starts = [0, *(i for i in range(1, len(ids)) if trained[i] != trained[i - 1])]
        texts = _split(ids, starts[1:], tokenizer)
        return [(text, trained[start]) for text, start in zip(texts, starts, strict=True)]
    (prompt, chosen), (_, rejected) = (_split(side.ids, [num_prompt], tokenizer) for side in sides)
    return [(prompt, False), (chosen, True), (rejected, True)]


def _split(ids: list[int], positions: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text between positions; decoded with all earlier tokens, as alone many would lose their
    leading space.
    """
    texts = [str(tokenizer.decode(ids[:end])) for end in [*positions, len(ids)]]
    return [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]


TRAINED, FIRST = 1, 2
"""Bits of a token in the column of `LossMasks`: the loss includes it; it is the first of its
example."""


class LossMasks:
    """The masks of examples in the order of their dataset, a byte per token: a column, packed as
    their tokens are.
    """

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
        # An example without tokens has no first one: its start is that of the next example, or
        # beyond the end.
        tokens[starts[:-1][self.lengths > 0]] |= FIRST
        return Dataset(pa.table({"tokens": pa.LargeListArray.from_arrays(starts, tokens)}))
