"""Training examples that are read while the model trains, for data larger than memory or disk.

A stream has no end: a split that ends is read again. It consists of blocks of examples that are valid, not held out,
drawn from the splits by their weights, and shuffled. A block is determined by its `start`, plain data with the place in
each split: after one block has been read again, a run resumes at the exact example, in the order of an uninterrupted
one.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from datasets import Dataset

from ..core.errors import UserError
from ..core.silence import quiet_libraries
from ..recipe import is_local
from ..tasks import TaskName
from . import hub
from .arrow import concatenated, examples_of, features_of
from .files import LocalReader
from .formats import Example, Layout
from .split import (
    SAMPLE_SIZE,
    LoadedSplit,
    SplitConfig,
    count_dropped,
    layout_of,
    local_files,
    read,
    source_record,
    valid_examples,
    without_indices,
)

# ---
# Held-out examples: a fraction or a number of the training examples, chosen by a hash of each.
#
# The choice depends on an example's content alone. It is the same wherever the example stands, whatever the other
# examples and the seed are, and a larger fraction holds out the examples of a smaller one too. A number is the fraction
# that has so many examples: as the data grows, examples return to training, and none is held out that was trained on.


def hold_out(
    splits: Sequence[LoadedSplit], fraction: float | None = None, examples: int | None = None
) -> tuple[list[LoadedSplit], LoadedSplit]:
    """(the splits without the held-out examples, these examples of all splits).

    fraction: of each split, about; or examples: of all, those first by `position`, fewer where equal ones would be on
    both sides. Raises UserError if no example is held out, or all are of one split.
    """
    refuse_other_kinds(splits)
    key, number = ("fraction", fraction) if fraction is not None else ("examples", examples)
    positions = [np.array([position(example) for example in examples_of(split.dataset)]) for split in splits]
    total = sum(map(len, positions))
    if examples is not None and examples >= total:
        raise UserError(f"data.eval.examples: {examples} are all of {total} examples; write a smaller number")
    end = fraction if examples is None else np.sort(np.concatenate(positions))[examples]
    remaining, chosen = [], []
    for split, own in zip(splits, positions, strict=True):
        is_held_out = own < end
        if is_held_out.all():
            raise UserError(f"data.eval.{key}: {number:g} holds out all examples of {split.name}; write a smaller one")
        chosen.append(split.dataset.select(np.flatnonzero(is_held_out)))
        remaining.append(
            replace(
                split,
                dataset=split.dataset.select(np.flatnonzero(~is_held_out)),
                num_examples=split.num_examples - int(is_held_out.sum()),
                source={**split.source, "num_held_out": int(is_held_out.sum())},
            )
        )
    dataset = concatenated(chosen)
    if len(dataset) == 0:
        reason = "" if examples is None else ": more are equal, and equal ones stay on one side"
        raise UserError(f"data.eval.{key}: {number:g} holds out none of {total} examples{reason}; write a larger one")
    layout = "; ".join(dict.fromkeys(split.layout for split in splits))
    names = " + ".join(split.name for split in splits)
    source = {"path": names, "split": "held out", key: number, "num_examples": len(dataset)}
    return remaining, LoadedSplit(dataset, layout, len(dataset), {}, source)


def position(example: Example) -> float:
    """A number in [0, 1), uniform over examples: the first 53 bits of the SHA-256 of an example in TRL's columns."""
    example = {
        column: value for column, value in example.items() if value is not None
    }  # no tools: as without the column
    text = json.dumps(example, sort_keys=True, ensure_ascii=False)
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 11) / 2**53


# ---
# Several splits as one dataset: of each the share given by its weight, shuffled together.
#
# Everything depends only on the weights and one seed, so that all ranks, and a resumed run, use the same examples.


class SourceConfig(SplitConfig, Protocol):
    """A split and its share; soren_align.recipe.TrainSplit is one."""

    weight: float


def mix(splits: Sequence[LoadedSplit], configs: Sequence[SourceConfig], seed: int) -> LoadedSplit:
    """The examples of all sources: each `weight` times, a fraction by sampling without replacement.

    configs: of `splits`. A single source of weight 1 is returned unchanged. Raises UserError if only some
    of the sources have turns, or texts have different columns, or a weight leaves no example of one.
    """
    if len(splits) == 1 and configs[0].weight == 1:
        return splits[0]
    refuse_other_kinds(splits)
    names = [split.name for split in splits]
    generator = np.random.default_rng(seed)
    samples = [_sample(len(s.dataset), source.weight, generator) for source, s in zip(configs, splits, strict=True)]
    for name, source, sample in zip(names, configs, samples, strict=True):
        if len(sample) == 0:
            raise UserError(
                f"data.train: a weight of {source.weight:g} leaves no example of {name}; write a larger one, or leave "
                "the source out"
            )
    starts = np.cumsum([0, *(len(split.dataset) for split in splits[:-1])])
    order = generator.permutation(sum(map(len, samples)))
    indices = np.concatenate([start + sample for start, sample in zip(starts, samples, strict=True)])[order]
    source_indices = np.repeat(np.arange(len(samples)), [len(sample) for sample in samples])[order]
    sources = [
        {**s.source, "layout": s.layout, "dropped": s.dropped, "weight": source.weight, "num_sampled": len(sample)}
        for source, s, sample in zip(configs, splits, samples, strict=True)
    ]
    return LoadedSplit(
        dataset=concatenated([split.dataset for split in splits]).select(indices),
        layout="; ".join(dict.fromkeys(split.layout for split in splits)),
        num_examples=len(indices) + sum(sum(split.dropped.values()) for split in splits),
        dropped=dict(sum((Counter(split.dropped) for split in splits), Counter())),
        source={"path": " + ".join(names), "seed": seed, "num_examples": len(indices), "sources": sources},
        notices=tuple(notice for split in splits for notice in split.notices),
        source_indices=tuple(source_indices.tolist()),
    )


def refuse_other_kinds(splits: Sequence[LoadedSplit]) -> None:
    """Raise UserError if only some of the sources have turns, or texts have different columns."""
    columns = [", ".join(split.dataset.column_names) for split in splits]
    if other := next((i for i, split in enumerate(splits) if split.kind != splits[0].kind), None):
        raise UserError(
            f"data.train: {splits[0].name} has {splits[0].layout} ({columns[0]}) and {splits[other].name} "
            f"{splits[other].layout} ({columns[other]}): texts do not mix with others; train on one kind"
        )


def _sample(num_examples: int, weight: float, generator: np.random.Generator) -> np.ndarray:
    """Indices of the sampled examples, not shuffled."""
    repeats = int(weight)
    fraction = generator.permutation(num_examples)[: round((weight - repeats) * num_examples)]
    return np.concatenate([np.tile(np.arange(num_examples), repeats), fraction])


NUM_PREVIEWED = 1_000
"""First records of each split that are checked, tokenized and counted before training."""
NUM_SEARCHED = 10_000
"""First records of each split among which the held-out examples of the evaluation loss are found."""
MAX_REASONS = 50
"""Different reasons of dropped examples that are counted one by one."""
_OTHER_REASONS = "for other reasons"
State = dict[str, Any]
"""Plain data, for JSON."""


class Reader(Protocol):
    """The records of one pass over a split, with their places for messages."""

    @property
    def position(self) -> Any:
        """After the record that was returned last; plain data."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """From the position that the reader was opened at."""
        ...


@dataclass(frozen=True)
class StreamedSplit:
    """One split of a stream."""

    config: SourceConfig
    task: TaskName
    layout: Layout
    place: str
    """For messages."""
    source: dict[str, Any]
    """As `LoadedSplit.source`, without a number of examples."""
    open: Callable[[Any], Reader]
    """The records from a reader's position; None for the first."""

    def first(self, num_records: int) -> LoadedSplit:
        """The valid examples among the first records. Raises UserError if there are invalid ones to refuse."""
        num_records = min(num_records, self.config.limit or num_records)
        records = list(islice(self.open(None), num_records))
        valid = valid_examples(lambda: records, self.layout, self.task, self.place, self.config.bad_examples)
        features = features_of(self.layout.outputs, self.layout.has_turns)
        columns = {name: [example.get(name) for _, example in pairs] for pairs in [list(valid)] for name in features}
        dropped = count_dropped(records, self.layout, self.config)
        dataset = Dataset.from_dict(columns, features=features)
        return LoadedSplit(dataset, self.layout.description, len(records), dropped, self.source)


def open_split(config: SourceConfig, task: TaskName) -> StreamedSplit:
    """Open the split of `config`. Raises UserError if it cannot be read, or has no columns of the task."""
    with quiet_libraries():
        if is_local(config.path):
            local, layout = local_files(config, task)
            source = source_record(config, local.sampled_origin(), layout)
            return StreamedSplit(config, task, layout, config.path, source, lambda at: LocalReader(local, at))
        place = f"{config.path} ({', '.join(filter(None, (config.name, config.split)))})"
        dataset, revision = hub.stream(config.path, config.split, config.revision, config.name)
        layout = layout_of([e for _, e in islice(hub.StreamReader(dataset, place), SAMPLE_SIZE)], config, task, place)
        selected = dataset.select_columns(layout.columns_read)
        origin = {"split": config.split, "revision": revision} | ({"name": config.name} if config.name else {})
        source = source_record(config, origin, layout)
        return StreamedSplit(config, task, layout, place, source, lambda at: hub.StreamReader(selected, place, at))


class Block(NamedTuple):
    """Examples of a stream in their order, and the states of the stream before and after them."""

    start: State
    end: State
    examples: list[Example]


@dataclass(frozen=True)
class Stream:
    """All training examples, without end. Equal on all ranks."""

    splits: Sequence[StreamedSplit]
    block_size: int
    seed: int
    held_out_fraction: float = 0.0

    @property
    def columns(self) -> tuple[str, ...]:
        """TRL's columns, of all splits."""
        return tuple(dict.fromkeys(name for split in self.splits for name in split.layout.outputs))

    @property
    def start(self) -> State:
        """Of the first block."""
        first = {"passes": 0, "num_read": 0, "position": None}
        return {"number": 0, "num_read": 0, "dropped": {}, "splits": [first] * len(self.splits)}

    def blocks(self, start: State) -> Iterator[Block]:
        """The blocks from the one with this start.

        A block of one split ends where the split does. Raises UserError at an invalid example to refuse.
        """
        number, counts = start["number"], _Counts(start["num_read"], Counter(start["dropped"]))
        cursors = [
            _Cursor(split, state, self.held_out_fraction, counts)
            for split, state in zip(self.splits, start["splits"], strict=True)
        ]
        weights = np.array([split.config.weight for split in self.splits])
        while True:
            generator = np.random.default_rng([self.seed, number])
            examples = []
            for index in generator.choice(len(cursors), self.block_size, p=weights / weights.sum()):
                example = cursors[index].draw()
                while example is None and len(cursors) > 1:
                    example = cursors[index].draw()
                if example is None:
                    break
                examples.append(example)
            examples = [examples[i] for i in generator.permutation(len(examples))]
            number += 1
            end = {"number": number, "num_read": counts.num_read, "dropped": dict(counts.dropped)}
            end["splits"] = [cursor.state for cursor in cursors]
            if examples:
                yield Block(start, end, examples)
            start = end


@dataclass
class _Counts:
    """Records read, and those dropped by reason."""

    num_read: int
    dropped: Counter[str]

    def drop(self, reason: str) -> None:
        """Count an invalid record."""
        reason = without_indices(reason)
        if reason not in self.dropped and len(self.dropped) >= MAX_REASONS:
            reason = _OTHER_REASONS
        self.dropped[reason] += 1


class _Cursor:
    """A place in a split, from which its examples are drawn, pass after pass."""

    def __init__(self, split: StreamedSplit, state: State, held_out_fraction: float, counts: _Counts):
        self.split, self.held_out_fraction, self.counts = split, held_out_fraction, counts
        self.passes, self.num_read = state["passes"], state["num_read"]
        self._open(state["position"])

    @property
    def state(self) -> State:
        return {"passes": self.passes, "num_read": self.num_read, "position": self.reader.position}

    def draw(self) -> Example | None:
        """The next valid example that is not held out; None at the end of each pass."""
        for place, record in self.records:
            self.num_read += 1
            self.counts.num_read += 1
            example = read(record, self.split.layout)
            if isinstance(example, str):
                self._drop(place, example)
            elif not self.held_out_fraction or position(example) >= self.held_out_fraction:
                return example
        self.passes, self.num_read = self.passes + 1, 0
        self._open(None)
        return None

    def _open(self, at: Any) -> None:
        limit = self.split.config.limit
        self.reader = self.split.open(at)
        self.records = islice(self.reader, None if limit is None else limit - self.num_read)

    def _drop(self, place: str, reason: str) -> None:
        if self.split.config.bad_examples == "refuse":
            raise UserError(
                f"{place}: cannot be used for {self.split.task}: {reason} (write bad_examples: drop beside the path, "
                "and rerun the same command to resume)"
            )
        self.counts.drop(reason)


@dataclass(frozen=True, kw_only=True)
class Preview(LoadedSplit):
    """The examples among the first NUM_PREVIEWED records of each split of a stream."""

    stream: Stream


def open_stream(
    configs: Sequence[SourceConfig], task: TaskName, block_size: int, seed: int, fraction: float | None = None
) -> tuple[Preview, LoadedSplit | None]:
    """(the preview of a stream, and the stream; the held-out examples).

    fraction: of the examples, as `hold_out` chooses them, are not in the stream; those among the first NUM_SEARCHED
    records of each split are the held-out ones. Raises UserError if a split cannot be used, or two do not mix.
    """
    splits = [open_split(config, task) for config in configs]
    first = [split.first(NUM_PREVIEWED) for split in splits]
    refuse_other_kinds(first)
    held_out = None
    if fraction is not None:
        _, held_out = hold_out([split.first(NUM_SEARCHED) for split in splits], fraction)
        held_out = replace(held_out, source={**held_out.source, "num_searched": NUM_SEARCHED})
        first = [_without_held_out(split, fraction) for split in first]
    preview = Preview(
        dataset=first[0].dataset if len(first) == 1 else concatenated([split.dataset for split in first]),
        layout="; ".join(dict.fromkeys(split.layout for split in first)),
        num_examples=sum(split.num_examples for split in first),
        dropped=dict(sum((Counter(split.dropped) for split in first), Counter())),
        source=_source(first, configs, block_size),
        stream=Stream(splits, block_size, seed, fraction or 0.0),
    )
    return preview, held_out


def _source(first: Sequence[LoadedSplit], configs: Sequence[SourceConfig], block_size: int) -> dict[str, Any]:
    """For run.json."""
    streaming = {"streaming": {"shuffle_buffer": block_size}}
    if len(first) == 1:
        return first[0].source | streaming
    sources = [
        {**split.source, "layout": split.layout, "weight": config.weight}
        for split, config in zip(first, configs, strict=True)
    ]
    return {"path": " + ".join(split.name for split in first), "sources": sources} | streaming


def _without_held_out(split: LoadedSplit, fraction: float) -> LoadedSplit:
    is_kept = [position(example) >= fraction for example in examples_of(split.dataset)]
    dataset = split.dataset.select(np.flatnonzero(is_kept))
    return replace(split, dataset=dataset, num_examples=split.num_examples - len(split.dataset) + len(dataset))
