"""The size of the updates of a schedule, compared with the spacing of the weights' dtype, before any training.

With `adjust_lr_fn: match_rms_measured` the update of a matrix has a root mean square (RMS) of 0.2 lr. With the other
scales it is at most about lr x scale x level / sqrt(max(m, n)), since a map sends ordinary singular values to one
level, and less where the momentum has singular values below the map's reach. The measured values of a run are in its
metrics.jsonl.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from ..optim import ADAMW_RMS, OPTIMIZERS, Route, ulp
from ..recipe import Recipe, parallel, trains_adapter
from ..spectral import released_level

TYPICAL_WEIGHT = 0.02
"""Where a config has no initializer_range."""


def update_dtype(recipe: Recipe) -> str:
    """The dtype that weights are updated in; Kahan compensation is as good as float32, and adapters are float32."""
    is_sharded = parallel(recipe.run.parallel).kind != "ddp"
    is_wide = is_sharded or trains_adapter(recipe.model) or recipe.optimizer.compensation == "kahan"
    return "float32" if is_wide else recipe.model.dtype


def update_sizes(
    recipe: Recipe, routes: Sequence[Route], rates: Sequence[dict[str, float]], weight: float | None
) -> list[dict[str, Any]]:
    """One dict per shape of the matrices, and one for all other parameters (AdamW).

    rates: both learning rates of each step. weight: a typical one; None for an adapter, whose factors have none: one
    starts at 0. Without it the last three are None.
    "update_rms": of a step at the peak learning rate. "update_sum": the sum of update_rms over all steps, an upper
    bound of the change. "ulps": update_rms over the spacing of update_dtype at `weight`; below 1/2, rounding loses most
    of it. "relative_update": update_sum over `weight`. "bfloat16_ulps": update_sum over the spacing of bfloat16, the
    dtype of saved models.
    """
    dtype = getattr(torch, update_dtype(recipe))
    num_tensors = defaultdict(int)
    for r in routes:
        is_spectral = r.rule == "spectral" and recipe.optimizer.name != "adamw"
        if is_spectral:
            num_tensors["spectral", r.matrix] += r.num_matrices
        else:
            num_tensors["adamw", None] += 1
    sizes = []
    for (rule, shape), number in sorted(num_tensors.items(), key=lambda item: item[0][0] == "adamw"):
        key = "lr" if rule == "spectral" or recipe.optimizer.name == "adamw" else "aux_lr"
        factor = _rms(recipe, shape) if shape else ADAMW_RMS
        peak, total = (factor * reduce(rate[key] for rate in rates) for reduce in (max, sum))
        sizes.append(
            {
                "rule": rule,
                "shape": shape,
                "tensors": number,
                "update_rms": peak,
                "update_sum": total,
                "ulps": peak / ulp(weight, dtype) if weight else None,
                "relative_update": total / weight if weight else None,
                "bfloat16_ulps": total / ulp(weight, torch.bfloat16) if weight else None,
            }
        )
    return sizes


def _rms(recipe: Recipe, shape: tuple[int, ...]) -> float:
    """Of the update of a matrix at learning rate 1."""
    name: Any = recipe.optimizer.name
    optimizer = OPTIMIZERS[name]
    adjust_lr_fn = getattr(recipe.optimizer, "adjust_lr_fn", "none")
    scale = optimizer.lr_scale(adjust_lr_fn, *shape)
    return scale if adjust_lr_fn == "match_rms_measured" else scale * _map_level(recipe, shape) / math.sqrt(max(shape))


def _map_level(recipe: Recipe, shape: tuple[int, ...]) -> float:
    """The map's value for an ordinary singular value; for the released map its largest mean, on a flat spectrum."""
    optimizer: Any = recipe.optimizer
    if optimizer.cost_map == "released":
        return released_level(shape[0], shape[1], optimizer.map_steps)
    return OPTIMIZERS[optimizer.name].map_level
