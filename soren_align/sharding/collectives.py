"""The collectives of a step, and the record of their order.

Every rank must start the same collectives in the same order: with NCCL another order is a deadlock,
without a message. So each is started here, where `recorded` sees it (capture.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist
from torch import Tensor

_lines: ContextVar[list[str] | None] = ContextVar("_lines", default=None)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The collectives that this thread starts in the block: name, sizes, dtype, ranks; no data."""
    lines: list[str] = []
    token = _lines.set(lines)
    try:
        yield lines
    finally:
        _lines.reset(token)


def _record(name: str, sizes: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
    if (lines := _lines.get()) is not None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"{name} {sizes}, {dtype}, ranks {dist.get_process_group_ranks(group)}")


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Replace `tensor` by the sum of all ranks, or their maximum."""
    _record("all_reduce", f"{operation.name} {[*tensor.shape]}", tensor, group)
    dist.all_reduce(tensor, operation, group=group)


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    """Start to send `tensor` from the global rank `source` to all others."""
    _record("broadcast", f"{[*tensor.shape]} from rank {source}", tensor, group)
    return dist.broadcast(tensor, source, group=group, async_op=True)  # type: ignore[return-value]


def all_to_all(
    into: Tensor, from_: Tensor, num_into: list[int], num_from: list[int], group: dist.ProcessGroup
) -> dist.Work:
    """Start to send `num_from[rank]` numbers of `from_` to each rank; `num_into` arrive."""
    _record("all_to_all", f"sends {num_from}, receives {num_into}", from_, group)
    work = dist.all_to_all_single(into, from_, num_into, num_from, group=group, async_op=True)
    return work  # type: ignore[return-value]
