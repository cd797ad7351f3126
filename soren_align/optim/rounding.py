"""Float32 master weights in 16 + 16 bits: a bfloat16 parameter, and a compensation beside it.

A bfloat16 weight of 0.02 has neighbours 1.2e-4 away: an update of 1e-8 is rounded away, and so are
all that follow. The compensation keeps the rounding error of every update, as in Kahan's summation.
A bfloat16 compensation, the usual choice, loses small updates too once it has grown to 256 times
their size: Soren at 1e-6 is 4% of its total change off the float32 weights after 200 steps, 25%
after 1000 (notes/log.md). So the compensation is a fixed-point number of the same size: the lower
half of a float32 of which the parameter is the upper half, rounded. Together they are that float32,
to the last bit.

Weights are walked over in chunks, so that temporary memory is bounded whatever the size of a
tensor: a flat shard of ZeRO is one tensor of all that a rank updates, and one temporary of its size
is 11 GB for Qwen2.5-3B on one GPU.
"""

import math
from collections.abc import Iterator
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
    # Integers and not a sum of two floats: the two halves are bits of one float32, and none is
    # lost (test_weights_and_compensation_are_a_float32_and_back).
    upper = parameter.view(torch.int16).to(torch.int32) << 16
    return upper.add_(compensation).view(torch.float32)


def store_master_weights_(parameter: Tensor, compensation: Tensor | None, weights: Tensor) -> None:
    """Write `weights` to `parameter`, rounded, and the rounding error to the compensation if there
    is one.
    """
    if compensation is None:
        if weights is not parameter:
            parameter.copy_(weights)
        return
    bits = weights.view(torch.int32)
    # Half of the lower 65536 is rounded up, and not to even, so that the remainder fits: -32768 to
    # 32767.
    upper = (bits + 0x8000) >> 16
    compensation.copy_(bits - (upper << 16))
    parameter.copy_(upper.to(torch.int16).view(torch.bfloat16))


def ulp(weight: float, dtype: torch.dtype) -> float:
    """The distance from `weight`, 0 or more, to the next larger number of `dtype`; 0 at 0."""
    return 2.0 ** math.floor(math.log2(weight)) * torch.finfo(dtype).eps if weight else 0.0


CHUNK = 2**22
"""Elements of a chunk: 16 MB in float32. Walks hold up to 32 bytes each, 128 MB
(tests/training/test_memory.py)."""


def chunks(*tensors: Tensor | None, numel: int = CHUNK) -> Iterator[tuple[Any, ...]]:
    """Views of at most `numel` elements that cover tensors of one shape, the same elements of each;
    None for None.

    A tensor that fits into one chunk keeps its shape. No tensor is copied, whatever its strides.
    Make DTensors local before.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if present[0].numel() <= numel:
        yield tensors
        return
    if all(tensor.is_contiguous() for tensor in present):
        # Flat: a chunk then ends where a SIMD register does, and a kernel rounds as it would in one
        # go.
        tensors = tuple(None if tensor is None else tensor.view(-1) for tensor in tensors)
        present = [present[0].view(-1)]
    length = present[0].shape[0]
    # A flat tensor is cut anywhere, one that cannot be viewed flat along its first dimension.
    step = numel * length // present[0].numel()  # indices of the first dimension per chunk
    for start in range(0, length, max(step, 1)):
        # One index of the first dimension may be too large: it is divided further, along the next
        # one.
        part = slice(start, start + step) if step else start
        yield from chunks(
            *(None if tensor is None else tensor[part] for tensor in tensors), numel=numel
        )


def copied_to_cpu(parameter: Tensor, compensation: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A copy of the master weights on the CPU in `dtype`; they are rounded on their own device,
    chunk by chunk.
    """
    copy = torch.empty(parameter.shape, dtype=dtype)
    for target, part, rest in chunks(copy, parameter, compensation):
        target.copy_(master_weights(part, rest).to(dtype))
    return copy


class Sums:
    """`length` running sums in float64, kept on the devices of their terms; `totals` reads each
    device once.
    """

    def __init__(self, length: int):
        self._length = length
        self._by_device: dict[torch.device, Tensor] = {}

    def add(self, start: int, *values: Tensor) -> None:
        """Add scalars of one device to the sums number `start` and following."""
        device = values[0].device
        # On the device: a sum on the host would wait for the GPU at each term.
        if device not in self._by_device:
            self._by_device[device] = torch.zeros(self._length, dtype=torch.float64, device=device)
        self._by_device[device][start : start + len(values)] += torch.stack(
            [value.double() for value in values]
        )

    def totals(self) -> list[float]:
        """All sums, over all devices."""
        rows = [sums.tolist() for sums in self._by_device.values()]
        return [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * self._length
