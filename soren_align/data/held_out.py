"""Held-out examples: a fraction or a number of the training examples, chosen by a hash of each.

The choice depends on an example's content alone. It is the same wherever the example stands, whatever the other
examples and the seed are, and a larger fraction holds out the examples of a smaller one too. A number is the fraction
that has so many examples: as the data grows, examples return to training, and none is held out that was trained on.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..errors import UserError
from .arrow import concatenated, examples_of
from .columns import Example
from .mixture import refuse_other_kinds
from .split import LoadedSplit


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
