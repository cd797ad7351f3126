"""The token sequences of a stream, as TRL would make them of the same examples, and the place to resume from.

transformers resumes by passing over the batches before the checkpoint. In the place of their sequences the stream then
yields a placeholder, and reads from the start of the block that the checkpoint is in: resuming costs one block, however
long the run. Every rank reads the whole stream, of which accelerate leaves it its micro-batches.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl import pack_dataset

from ..data import (
    BATCH_SIZE,
    TOKEN_COLUMNS,
    EncodedExample,
    State,
    Stream,
    Task,
    dataset_of,
    drop_reason_of,
    encode,
    iterable_dataset,
    token_columns,
)
from ..silence import quiet_libraries

NUM_PACKED_TOGETHER = 1_000
"""Examples that are packed together, as TRL packs a dataset's."""
Row = dict[str, list[int]]


class TokenStream:
    """The sequences of all examples of a stream, without end.

    The examples are tokenized as those of a whole dataset are; those without a token to train on within max_length are
    dropped, the others truncated, or packed.
    """

    def __init__(
        self, stream: Stream, task: Task, tokenizer: PreTrainedTokenizerBase, args: Any, loss: tuple[bool, bool]
    ):
        """args: TRL's config. loss: assistant_only_loss and completion_only_loss, see `data.encode`."""
        self.stream, self.tokenizer, self.args, self.loss = stream, tokenizer, args, loss
        self.task: Task = task
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
        yield from repeat({name: [0] for name in TOKEN_COLUMNS[self.task]}, self.num_passed_over)
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
                if reason := drop_reason_of(example) or example.drop_reason(self.task, max_length):
                    self.dropped[reason] += 1
                    continue
                self.num_kept += 1
                is_pair = self.task == "dpo"
                yield example if is_pair else example._replace(sides=(example.sides[0].truncated(max_length),))

    def _rows(self, examples: Iterable[EncodedExample]) -> Iterator[Row]:
        names = TOKEN_COLUMNS[self.task]
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
