"""Held-out examples: a fraction of the training examples, chosen by a hash of each.

The choice depends on an example's content alone. It is the same wherever the example stands, whatever the other
examples and the seed are, and a larger fraction holds out the examples of a smaller one too.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from ..errors import UserError
from .arrow import concatenated, examples_of
from .columns import Example
from .mixture import refuse_other_kinds
from .split import LoadedSplit


def hold_out(splits: Sequence[LoadedSplit], fraction: float) -> tuple[list[LoadedSplit], LoadedSplit]:
    """(the splits without the held-out examples, these examples of all splits).

    Raises UserError if no example is held out, or all are of one split.
    """
    refuse_other_kinds(splits)
    remaining, chosen = [], []
    for split in splits:
        sides: tuple[list[int], list[int]] = ([], [])
        for i, example in enumerate(examples_of(split.dataset)):
            sides[position(example) < fraction].append(i)
        if not sides[False]:
            raise UserError(
                f"data.eval.fraction: {fraction:g} holds out all examples of {split.name}; write a smaller one"
            )
        chosen.append(split.dataset.select(sides[True]))
        remaining.append(
            replace(
                split,
                dataset=split.dataset.select(sides[False]),
                num_examples=split.num_examples - len(sides[True]),
                source={**split.source, "num_held_out": len(sides[True])},
            )
        )
    dataset = concatenated(chosen)
    if len(dataset) == 0:
        total = sum(len(split.dataset) for split in splits)
        raise UserError(f"data.eval.fraction: {fraction:g} holds out none of {total} examples; write a larger one")
    layout = "; ".join(dict.fromkeys(split.layout for split in splits))
    names = " + ".join(split.name for split in splits)
    source = {"path": names, "split": "held out", "fraction": fraction, "num_examples": len(dataset)}
    return remaining, LoadedSplit(dataset, layout, len(dataset), {}, source)


def position(example: Example) -> float:
    """A number in [0, 1), uniform over examples: the first 53 bits of the SHA-256 of an example in TRL's columns."""
    example = {
        column: value for column, value in example.items() if value is not None
    }  # no tools: as without the column
    text = json.dumps(example, sort_keys=True, ensure_ascii=False)
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 11) / 2**53
