"""Packing: the sequences that TRL makes of the training examples, counted before training.

TRL 1.16 packs a thousand examples at a time, by `trainer.packing_strategy`: `bfd` cuts examples to
max_length, `bfd_split` divides longer ones, `wrapped` divides their concatenation. Here the same
function packs the examples' loss masks. tests/trainers/test_packing.py compares with the sequences of a run.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from trl import pack_dataset

from ..data import FIRST, TRAINED, Account, LossMasks


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
