"""The tokens of an example: loss mask and truncation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..core.errors import UserError
from ..tasks import TASKS, TaskName
from .turns import EMPTY_ANSWER, REASONING, Turn, for_template, without

EQUAL_ANSWERS = "two answers with the same tokens"
"""The start of the reason to drop such pairs."""
EMPTY_REASON = "an answer has only tool calls, which the chat template does not print"
"""Training on such an example would teach silence. It is dropped, and not only its answer: what
follows would be trained as an answer without the call and its result."""


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
            labels = [
                token if is_trained else -100
                for token, is_trained in zip(ids, trained, strict=True)
            ]
            values: list[Any] = [ids, labels]
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
    """The inverse of `token_columns`."""
    for *parts, kinds in zip(
        *(columns[name] for name in (*TASKS[task].token_columns, "left_out")), strict=True
    ):
        if "labels" in TASKS[task].token_columns:
            ids, labels = parts
            yield EncodedExample(
                (Tokens(ids, [label != -100 for label in labels]),), 0, tuple(kinds)
            )
        else:
            yield pair_of(dict(zip(TASKS[task].token_columns, parts, strict=True)))._replace(
                left_out=tuple(kinds)
            )


def pair_of(tokens: Mapping[str, list[int]]) -> EncodedExample:
    """The pair in a row of TRL's columns prompt_ids, chosen_ids and rejected_ids."""
    prompt = tokens["prompt_ids"]
    return after_prompt(
        prompt, [prompt + tokens["chosen_ids"], prompt + tokens["rejected_ids"]], len(prompt)
    )


def after_prompt(
    prompt: list[int], sides: list[list[int]], start: int | None = None
) -> EncodedExample:
    """The example whose sides start with the prompt; trained are the tokens after it.

    A template may render the prompt alone differently, and tokens may merge across its end: the
    completion starts at the first difference. start: where that is, if it is known.
    """
    if start is None:
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


Span = tuple[int, int]


class Rendering:
    """A conversation as its chat template renders it, and the parts of that text that belong to its
    turns.

    For templates that do not mark the trained tokens, and turns of weight 0. The text up to a turn,
    with the template's generation prompt, is the prompt of an answer, and the text up to its end
    adds the answer and its stop token. That holds for templates whose rendering of the first turns
    does not change as others follow; each example is checked, and for others UserError is raised.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, turns: list[Turn], options: dict[str, Any]
    ):
        """options: keywords of apply_chat_template."""
        self.tokenizer, self.turns, self.options = tokenizer, turns, options

    def of(self, turns: list[Turn], prompts: bool = False, **options: Any) -> str:
        """The text of other turns. prompts: whether the generation prompt follows."""
        how: dict[str, Any] = {
            "tokenize": False,
            "add_generation_prompt": prompts,
            **self.options,
            **options,
        }
        return str(self.tokenizer.apply_chat_template(for_template(turns), **how))

    @cached_property
    def text(self) -> str:
        """The text of the conversation."""
        return self.of(self.turns)

    def answer_spans(self) -> list[Span]:
        """The parts that the model writes as the assistant, each from the prompt to its stop token;
        without answers of weight 0."""
        tokenizer: Any = self.tokenizer
        stop_tokens = tuple(
            str(token) for token in {tokenizer.eos_token, *tokenizer.added_tokens_encoder} if token
        )
        spans = []
        for i, turn in enumerate(self.turns):
            if turn["role"] == "assistant" and turn.get("weight", 1):
                prompt = self._beginning(i, prompts=True)
                # Some prompts have a <think> that this answer does not have.
                is_prompt = self.text.startswith(prompt)
                start = (
                    len(prompt) if is_prompt else max(self.end(i), num_shared(prompt, self.text))
                )
                end = self.end(i + 1)
                stripped = self.text[:end].rstrip()  # after a stop token the model has stopped
                spans.append((start, len(stripped) if stripped.endswith(stop_tokens) else end))
        return spans

    def left_out(self, trained: list[Turn]) -> list[str]:
        """The kinds of parts without which the text is the same: the template ignores them.

        EMPTY_ANSWER is among them if it prints nothing of an answer made of tool calls alone, or
        with reasoning.
        trained: turns that are, unless their weight is 0.
        """
        turns, tools = self.turns, self.options.get("tools", [])
        has_parts = (
            turn.keys() - {"role", "content", "weight"} or turn["role"] == "tool" for turn in turns
        )
        if not tools and not any(has_parts):
            return []
        last_user = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=0)
        earlier, later = turns[:last_user], turns[last_user:]
        changed = {
            "tools": (turns, []),
            "tool calls": ([without(turn, "tool_calls") for turn in turns], tools),
            "tool results": (
                [turn | {"content": ""} if turn["role"] == "tool" else turn for turn in turns],
                tools,
            ),
            "reasoning": (earlier + [without(turn, *REASONING) for turn in later], tools),
            "the reasoning of earlier answers": (
                [without(turn, *REASONING) for turn in earlier] + later,
                tools,
            ),
        }
        text, kinds = self.text, []
        for kind, others in changed.items():
            with suppress(Exception):  # of the template
                if others != (turns, tools) and self.of(others[0], tools=others[1] or None) == text:
                    kinds.append(kind)
        prints_reasoning = not any("reasoning" in kind for kind in kinds)
        is_silent = "tool calls" in kinds and any(
            turn["role"] == "assistant"
            and turn.get("weight", 1)
            and not turn["content"].strip()
            and not (prints_reasoning and any(turn.get(key) for key in REASONING))
            for turn in trained
        )
        return [*kinds, EMPTY_ANSWER] if is_silent else kinds

    def end(self, num_turns: int) -> int:
        """The length of the rendering of the first turns, with which the text starts."""
        if num_turns in (0, len(self.turns)):
            return len(self.text) if num_turns else 0
        beginning = self._beginning(num_turns)
        if not self.text.startswith(beginning):
            raise self._unstable()
        return len(beginning)

    def _beginning(self, num_turns: int, prompts: bool = False) -> str:
        try:
            return self.of(self.turns[:num_turns], prompts)
        except Exception:  # anything that a template raises, such as "a user's turn must follow"
            raise self._unstable() from None

    def _unstable(self) -> UserError:
        return UserError(
            "the chat template renders earlier turns differently when later turns are added, so the assistant's "
            f"tokens of {str(self.turns[-1]['content'])[:60]!r} cannot be identified. Set model.chat_template to a "
            "template with {% generation %}...{% endgeneration %} around the assistant's turns; or train all "
            "tokens, without assistant_only_loss and without weights of turns"
        )


def inside(spans: Sequence[Span], offsets: Sequence[Span]) -> list[bool]:
    """For each token, by its characters' (start, end), whether it has one inside a span.
    Spans are in order.
    """
    marks, position = [], 0
    for start, end in offsets:
        while position < len(spans) and spans[position][1] <= start:
            position += 1
        marks.append(
            position < len(spans) and max(start, spans[position][0]) < min(end, spans[position][1])
        )
    return marks


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
        tokens[starts[:-1][self.lengths > 0]] |= FIRST
        return Dataset(pa.table({"tokens": pa.LargeListArray.from_arrays(starts, tokens)}))
