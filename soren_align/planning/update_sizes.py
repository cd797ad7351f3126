"""How far a step moves a weight, before any is taken, against the least distance that the weight can be moved.

A map sends ordinary singular values to one level, so that the update of an m x n matrix has a root mean square of
lr x scale x level / sqrt(max(m, n)), whatever the gradient. The measured ones stand in a
run's metrics.jsonl.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from ..optim import HTMuon, Muon, Route, Soren
from ..recipe import Recipe, parallel, trains_adapter
from ..trainers.lost_updates import ulp

CLASSES = {"soren": Soren, "muon": Muon, "htmuon": HTMuon}
TYPICAL_WEIGHT = 0.02
"""Where a config does not name the width of its random weights."""
ADAMW_RMS = 0.2
"""Of AdamW's update over its learning rate, as observed in training; match_rms_adamw aims at it."""


def held_in(recipe: Recipe) -> str:
    """The dtype that an update is added in: with a compensation as good as float32, and of factors always so."""
    shared = parallel(recipe.run.parallel).kind != "ddp"
    wide = shared or trains_adapter(recipe.model) or recipe.optimizer.compensation == "kahan"
    return "float32" if wide else recipe.model.dtype


def updates(
    recipe: Recipe, routes: Sequence[Route], rates: Sequence[dict[str, float]], weight: float
) -> list[dict[str, Any]]:
    """One row per rule and shape: of the matrices that are mapped, and one of all that AdamW steps.

    weight: a typical one. "rms": of a step at the peak rate; "in_steps_of_dtype": over the distance of neighbouring
    numbers there, of the dtype that updates are added in (below 1/2, rounding takes most). "at_most": the sum over all
    steps, were they to pull one way, over the weight; "sets_bfloat16": over half the distance in bfloat16, in which
    models are run and saved.
    """
    dtype = getattr(torch, held_in(recipe))
    found = defaultdict(int)
    for r in routes:
        spectral = r.rule == "spectral" and recipe.optimizer.name != "adamw"
        found["spectral" if spectral else "adamw", r.shape if spectral else None] += 1
    rows = []
    for (rule, shape), tensors in sorted(found.items(), key=lambda item: item[0][0] == "adamw"):
        key = "lr" if rule == "spectral" or recipe.optimizer.name == "adamw" else "aux_lr"
        size = _rms(recipe, shape) if shape else ADAMW_RMS
        rms, total = (size * reduce(rate[key] for rate in rates) for reduce in (max, sum))
        rows.append(
            {
                "rule": rule,
                "shape": shape,
                "tensors": tensors,
                "rms": rms,
                "in_steps_of_dtype": rms / ulp(weight, dtype),
                "at_most": total / weight,
                "sets_bfloat16": total / (ulp(weight, torch.bfloat16) / 2),
            }
        )
    return rows


def _rms(recipe: Recipe, shape: tuple[int, ...]) -> float:
    """Of the update of a matrix at learning rate 1."""
    name: Any = recipe.optimizer.name
    kind = CLASSES[name]
    return kind.lr_scale(recipe.optimizer.adjust_lr_fn or "none", *shape) * kind.map_level / math.sqrt(max(shape))
