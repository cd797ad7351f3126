"""Statistics of a dataset: numbers of examples and tokens, and one example as text."""

from array import array
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from datasets import Dataset
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..core.errors import printable
from ..run.record import describe_truncation
from ..tasks import TASKS, TaskName
from .encode import BATCH_SIZE, encode
from .masks import EQUAL_ANSWERS, LossMasks, last_visible, text_spans
from .pairs import LabelCounter, LabelStats, PairCounter, PairStats

HEAD, TAIL = 600, 200
"""Characters of a long text that are shown."""


@dataclass(frozen=True)
class DatasetStats:
    """Numbers of a dataset's examples and tokens, as TRL will train on them."""

    task: TaskName
    num_examples: int
    num_kept: int
    dropped: dict[str, int]
    """Reason -> number of examples."""
    num_truncated: int
    """Kept examples that are longer than max_length."""
    lengths: dict[str, int]
    """Tokens of an example before truncation (of a pair: its longer side): p50, p90, p99 and
    max."""
    kept_lengths: array
    """Tokens of each kept example, after truncation (of a pair: of its longer side)."""
    num_tokens: int
    """Tokens of the kept examples, after truncation; a pair counts both sides, each with its
    prompt."""
    num_trained_tokens: int
    trained_share: float
    example: list[tuple[str, bool]]
    """(text, trained) spans of the first kept example; for DPO exactly prompt, chosen, rejected."""
    stop_token_trained: bool
    """Whether any kept example ends in a trained eos. If none does, the model never learns to
    stop."""
    num_kept_by_source: tuple[int, ...] = ()
    """The number of kept examples of each source of a mixture."""
    num_left_out: dict[str, int] = field(default_factory=dict)
    """Parts that the chat template does not print, such as tools or reasoning -> number of examples
    with them."""
    num_truncated_tokens: int = 0
    """Tokens of kept examples beyond max_length, which are not trained on."""
    num_unknown_tokens: int = 0
    """Tokens of the kept examples, before truncation, that are the tokenizer's unk_token, in place
    of text that it cannot represent."""
    max_token_id: int = -1
    """The largest token id of the kept examples, after truncation."""
    pairs: PairStats | None = None
    """The counts of preference pairs."""
    labels: LabelStats | None = None
    """The counts of labelled answers."""

    def describe_truncation(self) -> str:
        """Describe truncated examples."""
        return describe_truncation(self.num_truncated, self.num_truncated_tokens, self.num_tokens)


def dataset_stats(
    dataset: Dataset,
    task: TaskName,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    assistant_only_loss: bool = False,
    completion_only_loss: bool = True,
    source_indices: Sequence[int] = (),
    masks: LossMasks | None = None,
) -> DatasetStats:
    """Statistics of a dataset from `load_split`, computed without a model.

    tokenizer: with the template and eos of the training; not modified.
    max_length: TRL's, None for no truncation. With packing pass None: TRL then drops no example,
        and truncates by `trainer.packing_strategy`.
    completion_only_loss: of prompts and completions; has no effect on whole conversations.
    source_indices: of a mixture, the index of each example's source.
    masks: the loss mask of each example of SFT, before truncation, is added to it.
    """
    tokenizer = deepcopy(tokenizer)
    # Too long examples are counted below; the tokenizer would only warn about the first.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    # GPT-2's unk_token is its eos_token, which examples have anyway.
    unknown_id: Any = tokenizer.unk_token_id
    counts_unknown = unknown_id not in (None, tokenizer.eos_token_id, tokenizer.bos_token_id)
    lengths: list[int] = []
    kept_lengths = array("i")
    dropped: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    num_kept: Counter[int] = Counter()  # by source
    sums: Counter[str] = Counter()
    max_id, has_stop, first = -1, False, []
    pairs = PairCounter() if TASKS[task].answers else None
    labels = LabelCounter() if "label" in TASKS[task].passed_on else None
    good: Any = dataset["label"][:] if labels else ()
    batches: Any = dataset.iter(batch_size=BATCH_SIZE)
    encoded = (
        encode(batch, task, tokenizer, assistant_only_loss, completion_only_loss)
        for batch in batches
    )
    for index, example in enumerate(chain.from_iterable(encoded)):
        lengths.append(example.length)
        if masks is not None:
            masks.add(example.sides[0].trained)
        reason = example.drop_reason(max_length)
        # Equal answers are counted as a finding about the data too; pairs that are too long are
        # none.
        if pairs and reason and reason.startswith(EQUAL_ANSWERS):
            pairs.add(index, None)
        if reason:
            dropped[reason] += 1
            continue
        num_kept[source_indices[index] if source_indices else 0] += 1
        left_out.update(example.left_out)
        sides = [side.truncated(max_length) for side in example.sides]
        if pairs:
            pairs.add(index, sides)
        if labels:
            labels.add(index, sides[0], good[index])
        kept_lengths.append(max(len(side.ids) for side in sides))
        num_tokens, num_all = (sum(len(side.ids) for side in s) for s in (sides, example.sides))
        sums["truncated"] += max_length is not None and example.length > max_length
        sums["truncated tokens"] += num_all - num_tokens
        sums["tokens"] += num_tokens
        sums["trained"] += sum(sum(side.trained) for side in sides)
        if counts_unknown:
            sums["unknown"] += sum(side.ids.count(unknown_id) for side in example.sides)
        max_id = max(max_id, *(max(side.ids, default=-1) for side in sides))
        (ids, trained), *_ = sides
        # An example that was cut has lost its end: only whole ones show whether the end is trained.
        if not has_stop and ids and len(ids) == len(example.sides[0].ids):
            last = last_visible(ids, tokenizer)
            has_stop = ids[last] == tokenizer.eos_token_id and trained[last]
        first = first or text_spans(sides, example.num_prompt, tokenizer)
    # inverted_cdf: a length that some example has, and a whole number.
    percentiles = np.percentile(lengths or [0], (50, 90, 99), method="inverted_cdf")
    num_sources = max(source_indices) + 1 if source_indices else 0
    return DatasetStats(
        task=task,
        num_examples=len(lengths),
        num_kept=num_kept.total(),
        dropped=dict(dropped),
        num_truncated=sums["truncated"],
        lengths=dict(
            zip(
                ("p50", "p90", "p99", "max"),
                (*map(int, percentiles), max(lengths or [0])),
                strict=True,
            )
        ),
        kept_lengths=kept_lengths,
        num_tokens=sums["tokens"],
        num_trained_tokens=sums["trained"],
        trained_share=sums["trained"] / max(1, sums["tokens"]),
        example=first,
        stop_token_trained=has_stop,
        num_kept_by_source=tuple(num_kept[source] for source in range(num_sources)),
        num_truncated_tokens=sums["truncated tokens"],
        num_left_out=dict(left_out),
        num_unknown_tokens=sums["unknown"],
        max_token_id=max_id,
        pairs=pairs.stats() if pairs else None,
        labels=labels.stats() if labels else None,
    )


def show_example(stats: DatasetStats, color: bool = True) -> Text:
    """The example for the terminal: trained text in green, or in [[double brackets]] without
    color.
    """
    shown = Text()
    answers = TASKS[stats.task].answers
    names = ("prompt", *answers) if answers else ()
    for i, (text, trained) in enumerate(stats.example):
        if names:
            shown.append(("\n" if i else "") + names[i] + "\n", style="bold")
        text = printable(text)
        if len(text) > HEAD + TAIL:
            text = f"{text[:HEAD]} ... {len(text) - HEAD - TAIL} characters ... {text[-TAIL:]}"
        shown.append(
            f"[[{text}]]" if trained and not color else text, style="green" if trained else "dim"
        )
    return shown
