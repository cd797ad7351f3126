"""Weights moved in what holds them: float32, bfloat16, or bfloat16 with a compensation beside it.

A bfloat16 weight of 0.02 has neighbours 1.2e-4 away: a step of 1e-8 is rounded away, and so are all that follow. What
rounding takes off is therefore kept beside the weight, as in Kahan's summation. Kept in bfloat16, as is the custom, it
swallows small steps in its turn as soon as it has grown to 256 of them: Soren at 1e-6 is 4% of its way off float32's
weights after 200 steps, 25% after 1000 (docs/log.md). So it is kept in as many bits, but fixed ones: the lower half of
the float32 of which the weight is the upper, rounded. The two are that float32, to the last bit.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COMPENSATION_DTYPE = torch.int16


def move_(
    held: Tensor, compensation: Tensor | None, direction: Tensor, alpha: float | Tensor, decay: float | Tensor
) -> None:
    """held <- held * (1 - decay) + alpha * direction, in direction's dtype and rounded once to held's.

    compensation: None, or held's lower half (int16, held's shape), which then moves too and loses nothing to bfloat16.
    direction is float32 or float64, not modified.
    """
    wide = summed(held, compensation).to(direction.dtype)  # held itself, unless it is narrower
    wide.mul_(1 - decay).add_(direction, alpha=float(alpha))
    put_(held, compensation, wide)


def summed(held: Tensor, compensation: Tensor | None) -> Tensor:
    """The weights: `held` itself, or the float32 that it and its compensation are."""
    if compensation is None:
        return held
    upper = held.view(torch.int16).to(torch.int32) << 16
    return upper.add_(compensation).view(torch.float32)


def put_(held: Tensor, compensation: Tensor | None, weights: Tensor) -> None:
    """Let `held`, with its compensation if it has one, be these weights."""
    if compensation is None:
        if weights is not held:
            held.copy_(weights)
        return
    bits = weights.view(torch.int32)
    # Half of the lower 65536 is rounded up, and not to even, so that what remains fits: -32768 to 32767.
    upper = (bits + 0x8000) >> 16
    compensation.copy_(bits - (upper << 16))
    held.copy_(upper.to(torch.int16).view(torch.bfloat16))


def spacing(weight: float, dtype: torch.dtype) -> float:
    """The distance from `weight`, 0 or more, to the next larger number of `dtype`; 0 at 0."""
    return 2.0 ** math.floor(math.log2(weight)) * torch.finfo(dtype).eps if weight else 0.0


@dataclass(frozen=True, eq=False)
class Proposal:
    """One stretch's step as the optimizer wants it, beside what holds the weights: before it, or a copy of that.

    The step would be move_(held, compensation, direction, -lr * scale, lr * weight_decay). Read, don't keep.
    """

    group: dict[str, Any]
    held: Tensor
    compensation: Tensor | None
    direction: Tensor
    scale: float = 1.0


def adamw_direction(state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    """The direction of the AdamW step that has just advanced `state`, whose tensors lie here."""
    beta1, beta2 = group["betas"]
    step = float(state["step"])
    denominator = state["exp_avg_sq"].div(1 - beta2**step).sqrt_().add_(group["eps"])
    return state["exp_avg"].div(1 - beta1**step).div_(denominator)


def is_compensated(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether the parameter has a compensation among its state; float32 has none, it is no narrower than its update."""
    return group.get("compensation") == "kahan" and parameter.dtype == torch.bfloat16
