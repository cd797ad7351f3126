"""The token sequences of a stream, as TRL would make them of the same examples, and the place to resume from.

transformers resumes by passing over the batches before the checkpoint. In the place of their sequences the stream then
yields a placeholder, and reads from the start of the block that the checkpoint is in: resuming costs one block, however
long the run. Every rank reads the whole stream, of which accelerate leaves it its micro-batches.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import Any

from datasets import Dataset, IterableDataset
from datasets.iterable_dataset import ExamplesIterable
from transformers import PreTrainedTokenizerBase
from trl import pack_dataset

from ..data import BATCH_SIZE, TOKEN_COLUMNS, EncodedExample, Stream, Task, encode, token_columns
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
        self.stream, self.task, self.tokenizer, self.args, self.loss = stream, task, tokenizer, args, loss
        self.start: dict[str, Any] = {"block": None, "num_rows": 0, "dropped": {}}
        self.num_trained = self.num_passed_over = 0
        self.block_starts: list[dict[str, Any]] = []
        self.counts: dict[str, Any] = {}

    def dataset(self) -> IterableDataset:
        """Return the sequences as TRL's trainers take them."""
        return IterableDataset(ExamplesIterable(lambda: enumerate(self.rows()), {}))

    def resume(self, state: dict[str, Any], num_passed_over: int) -> None:
        """Start the next iteration at `state`. num_passed_over: sequences in the batches that are passed over."""
        self.start, self.num_trained, self.num_passed_over = state, state["num_trained"], num_passed_over

    def state(self, num_trained: int) -> dict[str, Any]:
        """Return plain data to resume from after `num_trained` sequences, which the latest iteration has passed."""
        while len(self.block_starts) > 1 and self.block_starts[1]["num_rows"] <= num_trained:
            del self.block_starts[0]
        return {**self.block_starts[0], "num_trained": num_trained}

    def rows(self) -> Iterator[Row]:
        """Return an iterator over the sequences, and the placeholders before the first one after a resume."""
        yield from repeat({name: [0] for name in TOKEN_COLUMNS[self.task]}, self.num_passed_over)
        num_rows, dropped = self.start["num_rows"], Counter(self.start["dropped"])
        self.block_starts = []
        for block in self.stream.blocks(self.start["block"]):
            self.block_starts.append({"block": block.start, "num_rows": num_rows, "dropped": dict(dropped)})
            self.counts = {**block.end, "dropped_tokenized": dropped}
            encoded = self._encode(block.examples)
            is_packed = getattr(self.args, "packing", False)
            for row in self._pack(encoded) if is_packed else self._truncate(encoded, dropped):
                num_rows += 1
                if num_rows > self.num_trained:
                    yield row

    def _encode(self, examples: list[dict[str, Any]]) -> Iterator[EncodedExample]:
        for batch in _batches(examples, BATCH_SIZE):
            columns = {name: [example.get(name) for example in batch] for name in self.stream.columns}
            yield from encode(columns, self.task, self.tokenizer, *self.loss)

    def _truncate(self, examples: Iterable[EncodedExample], dropped: Counter[str]) -> Iterator[Row]:
        """Return the sequences; pairs are truncated by TRL's collator."""
        max_length = self.args.max_length
        for example in examples:
            if reason := example.drop_reason(self.task, max_length):
                dropped[reason] += 1
                continue
            if self.task == "sft":
                example = example._replace(sides=(example.sides[0].truncated(max_length),))
            yield from self._rows([example])

    def _pack(self, examples: Iterable[EncodedExample]) -> Iterator[Row]:
        for batch in _batches(examples, NUM_PACKED_TOGETHER):
            dataset = Dataset.from_list(list(self._rows(batch)))
            with quiet_libraries():
                packed = pack_dataset(dataset, self.args.max_length, self.args.packing_strategy)
            yield from packed

    def _rows(self, examples: list[EncodedExample]) -> Iterator[Row]:
        columns = token_columns(examples, self.task)
        names = TOKEN_COLUMNS[self.task]
        return (dict(zip(names, values, strict=True)) for values in zip(*map(columns.get, names), strict=True))


def _batches(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(values)
    while batch := list(islice(iterator, size)):
        yield batch
