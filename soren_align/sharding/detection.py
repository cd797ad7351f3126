"""The kind of sharding of an optimizer, detected from its wrappers and tensors, and the placement for it."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..optim import SpectralOptimizer
from .exchange_plan import ROUND_MB
from .ranks import Ranks
from .strategies import Replicas, RowBlocks
from .zero import set_zero_placement


class Sharding(NamedTuple):
    """kind: "ddp", "zero" or "fsdp2"; "ddp" for one process too. tensors: those that this rank updates, by group."""

    kind: str
    tensors: list[list[Tensor]]


def set_placement(optimizer: Any, ranks: Ranks, round_mb: float = ROUND_MB) -> Sharding:
    """Set the placement of the SpectralOptimizer within accelerate's wrappers; returns its sharding. Collective.

    Raises ValueError, on every rank, for an unknown or unsupported sharding; see `set_zero_placement` and `RowBlocks`.
    """
    *wrappers, inner = chain_of(optimizer)
    if not isinstance(inner, SpectralOptimizer):
        raise ValueError(f"{type(inner).__name__} would step, which is not of soren_align.optim")
    if wrappers and "deepspeed" in type(wrappers[-1]).__module__:
        return Sharding("zero", set_zero_placement(wrappers[-1], round_mb))
    tensors = [list(group["params"]) for group in inner.param_groups]
    if any(isinstance(tensor, DTensor) for group in tensors for tensor in group):
        inner.placement = RowBlocks(round_mb)
        return Sharding("fsdp2", tensors)
    if ranks.num_ranks > 1:
        inner.placement = Replicas(round_mb=round_mb)
    return Sharding("ddp", tensors)


def chain_of(optimizer: Any) -> list[Any]:
    """The optimizer in all its wrappers, from the outermost to the innermost, which steps."""
    chain = [optimizer]
    while hasattr(chain[-1], "optimizer"):
        chain.append(chain[-1].optimizer)
    return chain
