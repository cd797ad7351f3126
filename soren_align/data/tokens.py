"""The tokens of an example, which of them are trained, their truncation, and their columns in a dataset."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from .columns import Task

TOKEN_COLUMNS: dict[Task, tuple[str, ...]] = {
    "sft": ("input_ids", "labels"),
    "dpo": ("prompt_ids", "chosen_ids", "rejected_ids"),
}
"""TRL's columns of tokenized examples."""


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

    def drop_reason(self, task: Task, max_length: int | None) -> str | None:
        """Why TRL leaves the example out; None if it does not."""
        if max_length is None:
            return None
        if task == "sft" and not any(self.sides[0].truncated(max_length).trained):
            return f"no token to train on within max_length {max_length}"
        if task == "dpo" and self.num_prompt >= max_length:
            return f"the prompt alone fills max_length {max_length}"
        return None


def token_columns(examples: Iterable[EncodedExample], task: Task) -> dict[str, list[Any]]:
    """The examples as columns: TRL's own of tokenized examples, and `left_out`."""
    columns: dict[str, list[Any]] = {name: [] for name in (*TOKEN_COLUMNS[task], "left_out")}
    for example in examples:
        if task == "sft":
            (ids, trained), *_ = example.sides
            labels = [token if is_trained else -100 for token, is_trained in zip(ids, trained, strict=True)]
            values: list[Any] = [ids, labels]
        else:
            chosen, rejected = (side.ids for side in example.sides)
            values = [chosen[: example.num_prompt], chosen[example.num_prompt :], rejected[example.num_prompt :]]
        for column, value in zip(columns.values(), [*values, list(example.left_out)], strict=True):
            column.append(value)
    return columns


def from_token_columns(columns: dict[str, list[Any]], task: Task) -> Iterator[EncodedExample]:
    """The inverse of `token_columns`."""
    for *parts, left_out in zip(*(columns[name] for name in (*TOKEN_COLUMNS[task], "left_out")), strict=True):
        if task == "sft":
            ids, labels = parts
            yield EncodedExample((Tokens(ids, [label != -100 for label in labels]),), 0, tuple(left_out))
        else:
            prompt, *answers = parts
            yield _after(len(prompt), [prompt + answer for answer in answers])._replace(left_out=tuple(left_out))


def after_prompt(prompt: list[int], sides: list[list[int]]) -> EncodedExample:
    """The example whose sides start with the prompt; trained are the tokens after it.

    A template may render the prompt alone differently, and tokens may merge across its end: the completion starts at
    the first difference.
    """
    return _after(min(num_shared(prompt, ids) for ids in sides), sides)


def num_shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The number of equal tokens, or characters, at the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _after(num_prompt: int, sides: list[list[int]]) -> EncodedExample:
    return EncodedExample(tuple(Tokens(ids, [i >= num_prompt for i in range(len(ids))]) for ids in sides), num_prompt)


def ends_in_trained_stop(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the last token, blank ones aside, is the tokenizer's eos and trained."""
    for token, trained in zip(reversed(tokens.ids), reversed(tokens.trained), strict=True):
        if token == tokenizer.eos_token_id:
            return trained
        if str(tokenizer.decode([token])).strip():
            return False
    return False


def text_spans(sides: Sequence[Tokens], num_prompt: int, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """(text, trained) spans of an example: a chat is split where `trained` changes, a pair has three spans."""
    if len(sides) == 1:
        (ids, trained), *_ = sides
        starts = [0, *(i for i in range(1, len(ids)) if trained[i] != trained[i - 1])]
        texts = _split(ids, starts[1:], tokenizer)
        return [(text, trained[start]) for text, start in zip(texts, starts, strict=True)]
    (prompt, chosen), (_, rejected) = (_split(side.ids, [num_prompt], tokenizer) for side in sides)
    return [(prompt, False), (chosen, True), (rejected, True)]


def _split(ids: list[int], positions: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text between positions; decoded with all earlier tokens, as alone many would lose their leading space."""
    texts = [str(tokenizer.decode(ids[:end])) for end in [*positions, len(ids)]]
    return [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]
