"""The distance that updates move the weights, and the learning rate of the same distance as in a
finished run.

Updates of a momentum are correlated: two that are k steps apart by about mu^k, where gradients are
noise. So a training of n steps moves neither n updates nor sqrt(n): `walk` is what a random walk
with this memory moves, and with the decay of the weights. Runs moved 1.0 to 1.4 of it, those with
small updates more, AdamW's and Soren's alike (docs/optimizers.md, "An equal distance"). The size of
AdamW's updates depends on its gradients, and no config determines it: so it is read from a finished
run.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import UserError
from ..recipe import OptimizerSection, load_resolved
from ..recipe.optimizer import MatrixOptimizer
from ..run.folder import RunFolder, read_metrics

MIN_LOGS = 10
"""Updates of a run from which the sum over its steps is known to a few percent."""


def walk(sizes: Sequence[float], memory: float, decays: Sequence[float] | None = None) -> float:
    """Return the RMS distance of a walk: steps of these sizes, with the correlation memory^k if
    they are k steps apart.

    decays: of each step the factor that the position is multiplied by before it; None: 1, and the
    distance is sqrt(sum over i, j of sizes[i] sizes[j] memory^|i - j|).
    """
    square = recent = 0.0
    for size, decay in zip(sizes, decays or [1.0] * len(sizes), strict=True):
        recent = memory * decay * recent + size
        square = decay**2 * square + size * (2 * recent - size)
    return math.sqrt(square)


def memory_of(optimizer: OptimizerSection) -> float:
    """Return the factor of the momentum of the matrices' updates: `momentum`, or AdamW's first
    beta.
    """
    return optimizer.momentum if isinstance(optimizer, MatrixOptimizer) else optimizer.betas[0]


def distance_of(run: RunFolder) -> dict[str, Any]:
    """Return {"run": its folder, "optimizer", "lr", "walk": of its measured updates,
    "relative_change": at the end}.

    Raises UserError if the run has no end, or logged too few updates.
    """
    training = run.record().get("training")
    if not training or "relative_change" not in training:
        raise UserError(
            f"--as-far-as: {run} has no finished training; name the folder of a finished run"
        )
    logs = [log for log in read_metrics(run.metrics) if "update_rms" in log]
    if len(logs) < MIN_LOGS:
        raise UserError(
            f"--as-far-as: {run} logged only {len(logs)} updates in {training['steps']:,} steps, too few "
            "for an estimate; train it again with a smaller trainer.logging_steps"
        )
    optimizer = load_resolved(run.recipe).optimizer
    _refuse_products(optimizer, str(run))
    # Of each step: between two logs a value changes linearly, before the first one not at all.
    steps, logged = range(1, logs[-1]["step"] + 1), [log["step"] for log in logs]
    sizes, rates = (
        np.interp(steps, logged, [log[key] for log in logs])
        for key in ("update_rms", "learning_rate")
    )
    decays = 1 - rates * optimizer.weight_decay
    values = {
        "walk": walk(sizes.tolist(), memory_of(optimizer), decays.tolist()),
        "relative_change": training["relative_change"],
    }
    return {"run": str(run), "optimizer": optimizer.name, "lr": optimizer.lr, **values}


def _refuse_products(optimizer: OptimizerSection, place: str) -> None:
    if getattr(optimizer, "lora_update", None) == "product":
        raise UserError(
            f"--as-far-as: {place} has optimizer.lora_update: product, with which the updates are measured on the "
            "products but relative_change on the factors; compare runs with lora_update: factors"
        )


def as_far_as(
    other: Mapping[str, Any],
    sizes: Sequence[Mapping[str, Any]],
    optimizer: OptimizerSection,
    rates: Sequence[float],
) -> dict[str, Any]:
    """Return the plan's section: {"run": the other run, "walk": of this recipe, "lr": for an equal
    walk}.

    other: of `distance_of`. sizes: the plan's update_sizes. rates: the recipe's learning rate of
    each step. Raises UserError if the recipe's sizes are those of products, and not of the trained
    factors.
    """
    _refuse_products(optimizer, "this recipe")
    matrices = [size for size in sizes if size["shape"]] or list(sizes)  # AdamW's have one entry
    numels = [size["tensors"] * math.prod(size["shape"] or (1,)) for size in matrices]
    squares = sum(
        numel * size["update_rms"] ** 2 for numel, size in zip(numels, matrices, strict=True)
    )
    factor = math.sqrt(squares / sum(numels)) / max(rates)

    def own_walk(scale: float) -> float:
        scaled = [scale * rate for rate in rates]
        decays = [1 - rate * optimizer.weight_decay for rate in scaled]
        return factor * walk(scaled, memory_of(optimizer), decays)

    scale = 1.0
    for _ in range(20):  # the walk is proportional to the rates, but for the decay
        scale *= other["walk"] / own_walk(scale)
    return {"run": dict(other), "walk": own_walk(1.0), "lr": optimizer.lr * scale}
