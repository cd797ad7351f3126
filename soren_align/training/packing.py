"""The token sequences of a training: pack the examples, and check that they are separate.

TRL 1.16 packs a thousand examples at a time, by `trainer.packing_strategy`: `bfd` cuts examples to
max_length, `bfd_split` divides longer ones, `wrapped` divides their concatenation. Here the same
function packs the examples' loss masks to count, and the examples of a stream, which TRL does not
see as a whole. tests/training/test_packing.py compares with the sequences of a run.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import pack_dataset

from .. import data
from ..core.errors import UserError
from ..core.silence import quiet_libraries
from ..tasks import TASKS, TaskName

NUM_PACKED_TOGETHER = 1_000
"""Examples that are packed together, as TRL packs a dataset's."""
Row = dict[str, list[int]]
NUM_EXAMPLES, NUM_TOKENS = 3, 16
"""A probe's examples and the tokens of each: short, as logits have an entry for each token of the
vocabulary."""
TOLERANCE = 1e-4
"""Largest change of the other examples' logits, relative to the change of the example's own. 20
small random models (tests/training/test_isolation.py has some) are at exactly 0, in float32 and
bfloat16 (those with experts at 2e-8 with some kernels), or above 8e-4."""


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
    num_continuations: int
    """Parts of examples that do not begin with the example's first token: they are trained without
    the tokens before them."""

    def describe(self) -> list[str]:
        """Return lines about the sequences and about divided examples."""
        filled = self.num_tokens / (self.num_sequences * self.max_length)
        lines = [
            f"packing {self.strategy}: {self.num_sequences:,} sequences of up to "
            f"{self.max_length:,} tokens, {filled:.0%} full"
        ]
        if self.num_continuations:
            lines.append(
                f"{self.num_continuations:,} parts of divided examples continue in another sequence"
            )
        return lines

    def notices(self) -> list[str]:
        """Return notices about tokens that are lost, and examples that attend to each other."""
        if self.num_lost_tokens:
            num_tokens = self.num_tokens + self.num_lost_tokens
            return [
                f"packing_strategy bfd drops {self.num_lost_tokens:,} of {num_tokens:,} tokens "
                f"({self.num_lost_tokens / num_tokens:.1%}): {self.num_long_examples:,} examples "
                f"are longer than max_length {self.max_length}. To keep every token, write "
                "packing_strategy: bfd_split or a larger max_length"
            ]
        if self.strategy == "wrapped":
            return [
                "packing_strategy wrapped: examples in one sequence attend to the examples "
                "before them"
            ]
        return []


def pack(masks: data.LossMasks, args: Any) -> Packing:
    """Return the packing of the examples, whose loss masks are given, by TRL's config `args`."""
    # As TRL will: the same function, the same shuffle and the same shards, on one byte per token.
    dataset = masks.dataset()
    if args.shuffle_dataset:
        dataset = dataset.shuffle(seed=args.seed)
    num_shards = min(args.dataset_num_proc or 1, len(dataset))  # each process packs its own share
    shards = [dataset.shard(num_shards, index, contiguous=True) for index in range(num_shards)]
    packed = [pack_dataset(shard, args.max_length, args.packing_strategy) for shard in shards]
    # Count what the sequences contain: TRL drops and divides examples without a word.
    tables: list[Any] = [shard.with_format("arrow")[:] for shard in packed]
    tokens = np.concatenate([_flat(table["tokens"]) for table in tables])
    # The first tokens of the examples in sequences, or, as a wrapped sequence is one part, of
    # sequences.
    lengths = [
        (
            _flat(table["seq_lengths"])
            if "seq_lengths" in table.column_names
            else [*map(len, table["tokens"])]
        )
        for table in tables
    ]
    first_tokens = tokens[np.concatenate(([0], np.concatenate(lengths).cumsum()[:-1]))]
    return Packing(
        strategy=args.packing_strategy,
        max_length=args.max_length,
        num_sequences=sum(map(len, packed)),
        num_tokens=len(tokens),
        num_trained_tokens=int((tokens & data.TRAINED).sum()),
        num_long_examples=int((masks.lengths > args.max_length).sum()),
        num_lost_tokens=int(masks.lengths.sum()) - len(tokens),
        num_continuations=int((first_tokens & data.FIRST == 0).sum()),
    )


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    return pa.concat_arrays(column.chunks).flatten().to_numpy()


class TokenStream:
    """The sequences of all examples of a stream, without end, as TRL would make them of the same
    examples.

    The examples are tokenized as those of a whole dataset are; those without a token to train on
    within max_length are dropped, the others truncated, or packed.

    transformers resumes by passing over the batches before the checkpoint. In the place of their
    sequences the stream then yields a placeholder, and reads from the start of the block that the
    checkpoint is in: resuming costs one block, however long the run. Every rank reads the whole
    stream, of which accelerate leaves it its micro-batches.
    """

    def __init__(
        self,
        stream: data.Stream,
        task: TaskName,
        tokenizer: Any,
        args: Any,
        loss: tuple[bool, bool],
    ):
        """args: TRL's config.
        loss: assistant_only_loss and completion_only_loss, see `data.encode`.
        """
        self.stream, self.tokenizer, self.args, self.loss = stream, tokenizer, args, loss
        self.task: TaskName = task
        self._packs = bool(getattr(args, "packing", False))
        self.num_passed_over = 0
        self.dataset = data.iterable_dataset(self.rows)
        """The sequences as TRL's trainers take them."""
        start = {
            "block": stream.start,
            "num_rows": 0,
            "num_kept": 0,
            "dropped": {},
            "num_trained": 0,
            "counts": None,
        }
        self._begin(start)

    def _begin(self, start: data.State) -> None:
        """Set what an iteration counts to the state `start`."""
        self.start, self.block_end = start, start["block"]
        self.block_starts: list[data.State] = []
        self.num_rows, self.num_kept, self.dropped = (
            start["num_rows"],
            start["num_kept"],
            Counter(start["dropped"]),
        )

    def resume(self, state: data.State, num_passed_over: int) -> None:
        """Start the next iteration at `state`.
        num_passed_over: sequences in the batches that are passed over.
        """
        self.num_passed_over = num_passed_over
        self._begin(state)

    def state(self, num_trained: int) -> data.State:
        """Return plain data to resume from after `num_trained` sequences, which the latest
        iteration has passed.
        """
        # The last block that begins before the trained sequences end: later blocks were only read
        # ahead.
        while len(self.block_starts) > 1 and self.block_starts[1]["num_rows"] <= num_trained:
            del self.block_starts[0]
        return {**self.block_starts[0], "num_trained": num_trained, "counts": self.counts()}

    def counts(self) -> dict[str, Any]:
        """Return the numbers for run.json: of records read, with all of the present block; of
        examples kept, with those that are read ahead; of those dropped, by reason; and of complete
        passes over each split. A run resumed at its last step reads none: the counts are then those
        of the checkpoint."""
        if self.start["counts"] and not self.block_starts:
            return self.start["counts"]
        return {
            "num_read": self.block_end["num_read"],
            "num_kept": self.num_kept,
            "dropped": dict((Counter(self.block_end["dropped"]) + self.dropped).most_common()),
            "passes": [split["passes"] for split in self.block_end["splits"]],
        }

    def rows(self) -> Iterator[Row]:
        """Return an iterator over the sequences, and the placeholders before the first one after a
        resume.
        """
        # Pass over: transformers draws the batches before the checkpoint and drops them. A token
        # each is enough.
        yield from repeat(
            {name: [0] for name in TASKS[self.task].token_columns}, self.num_passed_over
        )
        self._begin(self.start)
        # Read from the start of the checkpoint's block; its sequences that were trained are left
        # out below.
        for block in self.stream.blocks(self.start["block"]):
            counts = {
                "num_rows": self.num_rows,
                "num_kept": self.num_kept,
                "dropped": dict(self.dropped),
            }
            self.block_starts.append({"block": block.start, **counts})
            self.block_end = block.end
            for batch in _batches(
                self._examples(block.examples), NUM_PACKED_TOGETHER if self._packs else 1
            ):
                sequences: Any = batch
                if self._packs:
                    with quiet_libraries():
                        dataset = data.dataset_of(batch)
                        sequences = pack_dataset(
                            dataset, self.args.max_length, self.args.packing_strategy
                        )
                for row in sequences:
                    self.num_rows += 1
                    if self.num_rows > self.start["num_trained"]:
                        yield row

    def _examples(self, examples: list[dict[str, Any]]) -> Iterator[Row]:
        """Yield the tokens of examples that are not dropped, those of SFT truncated: pairs are, by
        TRL's collator.
        """
        max_length = None if self._packs else self.args.max_length
        for batch in _batches(examples, data.BATCH_SIZE):
            columns = {
                name: [example.get(name) for example in batch] for name in self.stream.columns
            }
            for example in data.encode(columns, self.task, self.tokenizer, *self.loss):
                # Where whole data are read first, a cut answer is refused.
                lost = {data.EMPTY_ANSWER, data.CUT_ANSWER}.intersection(example.left_out)
                reason = min(lost) if lost else example.drop_reason(max_length)
                if reason:
                    self.dropped[reason] += 1
                    continue
                self.num_kept += 1
                if len(example.sides) == 1:
                    example = example._replace(sides=(example.sides[0].truncated(max_length),))
                values = data.token_columns([example], self.task)
                yield {name: values[name][0] for name in TASKS[self.task].token_columns}


def _batches(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(values)
    while batch := list(islice(iterator, size)):
        yield batch


class IsolationCheck(TrainerCallback):
    """Raises UserError before the first step if packed examples are not separate. Collective.

    Separate: a change of one moves no logit of another. Some architectures keep them apart by
    position ids or sequence lengths, others ignore both. The model is probed as it will train, with
    its attention, kernels and wrappers, and no list of architectures is needed.
    """

    def __init__(self, dataset: Any, collator: Any, place: str):
        """dataset, collator: the trainer's own, with packed examples.
        place: the recipe's key that packs them.
        """
        self.dataset, self.collator, self.place = dataset, collator, place

    def on_train_begin(self, args, state, control, model: Any = None, **kwargs):
        """Run the probe on the wrapped, possibly sharded model, which has loaded its checkpoint."""
        examples = probe_examples(self.dataset)
        if len(examples) == 1:
            return
        try:
            change, noise = cross_talk(model, self.collator, examples, args.device)
        except ValueError as error:  # such as an architecture that needs a kernel for it
            raise UserError(
                f"{self.place}: packed examples cannot be kept separate: {error}; write packing: "
                "false"
            ) from error
        if change <= max(TOLERANCE, 10 * noise):
            return
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        attention, other = str(getattr(base.config, "_attn_implementation", None)), ""
        if base._supports_flash_attn and "flash" not in attention:
            flash, *_ = base._compatible_flash_implementations or ["flash_attention_2"]
            other = f"model.attn_implementation: {flash} (on a GPU), "
        raise UserError(
            f"{self.place}: {type(base).__name__} with attention {attention} mixes the examples of "
            "one sequence: a change of one example's tokens changes the logits of other examples, "
            f"by {change:.1%} of the change of the example's own logits. Write {other}packing: "
            "false, or packing_strategy: wrapped to let examples attend to each other"
        )


def probe_examples(dataset: Any) -> list[list[int]]:
    """Return the beginnings of the first examples of a dataset, each NUM_TOKENS long or shorter."""
    examples: list[list[int]] = []
    for sequence in dataset:
        start = 0
        for length in sequence.get("seq_lengths") or [len(sequence["input_ids"])]:
            examples.append(sequence["input_ids"][start : start + min(length, NUM_TOKENS)])
            start += length
            if len(examples) == NUM_EXAMPLES:
                return examples
    return examples


def cross_talk(
    model: Any, collator: Any, examples: list[list[int]], device: Any
) -> tuple[float, float]:
    """Return (change of the other examples' logits, noise), relative to the change of the first
    example's own, as its tokens change.

    The model runs as in training, with equal dropout; neither its mode nor the random numbers of
    training are changed. Collective.
    """
    vocabulary = sorted({token for example in examples for token in example})
    # Each token becomes another one of the data: an unused token's embedding may be untrained.
    following = dict(zip(vocabulary, [*vocabulary[1:], vocabulary[0]], strict=True))
    lengths = [len(example) for example in examples]
    gpus = [device] if torch.device(device).type == "cuda" else []

    def logits(changed: int | None = None) -> Tensor:
        parts = [[following[t] for t in e] if i == changed else e for i, e in enumerate(examples)]
        tokens = [token for part in parts for token in part]
        batch = collator([{"input_ids": tokens, "labels": tokens, "seq_lengths": lengths}])
        del batch["labels"]
        batch = {key: v.to(device) if torch.is_tensor(v) else v for key, v in batch.items()}
        with torch.no_grad(), torch.random.fork_rng(gpus):
            torch.manual_seed(0)
            return model(**batch, use_cache=False).logits[0].double()

    # In training mode, as kernels may differ from those of evaluation.
    was_training = model.training
    model.train()
    original, first, last = logits(), logits(0), logits(len(examples) - 1)
    model.train(was_training)
    # By token. A causal model's examples before the last one cannot see it: their change is noise,
    # such as of experts that get other numbers of tokens.
    change, noise = ((x - original).square().mean(-1).sqrt() for x in (first, last))
    # Compare with the change of the changed example's own logits: models differ in scale.
    own = max(change[: lengths[0]].mean().item(), torch.finfo(torch.float64).tiny)
    return change[lengths[0] :].mean().item() / own, noise[: -lengths[-1]].mean().item() / own
