"""Moments in 8 bits: blocks of 256 numbers, each with a float32 scale, the largest magnitude in it.

A number x in a block of scale s is stored as the whole number c with x = s (c / L)^k, L the largest
code: 127 of a signed moment, 255 of a second one. k spreads the codes: the momentum of a matrix has
k = 1, for the smallest error in the norm of the whole; AdamW's moments, of which each number is
divided by another, have more codes near zero.

- Blocks begin at multiples of 256 in each rank's shard of a parameter, and none lies on two ranks.
So N ranks round as
  one but in the blocks that the end of a shard cuts or shifts, where both are within a code of the
  exact number.
- A parameter of fewer than 4096 numbers has blocks of one number, which is stored exactly.
- Codes are rounded up or down with a dither that is known from step and place: rounded to nearest,
a second moment
  would never follow a change below 1% a step, and with beta2 = 0.999 its changes are below 0.1%
  (test_second_moments_follow_gradients_that_shrink). The same step from the same state gives the
  same bits.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rounding import CHUNK

BLOCK, SMALL = 256, 4096
CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
SQUARINGS = {"momentum": 0, "exp_avg": 1, "exp_avg_sq": 2}
"""Of a matrix's momentum and of AdamW's moments: k = 2^SQUARINGS, whose roots are square roots, the
quickest."""
ROUNDED_NORM = 1 + BLOCK**0.5 / 127
"""At least |rounded x| / |x| of a momentum: each number of a block moves by less than a code, 1/127
of the largest."""
_GOLDEN, _PLASTIC = (math.sqrt(5) - 1) / 2, 0.7548776662466927
"""Steps and places of the dither: their multiples fill [0, 1) evenly."""

Part = tuple[int, int, int]
"""(start, numel, numel of the whole parameter): a parameter's elements in a tensor, from `start`
on."""


class Blocks(NamedTuple):
    """Equal blocks of `size` numbers from `start` to `stop` of a flat tensor, or one shorter block.

    scale: the number of the first block among those of the tensor.
    """

    start: int
    stop: int
    size: int
    scale: int

    @property
    def number(self) -> int:
        """The number of blocks."""
        return -(-(self.stop - self.start) // self.size)


def new_blocks(parts: Sequence[Part]) -> tuple[Tensor, int]:
    """The blocks of a tensor's parameters, int64 [n, 4]: a row of `Blocks` for each; and the number
    of all blocks.
    """
    rows: list[Blocks] = []
    total = 0
    for start, numel, whole_numel in parts:
        if numel:
            rows.append(Blocks(start, start + numel, 1 if whole_numel < SMALL else BLOCK, total))
            total += rows[-1].number
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, len(Blocks._fields)), total


def blocks_of(state: dict[str, Any]) -> Iterator[Blocks]:
    """The blocks of a parameter's state in runs of at most a chunk; none if it is not in 8 bits."""
    for start, stop, size, scale in state["blocks"].tolist() if "blocks" in state else ():
        most, end_of_whole = CHUNK // size * size, stop - (stop - start) % size
        for begin in range(start, end_of_whole, most):
            yield Blocks(
                begin, min(begin + most, end_of_whole), size, scale + (begin - start) // size
            )
        if end_of_whole < stop:  # the last block is shorter
            yield Blocks(end_of_whole, stop, size, scale + (end_of_whole - start) // size)


def decoded(state: dict[str, Any], key: str, blocks: Blocks) -> Tensor:
    """The numbers of these blocks, float32; a new tensor."""
    codes, scales, squarings = _codes(state, key, blocks)
    values = codes.float().div_(torch.iinfo(codes.dtype).max)
    values = _squared_(values.clone(), squarings).copysign_(values) if squarings else values
    return values.view(len(scales), -1).mul_(scales[:, None]).view(-1)


def encode_(state: dict[str, Any], key: str, blocks: Blocks, values: Tensor) -> None:
    """Store the numbers of these blocks, [numel] in float32; not modified."""
    codes, scales, squarings = _codes(state, key, blocks)
    matrix = values.view(len(scales), -1)
    magnitudes = matrix.abs()
    scales.copy_(magnitudes.amax(1))
    levels = torch.iinfo(codes.dtype).max
    magnitudes = magnitudes.div_(scales[:, None].clamp(min=torch.finfo(torch.float32).tiny)).view(
        -1
    )
    lower = magnitudes.clone()
    for _ in range(squarings):
        lower.sqrt_()
    lower.mul_(levels).floor_().clamp_(max=levels)
    below, above = (
        _squared_(lower / levels, squarings),
        _squared_((lower + 1).div_(levels), squarings),
    )
    excess = magnitudes.sub_(below).div_(above.sub_(below)).view(len(scales), -1)
    dither = _dither(int(state["step"]), matrix.shape[1], values.device)
    rounded = lower.add_((excess > dither).view(-1)).clamp_(max=levels)
    if codes.dtype == torch.uint8:
        rounded.clamp_(min=1)  # 0 would make AdamW divide by eps
    codes.copy_(rounded.copysign_(values) if codes.dtype == torch.int8 else rounded)


def decoded_range(state: dict[str, Any], key: str, start: int, numel: int) -> Tensor:
    """`numel` numbers from `start` on of the flat moment, float32."""
    values = torch.zeros(numel, dtype=torch.float32, device=state[key].device)
    for run, stop, size, scale in blocks_of(state):
        first, last = max(start, run), min(start + numel, stop)
        if first < last:
            # only the blocks that have some of them
            before, end = (first - run) // size, -(-(last - run) // size)
            part = Blocks(run + before * size, min(run + end * size, stop), size, scale + before)
            here = decoded(state, key, part)[first - part.start : last - part.start]
            values[first - start : last - start] = here
    return values


def norm(state: dict[str, Any], key: str) -> Tensor:
    """The Euclidean norm of a moment, of shape [1]."""
    squares = [decoded(state, key, blocks).square_().sum() for blocks in blocks_of(state)]
    return (
        torch.stack(squares).sum().sqrt().reshape(1)
        if squares
        else state[key].new_zeros(1, dtype=torch.float32)
    )


def _codes(state: dict[str, Any], key: str, blocks: Blocks) -> tuple[Tensor, Tensor, int]:
    """Codes and scales of these blocks, sharing the state's memory, and the number of squarings."""
    scales = state[f"{key}_scale"][blocks.scale : blocks.scale + blocks.number]
    kind = key if "exp_avg_sq_scale" in state else "momentum"
    return state[key].view(-1)[blocks.start : blocks.stop], scales, SQUARINGS[kind]


def _squared_(values: Tensor, times: int) -> Tensor:
    for _ in range(times):
        values.square_()
    return values


# nearly all blocks of a step have the same: one copy to a GPU instead of one for each run
@lru_cache(maxsize=16)
def _dither(step: int, length: int, device: torch.device) -> Tensor:
    """A number in [0, 1) for each place of a block."""
    places = torch.arange(length, dtype=torch.float64)
    return (places * _PLASTIC + step * _GOLDEN).remainder_(1).float().to(device)
