"""Several splits as one: so many rows of each as its weight says, shuffled together.

Everything is decided by the weights and one seed, so that all ranks, and a resumed run, see the same rows.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from datasets import concatenate_datasets

from ..errors import UserError
from .columns import Task
from .split import Loaded, Split, canonical, load_split


class Source(Split, Protocol):
    """A split and its share; soren_align.recipe.TrainSplit is one."""

    weight: float


def load_mixture(sources: Sequence[Source], task: Task, seed: int) -> Loaded:
    """The rows of all sources: each `weight` times, a fraction by a draw without replacement.

    One source of weight 1 is given as it stands. UserError if the sources come out in different columns, or a weight
    leaves no row of one.
    """
    loaded = [load_split(source, task) for source in sources]
    if len(loaded) == 1 and sources[0].weight == 1:
        return loaded[0]
    names = [f"{source.path} ({one.source['split']})" for source, one in zip(sources, loaded, strict=True)]
    kinds = [one.dataset.column_names for one in loaded]
    if other := next((i for i, one in enumerate(loaded) if one.kind != loaded[0].kind), None):
        raise UserError(
            f"data.train: {names[0]} has {loaded[0].layout} ({', '.join(kinds[0])}) and {names[other]} "
            f"{loaded[other].layout} ({', '.join(kinds[other])}): these do not mix; train on one kind"
        )
    draw = np.random.default_rng(seed)
    taken = [_rows(len(one.dataset), source.weight, draw) for source, one in zip(sources, loaded, strict=True)]
    for name, source, rows in zip(names, sources, taken, strict=True):
        if len(rows) == 0:
            raise UserError(f"data.train: a weight of {source.weight:g} leaves none of the rows of {name}")
    starts = np.cumsum([0, *(len(one.dataset) for one in loaded[:-1])])
    order = draw.permutation(sum(map(len, taken)))
    rows = np.concatenate([start + rows for start, rows in zip(starts, taken, strict=True)])[order]
    parts = np.repeat(np.arange(len(taken)), [len(rows) for rows in taken])[order]
    told = [
        {**one.source, "layout": one.layout, "dropped": one.dropped, "weight": source.weight, "taken": len(rows)}
        for source, one, rows in zip(sources, loaded, taken, strict=True)
    ]
    return Loaded(
        dataset=concatenate_datasets([canonical(one.dataset) for one in loaded]).select(rows),
        layout="; ".join(dict.fromkeys(one.layout for one in loaded)),
        num_rows=len(rows) + sum(sum(one.dropped.values()) for one in loaded),
        dropped=dict(sum((Counter(one.dropped) for one in loaded), Counter())),
        source={"path": " + ".join(names), "seed": seed, "num_rows": len(rows), "sources": told},
        notices=tuple(notice for one in loaded for notice in one.notices),
        parts=tuple(parts.tolist()),
    )


def _rows(num_rows: int, weight: float, draw: np.random.Generator) -> np.ndarray:
    """Which rows are taken, in no order that matters."""
    times = int(weight)
    rest = draw.permutation(num_rows)[: round((weight - times) * num_rows)]
    return np.concatenate([np.tile(np.arange(num_rows), times), rest])
