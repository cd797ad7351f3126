"""Pion's map: quintic steps that raise the leading singular values to 1, then steps that lower the others towards 0."""

import torch
from torch import Tensor

from .matrices import frobenius_norm, from_wide, in_full_precision, replace_zeros, to_wide
from .quintic import quintic_step

PROMOTION = (1.875, -1.25, 0.375)
"""a, b, c of a x + b x^3 + c x^5: 15/8 near 0, and 1 at 1 with a slope of 0."""
SUPPRESSION = (0.0, 2.5, -1.5)
"""Fixed points: 0, sqrt(2/3) and 1. Below sqrt(2/3) a step lowers a singular value, above it raises it towards 1."""


@in_full_precision
def high_pass(x: Tensor, promotions: int = 3, suppressions: int = 2) -> Tensor:
    """U f(S / |x|_F) V^T of x = U S V^T: f is `promotions` steps of PROMOTION, then `suppressions` of SUPPRESSION.

    x: [..., m, n], floating point; not modified.
    Returns [..., m, n] in the dtype of x, with singular values in [0, 1]: near 1 for the leading ones, near 0 for the
    others, and for all of them where no mode leads. Computed in float32, or float64 for a float64 input. Zero for zero;
    a matrix that contains a NaN or an infinity gives all NaN. Source: Pion, arXiv 2605.19282, with five steps in all;
    how many of them promote was not in what we could read, and is our choice.
    """
    y = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.float32)
    y = y / replace_zeros(frobenius_norm(y))
    for a, b, c in [PROMOTION] * promotions + [SUPPRESSION] * suppressions:
        y = quintic_step(y, a, b, c)
    return from_wide(y, x)
