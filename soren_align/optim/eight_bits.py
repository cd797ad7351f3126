"""Moments in 8 bits: blocks of 256 numbers, each with a float32 scale, the largest magnitude in it.

A number x in a block of scale s is stored as the whole number c with x = s (c / L)^k, L the largest code. k spreads the
codes: the momentum of a matrix has k = 1, for the smallest error in the norm of the whole; AdamW's moments, of which
each number is divided by another, have more codes near zero.

- Blocks begin at multiples of 256 in each parameter, wherever its numbers lie. The ranks that share a block, which the
  end of a shard cuts, agree on its scale (`SharedBlocks`). So N ranks round as one.
- A parameter of fewer than 4096 numbers has blocks of one number, which is stored exactly.
- Codes are rounded up or down with a dither that is known from step and place: rounded to nearest, a second moment
  would never follow a change below 1% a step, and with beta2 = 0.999 its changes are below 0.1%
  (test_second_moments_follow_gradients_that_shrink). The same step from the same state gives the same bits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chunks import CHUNK

BLOCK, SMALL = 256, 4096
CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
SQUARINGS = {"momentum": 0, "exp_avg": 1, "exp_avg_sq": 2}
"""Of a matrix's momentum and of AdamW's moments: k = 2^SQUARINGS, whose roots are square roots, the quickest."""
ROUNDED_NORM = 1 + BLOCK**0.5 / 127
"""At least |rounded x| / |x| of a momentum: each number of a block moves by less than a code, 1/127 of the largest."""
_GOLDEN, _PLASTIC = (math.sqrt(5) - 1) / 2, 0.7548776662466927
"""Steps and places of the dither: their multiples fill [0, 1) evenly."""


class Segment(NamedTuple):
    """`numel` numbers of a parameter of `whole_numel`: from `offset` on in it, from `start` on in a flat shard.

    shared: number of each block that lies on other ranks too -> its number among all shared blocks.
    """

    start: int
    numel: int
    offset: int
    whole_numel: int
    shared: Mapping[int, int] = {}


class Span(NamedTuple):
    """Blocks of `size` numbers from `start` to `stop` of a flat tensor, or one shorter block.

    offset: of the first number in its block. scale: the number of the first block. shared: the number of the block
    among those that several ranks share; -1: these are on this rank.
    """

    start: int
    stop: int
    size: int
    offset: int
    scale: int
    shared: int


class Blocks(NamedTuple):
    """The blocks of a tensor: its spans, int64 [n, 6], none longer than a chunk, and the number of blocks."""

    spans: Tensor
    total: int

    @staticmethod
    def of(parameter: Tensor, segments: Sequence[Segment] | None = None) -> "Blocks":
        """Those of the parameters' segments in a flat shard; segments None: of one whole parameter."""
        spans: list[Span] = []
        total = 0
        for segment in segments if segments is not None else [Segment(0, parameter.numel(), 0, parameter.numel())]:
            for span in _spans(segment):
                spans.append(span._replace(scale=total))
                total += _num_blocks(span)
        return Blocks(torch.tensor(spans, dtype=torch.int64).reshape(-1, len(Span._fields)), total)


def _spans(segment: Segment) -> Iterator[Span]:
    """The spans of a segment: the remainder of a block, then whole blocks, then the beginning of one."""
    size, most = (1, CHUNK) if segment.whole_numel < SMALL else (BLOCK, CHUNK // BLOCK * BLOCK)
    start, end = segment.start, segment.start + segment.numel
    while start < end:
        number, offset = divmod(segment.offset + start - segment.start, size)
        whole = min(most, (end - start) // size * size)
        stop = start + whole if whole and not offset else min(end, start + size - offset)
        yield Span(start, stop, size, offset, 0, segment.shared.get(number, -1) if size == BLOCK else -1)
        start = stop


def _num_blocks(span: Span) -> int:
    return -(-(span.stop - span.start) // span.size)


def spans_of(state: dict[str, Any]) -> Iterator[Span]:
    """The spans of a parameter's state; none if it is not in 8 bits."""
    if "spans" in state:
        yield from (Span(*row) for row in state["spans"].tolist())


def decoded(state: dict[str, Any], key: str, span: Span) -> Tensor:
    """The numbers of a span, float32; a new tensor."""
    codes, scales, squarings = _of(state, key, span)
    values = codes.float().div_(torch.iinfo(codes.dtype).max)
    values = _squared_(values.clone(), squarings).copysign_(values) if squarings else values
    return values.view(len(scales), -1).mul_(scales[:, None]).view(-1)


def encode_(state: dict[str, Any], key: str, span: Span, values: Tensor, shared: "SharedBlocks | None" = None) -> None:
    """Store the numbers of a span, [numel] in float32; not modified. shared: gets the blocks that it has to finish."""
    if shared is not None and span.shared >= 0:
        shared.pending.append((state, key, span, values))
        return
    _encode_(state, key, span, values, values.view(_num_blocks(span), -1).abs().amax(1))


class SharedBlocks:
    """The blocks of one step that lie on several ranks, whose scale is the largest magnitude on any of them.

    num_blocks: of all ranks. largest: float32 [n] -> the maxima over the ranks; collective.
    """

    def __init__(self, num_blocks: int, largest: Callable[[Tensor], Tensor]):
        self._num_blocks, self._largest = num_blocks, largest
        self.pending: list[tuple[dict[str, Any], str, Span, Tensor]] = []

    def encode_(self) -> None:
        """Store the pending blocks. Collective if any rank has one."""
        if not self._num_blocks:
            return
        keys = list(CODES)
        slots = torch.tensor([keys.index(key) * self._num_blocks + span.shared for _, key, span, _ in self.pending])
        here = torch.zeros(len(keys) * self._num_blocks)
        if self.pending:  # on their device, so that the host reads none
            maxima = torch.stack([values.abs().amax() for *_, values in self.pending])
            slots, here = slots.to(maxima.device), here.to(maxima.device)
            here.scatter_reduce_(0, slots, maxima, "amax")
        largest = self._largest(here).to(here.device)
        for (state, key, span, values), maximum in zip(self.pending, largest[slots.long()], strict=True):
            _encode_(state, key, span, values, maximum)
        self.pending = []


def _encode_(state: dict[str, Any], key: str, span: Span, values: Tensor, largest: Tensor) -> None:
    codes, scales, squarings = _of(state, key, span)
    scales.copy_(largest)
    levels = torch.iinfo(codes.dtype).max
    blocks = values.view(len(scales), -1)
    magnitudes = blocks.abs()
    magnitudes = magnitudes.div_(scales[:, None].clamp(min=torch.finfo(torch.float32).tiny)).view(-1)
    lower = magnitudes.clone()
    for _ in range(squarings):
        lower.sqrt_()
    lower.mul_(levels).floor_().clamp_(max=levels)
    below, above = _squared_(lower / levels, squarings), _squared_((lower + 1).div_(levels), squarings)
    excess = magnitudes.sub_(below).div_(above.sub_(below)).view(len(scales), -1)
    dither = _dither(span.offset, int(state["step"]), blocks.shape[1], values.device)
    rounded = lower.add_((excess > dither).view(-1)).clamp_(max=levels)
    if codes.dtype == torch.uint8:
        rounded.clamp_(min=1)  # 0 would make AdamW divide by eps
    codes.copy_(rounded.copysign_(values) if codes.dtype == torch.int8 else rounded)


def decoded_range(state: dict[str, Any], key: str, start: int, numel: int) -> Tensor:
    """`numel` numbers from `start` on of the flat moment, float32: those of whole segments."""
    values = torch.zeros(numel, dtype=torch.float32, device=state[key].device)
    for span in spans_of(state):
        if start <= span.start < start + numel:
            values[span.start - start : span.stop - start] = decoded(state, key, span)
    return values


def norm(state: dict[str, Any], key: str) -> Tensor:
    """The Euclidean norm of a moment, of shape [1]."""
    squares = [decoded(state, key, span).square_().sum() for span in spans_of(state)]
    return torch.stack(squares).sum().sqrt().reshape(1) if squares else state[key].new_zeros(1, dtype=torch.float32)


def _of(state: dict[str, Any], key: str, span: Span) -> tuple[Tensor, Tensor, int]:
    """Codes and scales of a span, sharing the state's memory, and the number of squarings."""
    scales = state[f"{key}_scale"][span.scale : span.scale + _num_blocks(span)]
    kind = key if "exp_avg_sq_scale" in state else "momentum"
    return state[key].view(-1)[span.start : span.stop], scales, SQUARINGS[kind]


def _squared_(values: Tensor, times: int) -> Tensor:
    for _ in range(times):
        values.square_()
    return values


@lru_cache(maxsize=16)  # nearly all blocks of a step have the same: one copy to a GPU instead of one for each span
def _dither(offset: int, step: int, length: int, device: torch.device) -> Tensor:
    """A number in [0, 1) for each place of a block from `offset` on."""
    places = torch.arange(offset, offset + length, dtype=torch.float64)
    return (places * _PLASTIC + step * _GOLDEN).remainder_(1).float().to(device)
