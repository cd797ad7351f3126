"""Float32 master weights in 16 + 16 bits: a bfloat16 parameter, and a compensation beside it.

A bfloat16 weight of 0.02 has neighbours 1.2e-4 away: an update of 1e-8 is rounded away, and so are all that follow. The
compensation keeps the rounding error of every update, as in Kahan's summation. A bfloat16 compensation, the usual
choice, loses small updates too once it has grown to 256 times their size: Soren at 1e-6 is 4% of its total change off
the float32 weights after 200 steps, 25% after 1000 (docs/log.md). So the compensation is a fixed-point number of the
same size: the lower half of a float32 of which the parameter is the upper half, rounded. Together they are that
float32, to the last bit.
"""

import math
from typing import Any

import torch
from torch import Tensor

COMPENSATION_DTYPE = torch.int16


def master_weights(parameter: Tensor, compensation: Tensor | None) -> Tensor:
    """The weights in the precision in which updates add up.

    Without a compensation `parameter` itself, with one a new float32 tensor made of the two.
    """
    if compensation is None:
        return parameter
    upper = parameter.view(torch.int16).to(torch.int32) << 16
    return upper.add_(compensation).view(torch.float32)


def store_master_weights_(parameter: Tensor, compensation: Tensor | None, weights: Tensor) -> None:
    """Write `weights` to `parameter`, rounded, and the rounding error to the compensation if there is one."""
    if compensation is None:
        if weights is not parameter:
            parameter.copy_(weights)
        return
    bits = weights.view(torch.int32)
    # Half of the lower 65536 is rounded up, and not to even, so that the remainder fits: -32768 to 32767.
    upper = (bits + 0x8000) >> 16
    compensation.copy_(bits - (upper << 16))
    parameter.copy_(upper.to(torch.int16).view(torch.bfloat16))


def is_compensated(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether the parameter's state has a compensation; float32 needs none, it is as wide as its update."""
    return group.get("compensation") == "kahan" and parameter.dtype == torch.bfloat16


def ulp(weight: float, dtype: torch.dtype) -> float:
    """The distance from `weight`, 0 or more, to the next larger number of `dtype`; 0 at 0."""
    return 2.0 ** math.floor(math.log2(weight)) * torch.finfo(dtype).eps if weight else 0.0
