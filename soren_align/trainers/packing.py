"""Packing: the sequences that TRL makes of the training examples, counted before training.

TRL 1.16 packs a thousand examples at a time, by `trainer.packing_strategy`: `bfd` cuts examples to
max_length and drops the rest of them, `bfd_split` divides them, `wrapped` divides their concatenation. Here the same
function packs the examples' loss masks. tests/trainers/test_packing.py compares with the sequences of a run.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets
from trl import pack_dataset

from ..data import Account

_TRAINED, _FIRST = 1, 2
"""Bits of a token: the loss includes it; it is the first of its example."""


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


def pack(trained: Sequence[bytes], args: Any) -> Packing:
    """Return the packing of the examples by TRL's config `args`.

    trained: of each example, in the order of the dataset, a byte per token: 1 if the loss includes it.
    """
    lengths = np.array([len(mask) for mask in trained], np.int64)
    starts = np.concatenate(([0], lengths.cumsum()))
    tokens = np.frombuffer(b"".join(trained), np.uint8).copy()
    tokens[starts[:-1][lengths > 0]] |= _FIRST
    dataset = Dataset(pa.table({"tokens": pa.LargeListArray.from_arrays(starts, tokens)}))
    if args.shuffle_dataset:
        dataset = dataset.shuffle(seed=args.seed)
    num_shards = min(args.dataset_num_proc or 1, len(dataset))  # each process packs its own share
    shards = [dataset.shard(num_shards, index, contiguous=True) for index in range(num_shards)]
    packed = concatenate_datasets([pack_dataset(shard, args.max_length, args.packing_strategy) for shard in shards])
    columns = packed.with_format("arrow")[:]
    kept = _values(columns["tokens"])
    is_wrapped = "seq_lengths" not in columns.column_names
    parts = _values(pc.list_value_length(columns["tokens"]) if is_wrapped else columns["seq_lengths"])
    first_tokens = kept[np.concatenate(([0], parts.cumsum()[:-1]))]
    num_trained, num_trained_before = (int((part & _TRAINED).sum()) for part in (kept, tokens))
    return Packing(
        strategy=args.packing_strategy,
        max_length=args.max_length,
        num_sequences=len(packed),
        num_tokens=len(kept),
        num_trained_tokens=num_trained,
        num_long_examples=int((lengths > args.max_length).sum()),
        num_lost_tokens=len(tokens) - len(kept),
        num_lost_trained_tokens=num_trained_before - num_trained,
        num_continuations=int((first_tokens & _FIRST == 0).sum()),
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


def _values(column: pa.ChunkedArray) -> np.ndarray:
    """The numbers of a column of numbers or of lists of numbers."""
    array = pa.concat_arrays(column.chunks)
    return (array.flatten() if pa.types.is_nested(array.type) else array).to_numpy()
