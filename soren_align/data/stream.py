"""Training examples that are read while the model trains, for data larger than memory or disk.

A stream has no end: a split that ends is read again. It consists of blocks of examples that are
valid, not held out, drawn from the splits by their weights, and shuffled. A block is determined by
its `start`, plain data with the place in each split: after one block has been read again, a run
resumes at the exact example, in the order of an uninterrupted one.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

from ..core.errors import UserError
from ..core.silence import quiet_libraries
from ..recipe import TrainSplit, is_local
from ..tasks import TaskName
from . import hub
from .arrow import examples_of, features_of
from .files import LocalReader
from .formats import Example, Format
from .split import (
    SAMPLE_SIZE,
    LoadedSplit,
    checked,
    count_alike,
    format_of,
    hold_out,
    joined,
    local_files,
    position,
    read,
    refuse_other_kinds,
    source_record,
    unread_notices,
    without_indices,
)

NUM_PREVIEWED = 1_000
"""First records of each split that are checked, tokenized and counted before training."""
NUM_SEARCHED = 10_000
"""First records of each split among which the held-out examples of the evaluation loss are
found."""
MAX_REASONS = 50
"""Different reasons of dropped examples that are counted one by one."""
_OTHER_REASONS = "other reasons"
State = dict[str, Any]
"""Plain data, for JSON."""


@dataclass(frozen=True)
class StreamedSplit:
    """One split of a stream."""

    config: TrainSplit
    task: TaskName
    data_format: Format
    place: str
    """The split's name for messages."""
    source: dict[str, Any]
    """The origin, as `LoadedSplit.source`, without a number of examples."""
    open: Callable[[Any], LocalReader | hub.StreamReader]
    """The records from a reader's position; None for the first."""

    def first(self, num_records: int) -> LoadedSplit:
        """The valid examples among the first records.
        Raises UserError if there are invalid ones to refuse.
        """
        num_records = min(num_records, self.config.limit or num_records)
        records = islice(self.open(None), num_records)
        results = [
            result
            for _, result in checked(records, self.data_format, self.config, self.task, self.place)
        ]
        examples = [example for example in results if not isinstance(example, str)]
        dropped = count_alike(reason for reason in results if isinstance(reason, str))
        features = features_of(self.data_format.outputs, self.data_format.has_turns)
        columns = {name: [example.get(name) for example in examples] for name in features}
        dataset = Dataset.from_dict(columns, features=features)
        notices = unread_notices(self.config, self.data_format)
        return LoadedSplit(
            dataset, self.data_format.description, len(results), dropped, self.source, notices
        )


def open_split(config: TrainSplit, task: TaskName) -> StreamedSplit:
    """Open the split of `config`.
    Raises UserError if it cannot be read, or has no columns of the task.
    """
    with quiet_libraries():
        if is_local(config.path):
            local, data_format = local_files(config, task)
            source = source_record(config, local.sampled_origin(), data_format)
            return StreamedSplit(
                config, task, data_format, config.path, source, lambda at: LocalReader(local, at)
            )
        place = f"{config.path} ({', '.join(filter(None, (config.name, config.split)))})"
        dataset, revision = hub.stream(config.path, config.split, config.revision, config.name)
        data_format = format_of(
            [e for _, e in islice(hub.StreamReader(dataset, place), SAMPLE_SIZE)],
            config,
            task,
            place,
        )
        # Columns that are not trained on are not read from the hub at all.
        selected = dataset.select_columns(data_format.columns_read)
        origin = {"split": config.split, "revision": revision} | (
            {"name": config.name} if config.name else {}
        )
        source = source_record(config, origin, data_format)
        return StreamedSplit(
            config,
            task,
            data_format,
            place,
            source,
            lambda at: hub.StreamReader(selected, place, at),
        )


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
        return tuple(
            dict.fromkeys(name for split in self.splits for name in split.data_format.outputs)
        )

    @property
    def start(self) -> State:
        """The state of the first block."""
        first = {"passes": 0, "num_read": 0, "position": None}
        return {"number": 0, "num_read": 0, "dropped": {}, "splits": [first] * len(self.splits)}

    def blocks(self, start: State) -> Iterator[Block]:
        """The blocks from the one with this start.

        A block of one split ends where the split does. Raises UserError at an invalid example to
        refuse.
        """
        number, counts = (
            start["number"],
            {"num_read": start["num_read"], "dropped": Counter(start["dropped"])},
        )
        cursors = [
            _Cursor(split, state, self.held_out_fraction, counts)
            for split, state in zip(self.splits, start["splits"], strict=True)
        ]
        weights = np.array([split.config.weight for split in self.splits])
        while True:
            # A generator for each block: a resumed run draws the block alone, without those before
            # it.
            generator = np.random.default_rng([self.seed, number])
            examples = []
            # Sources by chance, in proportion to the weights: an example costs a draw, and no
            # source must be counted beforehand.
            for index in generator.choice(len(cursors), self.block_size, p=weights / weights.sum()):
                example = cursors[index].draw()
                # A source that ends begins again at once, since its share would otherwise be
                # missing from the mixture. A single source ends its block there, so that passes are
                # not mixed in one block.
                while example is None and len(cursors) > 1:
                    example = cursors[index].draw()
                if example is None:
                    break
                examples.append(example)
            # A block and no rolling buffer: datasets 5.2 saves no contents of its shuffle buffer,
            # so that a resumed run would lose examples (notes/log.md, "streaming").
            examples = [examples[i] for i in generator.permutation(len(examples))]
            number += 1
            end = {"number": number, **counts, "dropped": dict(counts["dropped"])}
            end["splits"] = [cursor.state for cursor in cursors]
            if examples:
                yield Block(start, end, examples)
            start = end


class _Cursor:
    """A place in a split, from which its examples are drawn, pass after pass.
    counts: of all splits together.
    """

    def __init__(self, split: StreamedSplit, state: State, held_out_fraction: float, counts: State):
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
            self.counts["num_read"] += 1
            example = read(record, self.split.data_format)
            if not isinstance(example, str):
                # By the hash of each, as in the search for held-out ones: none is trained on, in
                # any pass.
                if not self.held_out_fraction or position(example) >= self.held_out_fraction:
                    return example
                continue
            # Checked one by one: a stream is not read as a whole before training.
            if self.split.config.bad_examples == "refuse":
                raise UserError(
                    f"{place}: cannot be used for {self.split.task}: {example}; fix this example,"
                    " or add bad_examples: drop to this split. Rerun the same command to resume"
                )
            dropped, reason = self.counts["dropped"], without_indices(example)
            dropped[
                reason if reason in dropped or len(dropped) < MAX_REASONS else _OTHER_REASONS
            ] += 1
        self.passes, self.num_read = self.passes + 1, 0
        self._open(None)
        return None

    def _open(self, at: Any) -> None:
        limit = self.split.config.limit
        self.reader = self.split.open(at)
        self.records = islice(self.reader, None if limit is None else limit - self.num_read)


@dataclass(frozen=True, kw_only=True)
class Preview(LoadedSplit):
    """The examples among the first NUM_PREVIEWED records of each split of a stream."""

    stream: Stream


def open_stream(
    configs: Sequence[TrainSplit],
    task: TaskName,
    block_size: int,
    seed: int,
    fraction: float | None = None,
) -> tuple[Preview, LoadedSplit | None]:
    """(the preview of a stream, and the stream; the held-out examples).

    fraction: of the examples, as `hold_out` chooses them, are not in the stream; those among the
    first NUM_SEARCHED records of each split are the held-out ones. Raises UserError if a split
    cannot be used, or two do not mix.
    """
    # A stream cannot be looked through: what `plan` and the notices report is counted on its first
    # records.
    splits = [open_split(config, task) for config in configs]
    first = [split.first(NUM_PREVIEWED) for split in splits]
    refuse_other_kinds(first)
    held_out = None
    if fraction is not None:
        _, held_out = hold_out([split.first(NUM_SEARCHED) for split in splits], fraction)
        held_out = replace(held_out, source={**held_out.source, "num_searched": NUM_SEARCHED})
        for i, split in enumerate(first):
            # The preview is counted and tokenized as training data, so that held-out examples are
            # not in it.
            is_kept = [position(example) >= fraction for example in examples_of(split.dataset)]
            dataset = split.dataset.select(np.flatnonzero(is_kept))
            num_held_out = len(split.dataset) - len(dataset)
            first[i] = replace(
                split, dataset=dataset, num_examples=split.num_examples - num_held_out
            )
    pairs = zip(first, configs, strict=True)
    sources = [
        {**split.source, "layout": split.layout, "weight": config.weight} for split, config in pairs
    ]
    source = {"sources": sources} if len(first) > 1 else first[0].source
    whole = joined(first, source | {"streaming": {"shuffle_buffer": block_size}})
    return Preview(**whole, stream=Stream(splits, block_size, seed, fraction or 0.0)), held_out
