"""Second moments of a map's output O, by whose root O is divided: of its rows (NorMuon) or of its
elements (AdaMuon).

    rows        v <- b v + (1 - b) mean of O^2 over each row     one number per output of the layer
    elements    V <- b V + (1 - b) O^2                           one number per weight
                O <- O / (sqrt(v or V) + 1e-8), scaled back to the Frobenius norm that O had
                O <- O / RMS(O)                                     only for match_rms_measured

without bias correction, before the scale of `adjust_lr_fn`. That is the order of both sources:

- rows: arXiv 2510.05491, and `_normuon_normalization_core` of `dion/normuon.py` in microsoft/dion
  (0a059a4). NVIDIA's Emerging-Optimizers (fd77292) takes columns instead if a matrix is wider than
  tall, and divides by sqrt(max(v, eps)).
- elements: arXiv 2507.11005, and `adamuon.py` and Megatron's `muon.py` in Chongjie-Si/AdaMuon
  (369f0b3), with the scale `match_rms_measured`. Text and code both map the sign of the momentum:
  `map_input: sign`. The code's b is its momentum. Emerging-Optimizers neither takes the sign nor
  scales back.

A row is an output of the layer, a row of nn.Linear's weight, whatever the layout in which a model
stores it.

Where they lie: the moments of the rows are a map's state (`layout.MapState`), which is sent to the
matrix's owner with the map's input and back with its output: m numbers beside m n. Those of
elements are of the weight's shape and are updated where the shard of the weight is. Only a matrix's
sums of squares are then added over the ranks, for its scale.
"""

import math

import torch
from torch import Tensor

from ..spectral.matrices import frobenius_norm
from .exchange import Shard
from .layout import MapState
from .rounding import CHUNK, chunks

EPS = 1e-8
"""The number that is added to the root, as in both sources."""
ROWS = "exp_avg_sq_rows"
"""The key of the moments of the rows in an optimizer's state. Those of elements are `exp_avg_sq`,
as AdamW's."""


def row_moments(second_moment: str | None) -> MapState:
    """The state for second moments of the rows, of a matrix of m outputs and n inputs; none for
    others.
    """
    return {ROWS: lambda num_rows, _: (num_rows,)} if second_moment == "rows" else {}


def divided_by_rows(output: Tensor, moments: Tensor, beta: float, *, transposed: bool) -> Tensor:
    """A map's output [..., m, n] over the root of its rows' second moments, with the norm that it
    had.

    moments: [..., m], changed in place. transposed: the rows are columns of `output`, which is not
    modified.
    """
    # A row is an output of the layer, whichever way the weight is stored.
    dim = -2 if transposed else -1
    moments.lerp_(output.square().mean(dim), 1 - beta)
    divided = output / moments.sqrt().add_(EPS).unsqueeze(dim)
    return divided.mul_(frobenius_norm(output) / frobenius_norm(divided).clamp_(min=EPS))


def divided_by_elements(shard: Shard, output: Tensor, beta: float) -> Tensor:
    """A shard's part of a map's output over the root of its second moments, flat, on the device of
    the moments.

    The moments of the shard are changed in place; `shard.squares` becomes the part's share of the
    matrices' squares.
    """
    # Only a rank's own elements: which number is divided by which root needs no other rank.
    moments = shard.second_moments
    output = output.reshape(moments.shape).to(moments.device)
    divided = torch.empty(moments.shape, dtype=output.dtype, device=output.device)
    # Chunk by chunk: a flat shard of ZeRO is all that a rank updates, and temporaries of its size
    # would be gigabytes (see `rounding`).
    for result, numbers, average in chunks(divided, output, moments):
        average.lerp_(numbers.square(), 1 - beta)
        torch.div(numbers, average.sqrt().add_(EPS), out=result)
    shard.squares = torch.stack(
        [_squares(shard, output.reshape(-1)), _squares(shard, divided.view(-1))]
    )
    return divided.view(-1)


def rescaled_(shard: Shard, divided: Tensor, *, to_unit_rms: bool) -> Tensor:
    """The result of `divided_by_elements` with the norms that the outputs had, or with an RMS of 1;
    modified.

    shard.squares: [2, matrices of the weight], of the whole matrices before and after.
    """
    # By now the squares are those of whole matrices, added over the ranks: the one thing that an
    # elementwise division cannot know.
    assert shard.squares is not None
    before, after = shard.squares.sqrt().to(divided.device)
    if to_unit_rms:
        before = before.new_full((), math.sqrt(math.prod(shard.shape) / len(after)))
    factors = (before / after.clamp(min=EPS)).to(divided.dtype)
    if len(factors) == 1:
        return divided.mul_(factors)
    for start in range(0, len(divided), CHUNK):
        part = divided[start : start + CHUNK]
        part.mul_(factors[_matrix_numbers(shard, start, len(part), part.device)])
    return divided


def _squares(shard: Shard, numbers: Tensor) -> Tensor:
    """The sums of the squares of a shard's flat numbers, by matrix of the weight; float64.

    In float64: one float32 sum over 2048 x 2048 squares is off by up to 1e-3 on a CPU, and N ranks
    are to be as one.
    """
    sums = torch.zeros(shard.layout.num_matrices, dtype=torch.float64, device=numbers.device)
    for start in range(0, len(numbers), CHUNK):
        squares = numbers[start : start + CHUNK].double().square_()
        if len(sums) == 1:
            sums += squares.sum()
            continue
        places = _matrix_numbers(shard, start, len(squares), squares.device)
        for number in range(len(sums)):
            sums[number] += (squares * (places == number)).sum()
    return sums


def _matrix_numbers(shard: Shard, start: int, numel: int, device: torch.device) -> Tensor:
    """Which matrix of its weight has each of `numel` elements of a shard, from its element `start`
    on.
    """
    first = shard.offset + start
    return shard.layout.numbers(shard.shape, torch.arange(first, first + numel, device=device))
