"""The account of a dataset: examples kept and dropped, tokens in total and trained, and one example as text."""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from datasets import Dataset
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..core.errors import printable
from ..run.record import describe_truncation
from ..tasks import TASKS, TaskName
from .encode import BATCH_SIZE, encode
from .masks import EncodedExample, LossMasks, ends_in_trained_stop, text_spans


@dataclass(frozen=True)
class Account:
    """Numbers of a dataset's examples and tokens, as TRL will train on them."""

    task: TaskName
    num_examples: int
    num_kept: int
    dropped: dict[str, int]
    """Reason -> number of examples."""
    num_truncated: int
    """Kept examples that are longer than max_length."""
    lengths: dict[str, int]
    """Tokens of an example before truncation (of a pair: its longer side): p50, p90, p99 and max."""
    num_tokens: int
    """Of the kept examples, after truncation; a pair counts both sides, each with its prompt."""
    num_trained_tokens: int
    trained_share: float
    example: list[tuple[str, bool]]
    """(text, trained) spans of the first kept example; for DPO exactly prompt, chosen, rejected."""
    stop_token_trained: bool
    """Whether any kept example ends in a trained eos. If none does, the model never learns to stop."""
    num_kept_by_source: tuple[int, ...] = ()
    """Of a mixture: the kept examples of each source."""
    num_left_out: dict[str, int] = field(default_factory=dict)
    """Parts that the chat template does not print, such as tools or reasoning -> number of examples with them."""
    num_truncated_tokens: int = 0
    """Tokens of kept examples beyond max_length, which are not trained on."""
    num_unknown_tokens: int = 0
    """Of the kept examples, before truncation: the tokenizer's unk_token, in place of text that it cannot represent."""
    max_token_id: int = -1
    """Of the kept examples, after truncation."""

    def describe_truncation(self) -> str:
        """Describe truncated examples."""
        return describe_truncation(self.num_truncated, self.num_truncated_tokens, self.num_tokens)


def account(
    dataset: Dataset,
    task: TaskName,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    assistant_only_loss: bool = False,
    completion_only_loss: bool = True,
    source_indices: Sequence[int] = (),
    on_examples: Callable[[int], object] | None = None,
    masks: LossMasks | None = None,
) -> Account:
    """The account of a dataset from `load_split`, computed without a model.

    tokenizer: with the template and eos of the training; not modified.
    max_length: TRL's, None for no truncation. With packing pass None: TRL then drops no example, and truncates by
        `trainer.packing_strategy`.
    completion_only_loss: of prompts and completions; has no effect on whole conversations.
    source_indices: of a mixture, the index of each example's source.
    on_examples: called with the number of examples just tokenized, for a progress bar.
    masks: the loss mask of each example of SFT, before truncation, is added to it.
    """
    tokenizer = deepcopy(tokenizer)
    # Too long examples are counted below; the tokenizer would only warn about the first.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    sums = _Sums(task, tokenizer, max_length)
    for batch in dataset.iter(batch_size=BATCH_SIZE):
        assert isinstance(batch, dict)
        num_before = len(sums.lengths)
        for example in encode(batch, task, tokenizer, assistant_only_loss, completion_only_loss):
            source = source_indices[len(sums.lengths)] if source_indices else 0
            sums.num_kept[source] += sums.add(example)
            if masks is not None:
                masks.add(example.sides[0].trained)
        if on_examples is not None:
            on_examples(len(sums.lengths) - num_before)
    if not source_indices:
        return sums.account()
    num_kept = tuple(sums.num_kept[source] for source in range(max(source_indices) + 1))
    return replace(sums.account(), num_kept_by_source=num_kept)


class _Sums:
    """Running sums over examples."""

    def __init__(self, task: TaskName, tokenizer: PreTrainedTokenizerBase, max_length: int | None):
        self.task: TaskName = task
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.lengths: list[int] = []
        self.dropped: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.num_kept: Counter[int] = Counter()  # by source
        # GPT-2's unk_token is its eos_token, which examples have anyway.
        ends = (tokenizer.eos_token_id, tokenizer.bos_token_id)
        unknown: Any = tokenizer.unk_token_id
        self.unknown: int | None = None if unknown in ends else unknown
        self.num_unknown = 0
        self.max_id = -1
        self.num_truncated = self.num_truncated_tokens = self.num_tokens = self.num_trained = 0
        self.example: list[tuple[str, bool]] = []
        self.stop_token_trained = False

    def add(self, example: EncodedExample) -> bool:
        """Count an example; returns whether it is kept."""
        self.lengths.append(example.length)
        if reason := example.drop_reason(self.max_length):
            self.dropped[reason] += 1
            return False
        self.left_out.update(example.left_out)
        sides = [side.truncated(self.max_length) for side in example.sides]
        self.num_truncated += self.max_length is not None and example.length > self.max_length
        self.num_tokens += sum(len(side.ids) for side in sides)
        self.max_id = max(self.max_id, *(max(side.ids, default=-1) for side in sides))
        self.num_truncated_tokens += sum(len(side.ids) for side in example.sides) - sum(len(side.ids) for side in sides)
        if self.unknown is not None:
            self.num_unknown += sum(side.ids.count(self.unknown) for side in example.sides)
        self.num_trained += sum(sum(side.trained) for side in sides)
        if not self.stop_token_trained and len(sides[0].ids) == len(example.sides[0].ids):
            self.stop_token_trained = ends_in_trained_stop(sides[0], self.tokenizer)
        if not self.example:
            self.example = text_spans(sides, example.num_prompt, self.tokenizer)
        return True

    def account(self) -> Account:
        lengths = self.lengths or [0]
        percentiles = np.percentile(lengths, (50, 90, 99), method="inverted_cdf")
        return Account(
            task=self.task,
            num_examples=len(self.lengths),
            num_kept=len(self.lengths) - self.dropped.total(),
            dropped=dict(self.dropped),
            num_truncated=self.num_truncated,
            lengths=dict(zip(("p50", "p90", "p99", "max"), (*map(int, percentiles), max(lengths)), strict=True)),
            num_tokens=self.num_tokens,
            num_trained_tokens=self.num_trained,
            trained_share=self.num_trained / max(1, self.num_tokens),
            example=self.example,
            stop_token_trained=self.stop_token_trained,
            num_truncated_tokens=self.num_truncated_tokens,
            num_left_out=dict(self.left_out),
            num_unknown_tokens=self.num_unknown,
            max_token_id=self.max_id,
        )


def show_example(account: Account, color: bool = True) -> Text:
    """The example for the terminal: trained text in green, or in [[double brackets]] without color."""
    shown = Text()
    answers = TASKS[account.task].answers
    names = ("prompt", *answers) if answers else ()
    for i, (text, trained) in enumerate(account.example):
        if names:
            shown.append(("\n" if i else "") + names[i] + "\n", style="bold")
        text = _shortened(printable(text))
        shown.append(f"[[{text}]]" if trained and not color else text, style="green" if trained else "dim")
    return shown


def _shortened(text: str, head: int = 600, tail: int = 200) -> str:
    if len(text) <= head + tail:
        return text
    return f"{text[:head]} ... {len(text) - head - tail} characters ... {text[-tail:]}"
