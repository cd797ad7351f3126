"""Several splits as one dataset: of each the share given by its weight, shuffled together.

Everything depends only on the weights and one seed, so that all ranks, and a resumed run, use the same examples.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..errors import UserError
from .arrow import concatenated
from .split import LoadedSplit, SplitConfig


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
