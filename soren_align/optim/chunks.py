"""Walks over weights chunk by chunk, so that temporary memory is bounded whatever the size of a tensor.

A flat shard of ZeRO is one tensor of all that a rank updates: one temporary of its size is 11 GB for Qwen2.5-3B on one
GPU. Sums over the chunks stay on the device, and are copied to the host once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .rounding import master_weights

CHUNK = 2**22
"""Elements of a chunk: 16 MB in float32. Walks hold up to 32 bytes each, 128 MB (tests/training/test_memory.py)."""


def chunks(*tensors: Tensor | None, numel: int = CHUNK) -> Iterator[tuple[Any, ...]]:
    """Views of at most `numel` elements that cover tensors of one shape, the same elements of each; None for None.

    A tensor that fits into one chunk keeps its shape. No tensor is copied, whatever its strides. Make DTensors local
    before.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if present[0].numel() <= numel:
        yield tensors
        return
    if all(tensor.is_contiguous() for tensor in present):
        # Flat: a chunk then ends where a SIMD register does, and a kernel rounds as it would in one go.
        tensors = tuple(None if tensor is None else tensor.view(-1) for tensor in tensors)
        present = [present[0].view(-1)]
    length = present[0].shape[0]
    step = numel * length // present[0].numel()  # indices of the first dimension per chunk
    for start in range(0, length, max(step, 1)):
        yield from chunks(*(_part(tensor, start, min(step, length - start)) for tensor in tensors), numel=numel)


def _part(tensor: Tensor | None, start: int, step: int) -> Tensor | None:
    if tensor is None:
        return None
    # One index of the first dimension may be too large: it is divided further, along the next one.
    return tensor.narrow(0, start, step) if step else tensor.select(0, start)


def copied_to_cpu(parameter: Tensor, compensation: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A copy of the master weights on the CPU in `dtype`; they are rounded on their own device, chunk by chunk."""
    copy = torch.empty(parameter.shape, dtype=dtype)
    for target, part, rest in chunks(copy, parameter, compensation):
        target.copy_(master_weights(part, rest).to(dtype))
    return copy


class Sums:
    """`length` running sums in float64, kept on the devices of their terms; `totals` reads each device once."""

    def __init__(self, length: int):
        self._length = length
        self._by_device: dict[torch.device, Tensor] = {}

    def add(self, start: int, *values: Tensor) -> None:
        """Add scalars of one device to the sums number `start` and following."""
        device = values[0].device
        if device not in self._by_device:
            self._by_device[device] = torch.zeros(self._length, dtype=torch.float64, device=device)
        self._by_device[device][start : start + len(values)] += torch.stack([value.double() for value in values])

    def totals(self) -> list[float]:
        """All sums, over all devices."""
        rows = [sums.tolist() for sums in self._by_device.values()]
        return [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * self._length
