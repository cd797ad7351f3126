"""How much a map's output depends on the singular values of its input, and how far that takes it
from Muon's.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def lowest_cosine(least: float, largest: float) -> float:
    """The lowest cosine to Muon's update that an output can have whose singular values lie in
    [least, largest].
    """
    return 2 * math.sqrt(least * largest) / (least + largest)


LOWEST_COSINE_OF_THE_SIGMOID = lowest_cosine(1 / 2, 1)
"""Of the exact sigmoid's update to Muon's, for any momentum and any temperature;
docs/studies/theorems.md proves it."""


@dataclass(frozen=True)
class Contrast:
    """The output U t V^T of a map beside its input U S V^T and Muon's update U V^T, over the modes
    where S is not 0.

    ratio: the largest of t over the median. to_muon, to_momentum: cosines of the angles to U V^T
    and to U S V^T. All are None where S, or t, is zero.
    """

    ratio: float | None
    to_muon: float | None
    to_momentum: float | None


def contrast(sigma: Tensor, values: Tensor) -> Contrast:
    """The contrast of a map that makes `values` of the singular values sigma; both [r], of the same
    order.

    sigma: 0 for each mode of the numerical null space, see `null_space_bound`. Computed in float64.
    """
    numbers = contrast_numbers(sigma, values).tolist()
    return Contrast(*(number if math.isfinite(number) else None for number in numbers))


def contrast_numbers(sigma: Tensor, values: Tensor) -> Tensor:
    """`contrast` as three numbers on the device of sigma, NaN or infinite in place of None."""
    sigma, values = sigma.double(), values.double().where(sigma > 0, 0.0)
    num_modes, norm = (sigma > 0).double().sum(), values.norm()
    median = median_of_modes(values, sigma)
    to_muon, to_momentum = (
        values.sum() / (norm * num_modes.sqrt()),
        values @ sigma / (norm * sigma.norm()),
    )
    return torch.stack([values.max() / median, to_muon, to_momentum])


def median_of_modes(values: Tensor, sigma: Tensor) -> Tensor:
    """The median of `values` over the modes where sigma is not 0; NaN without one."""
    return values.masked_fill(sigma == 0, torch.nan).nanmedian()
