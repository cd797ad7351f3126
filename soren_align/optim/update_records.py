"""What an optimizer's observers receive: each map of a matrix, and each update before it is applied, and after."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AppliedMap:
    """The input of a map and its output for one whole matrix, on its owner rank. Read the tensors, do not keep them."""

    name: str
    group: dict[str, Any]
    input: Tensor
    output: Tensor


@dataclass(frozen=True, eq=False)
class PendingUpdate:
    """The direction of one update on this rank, with the weights before it: `parameter` itself, or a copy.

    The update is decay_and_add_(parameter, compensation, direction, lr=lr, scale=scale, weight_decay=weight_decay) with
    the group's settings; for match_rms_measured the direction has an RMS of 1 over the whole matrix already. Read the
    tensors in the observer, do not keep them.
    """

    group: dict[str, Any]
    parameter: Tensor
    compensation: Tensor | None
    direction: Tensor
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class AppliedUpdate:
    """The weights of one parameter on this rank before and after a step. `after` is live: read it, do not keep it.

    A sharded matrix has one update per piece. With a compensation both are the float32 master weights.
    """

    name: str
    group: dict[str, Any]
    before: Tensor
    after: Tensor
