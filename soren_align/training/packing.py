"""Packing: the sequences that TRL makes of the training examples, counted before training.

TRL 1.16 packs a thousand examples at a time, by `trainer.packing_strategy`: `bfd` cuts examples to
max_length, `bfd_split` divides longer ones, `wrapped` divides their concatenation. Here the same
function packs the examples' loss masks. tests/training/test_packing.py compares with the sequences of a run.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, repeat
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase
from trl import pack_dataset

from ..core.silence import quiet_libraries
from ..data import (
    BATCH_SIZE,
    FIRST,
    TRAINED,
    Account,
    EncodedExample,
    LossMasks,
    State,
    Stream,
    dataset_of,
    drop_reason_of,
    encode,
    iterable_dataset,
    token_columns,
)
from ..tasks import TASKS, TaskName


@dataclass(frozen=True)
class Packing:
    """The packed sequences of an epoch."""

    strategy: str
    max_length: int
    num_sequences: int
    num_tokens: int
    num_trained_tokens: int
    num_long_examples: int
    """Examples with more than max_length tokens."""
    num_lost_tokens: int
    """Tokens that are in no sequence."""
    num_lost_trained_tokens: int
    num_continuations: int
    """Parts of examples that do not begin with the example's first token: they are trained without the tokens before
    them."""

    def as_json(self) -> dict[str, Any]:
        """For run.json and the plan."""
        return asdict(self)

    def describe(self) -> list[str]:
        """Return lines about the sequences and about divided examples."""
        filled = self.num_tokens / (self.num_sequences * self.max_length)
        sequences = f"{self.num_sequences:,} sequences of up to {self.max_length:,} tokens, {filled:.0%} full"
        lines = [f"packing {self.strategy}: {sequences}"]
        if self.num_continuations:
            lines.append(f"{self.num_continuations:,} parts of divided examples continue in another sequence")
        return lines


def pack(masks: LossMasks, args: Any) -> Packing:
    """Return the packing of the examples, whose loss masks are given, by TRL's config `args`."""
    dataset = masks.dataset()
    if args.shuffle_dataset:
        dataset = dataset.shuffle(seed=args.seed)
    num_shards = min(args.dataset_num_proc or 1, len(dataset))  # each process packs its own share
    shards = [dataset.shard(num_shards, index, contiguous=True) for index in range(num_shards)]
    packed = [pack_dataset(shard, args.max_length, args.packing_strategy) for shard in shards]
    tables = [shard.with_format("arrow")[:] for shard in packed]
    tokens = np.concatenate([_flat(table["tokens"]) for table in tables])
    num_trained = int((tokens & TRAINED).sum())
    # The first tokens of sequences, or of the examples in them.
    lengths = np.concatenate([_part_lengths(table) for table in tables])
    first_tokens = tokens[np.concatenate(([0], lengths.cumsum()[:-1]))]
    return Packing(
        strategy=args.packing_strategy,
        max_length=args.max_length,
        num_sequences=sum(map(len, packed)),
        num_tokens=len(tokens),
        num_trained_tokens=num_trained,
        num_long_examples=int((masks.lengths > args.max_length).sum()),
        num_lost_tokens=int(masks.lengths.sum()) - len(tokens),
        num_lost_trained_tokens=sum(map(sum, masks.masks)) - num_trained,
        num_continuations=int((first_tokens & FIRST == 0).sum()),
    )


def after_packing(counts: Account, packing: Packing) -> Account:
    """Return the account of the examples with the tokens that are left after packing."""
    return replace(
        counts,
        num_tokens=packing.num_tokens,
        num_trained_tokens=packing.num_trained_tokens,
        trained_share=packing.num_trained_tokens / max(1, packing.num_tokens),
        stop_token_trained=counts.stop_token_trained
        and (packing.num_lost_tokens == 0 or packing.num_long_examples < counts.num_kept),
        num_truncated=packing.num_long_examples if packing.num_lost_tokens else 0,
        num_truncated_tokens=packing.num_lost_tokens,
    )


def packing_notices(packing: Packing) -> list[str]:
    """Return notices about tokens that are lost, and examples that attend to each other."""
    if packing.num_lost_tokens:
        num_tokens = packing.num_tokens + packing.num_lost_tokens
        return [
            f"packing_strategy bfd drops {packing.num_lost_tokens:,} of {num_tokens:,} tokens "
            f"({packing.num_lost_tokens / num_tokens:.1%}): {packing.num_long_examples:,} examples are longer than "
            f"max_length {packing.max_length}. bfd_split keeps every token; a larger max_length keeps examples whole"
        ]
    if packing.strategy == "wrapped":
        return ["packing_strategy wrapped: examples in one sequence attend to the examples before them"]
    return []


def _part_lengths(table: pa.Table) -> np.ndarray:
    if "seq_lengths" in table.column_names:
        return _flat(table["seq_lengths"])
    return np.array([len(sequence) for sequence in table["tokens"]])  # wrapped: a sequence is one part


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    return pa.concat_arrays(column.chunks).flatten().to_numpy()


# ---
# The token sequences of a stream, as TRL would make them of the same examples, and the place to resume from.
#
# transformers resumes by passing over the batches before the checkpoint. In the place of their sequences the stream
# then yields a placeholder, and reads from the start of the block that the checkpoint is in: resuming costs one block,
# however long the run. Every rank reads the whole stream, of which accelerate leaves it its micro-batches.

NUM_PACKED_TOGETHER = 1_000
"""Examples that are packed together, as TRL packs a dataset's."""
Row = dict[str, list[int]]


class TokenStream:
    """The sequences of all examples of a stream, without end.

    The examples are tokenized as those of a whole dataset are; those without a token to train on within max_length are
    dropped, the others truncated, or packed.
    """

    def __init__(
        self, stream: Stream, task: TaskName, tokenizer: PreTrainedTokenizerBase, args: Any, loss: tuple[bool, bool]
    ):
        """args: TRL's config. loss: assistant_only_loss and completion_only_loss, see `data.encode`."""
        self.stream, self.tokenizer, self.args, self.loss = stream, tokenizer, args, loss
        self.task: TaskName = task
        self.start: State = {"block": stream.start, "num_rows": 0, "num_kept": 0, "dropped": {}}
        self.num_trained = self.num_passed_over = 0
        self._counts_at_start: State | None = None
        self._begin()

    def _begin(self) -> None:
        """Set what an iteration counts to its start."""
        self.block_starts: list[State] = []
        self.block_end = self.start["block"]
        self.num_rows, self.num_kept = self.start["num_rows"], self.start["num_kept"]
        self.dropped = Counter(self.start["dropped"])

    def dataset(self) -> Any:
        """Return the sequences as TRL's trainers take them."""
        return iterable_dataset(self.rows)

    def resume(self, state: State, num_passed_over: int) -> None:
        """Start the next iteration at `state`. num_passed_over: sequences in the batches that are passed over."""
        self.start, self.num_trained, self.num_passed_over = state, state["num_trained"], num_passed_over
        self._counts_at_start = state["counts"]
        self._begin()

    def state(self, num_trained: int) -> State:
        """Return plain data to resume from after `num_trained` sequences, which the latest iteration has passed."""
        while len(self.block_starts) > 1 and self.block_starts[1]["num_rows"] <= num_trained:
            del self.block_starts[0]
        return {**self.block_starts[0], "num_trained": num_trained, "counts": self.counts()}

    def counts(self) -> dict[str, Any]:
        """Return the numbers for run.json: of records read, with all of the present block; of examples kept, with those
        that are read ahead; of those dropped, by reason; and of complete passes over each split. A run resumed at its
        last step reads none: the counts are then those of the checkpoint."""
        if self._counts_at_start and not self.block_starts:
            return self._counts_at_start
        dropped = Counter(self.block_end["dropped"]) + self.dropped
        passes = [split["passes"] for split in self.block_end["splits"]]
        return {
            "num_read": self.block_end["num_read"],
            "num_kept": self.num_kept,
            "dropped": dict(dropped.most_common()),
            "passes": passes,
        }

    def rows(self) -> Iterator[Row]:
        """Return an iterator over the sequences, and the placeholders before the first one after a resume."""
        yield from repeat({name: [0] for name in TASKS[self.task].token_columns}, self.num_passed_over)
        self._begin()
        pack = self._pack if getattr(self.args, "packing", False) else self._rows
        for block in self.stream.blocks(self.start["block"]):
            self.block_starts.append(
                {
                    "block": block.start,
                    "num_rows": self.num_rows,
                    "num_kept": self.num_kept,
                    "dropped": dict(self.dropped),
                }
            )
            self.block_end = block.end
            for row in pack(self._encode(block.examples)):
                self.num_rows += 1
                if self.num_rows > self.num_trained:
                    yield row

    def _encode(self, examples: list[dict[str, Any]]) -> Iterator[EncodedExample]:
        """Return the examples that are not dropped, those of SFT truncated: pairs are, by TRL's collator."""
        max_length = None if getattr(self.args, "packing", False) else self.args.max_length
        for batch in _batches(examples, BATCH_SIZE):
            columns = {name: [example.get(name) for example in batch] for name in self.stream.columns}
            for example in encode(columns, self.task, self.tokenizer, *self.loss):
                if reason := drop_reason_of(example) or example.drop_reason(max_length):
                    self.dropped[reason] += 1
                    continue
                self.num_kept += 1
                is_pair = len(example.sides) > 1
                yield example if is_pair else example._replace(sides=(example.sides[0].truncated(max_length),))

    def _rows(self, examples: Iterable[EncodedExample]) -> Iterator[Row]:
        names = TASKS[self.task].token_columns
        for example in examples:
            columns = token_columns([example], self.task)
            yield {name: columns[name][0] for name in names}

    def _pack(self, examples: Iterable[EncodedExample]) -> Iterator[Row]:
        for batch in _batches(self._rows(examples), NUM_PACKED_TOGETHER):
            with quiet_libraries():
                packed: Any = pack_dataset(dataset_of(batch), self.args.max_length, self.args.packing_strategy)
            yield from packed


def _batches(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(values)
    while batch := list(islice(iterator, size)):
        yield batch
