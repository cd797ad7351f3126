"""Into which kind of sharding an optimizer has come, read from what its launcher has made of it."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..optim import SpectralOptimizer
from .attach import Replicas, RowBlocks
from .ranks import Ranks
from .step_plan import ROUND_MB
from .zero import attach_zero


class Placed(NamedTuple):
    """kind: "ddp", "zero" or "fsdp2", "ddp" for one process too. tensors: those that this rank steps, by group."""

    kind: str
    tensors: list[list[Tensor]]


def chain_of(optimizer: Any) -> list[Any]:
    """The optimizer in all its wrappers, from the outermost to the one that steps."""
    chain = [optimizer]
    while hasattr(chain[-1], "optimizer"):
        chain.append(chain[-1].optimizer)
    return chain


def place(optimizer: Any, ranks: Ranks, round_mb: float = ROUND_MB) -> Placed:
    """Tell the SpectralOptimizer within accelerate's wrappers where its matrices lie. Collective.

    ValueError, on every rank, where that is not known or not supported; see `attach_zero` and `RowBlocks`.
    """
    *wrappers, inner = chain_of(optimizer)
    if not isinstance(inner, SpectralOptimizer):
        raise ValueError(f"{type(inner).__name__} would step, which is not of soren_align.optim")
    if wrappers and "deepspeed" in type(wrappers[-1]).__module__:
        return Placed("zero", attach_zero(wrappers[-1], round_mb))
    tensors = [list(group["params"]) for group in inner.param_groups]
    if any(isinstance(tensor, DTensor) for group in tensors for tensor in group):
        inner.placement = RowBlocks(round_mb)
        return Placed("fsdp2", tensors)
    if ranks.num_ranks > 1:
        inner.placement = Replicas(round_mb=round_mb)
    return Placed("ddp", tensors)
