"""Maps by steps of a quintic: Muon's pushes every singular value towards 1, Pion's the leading ones
alone.
"""

import torch
from torch import Tensor

from ..core.optimizer_settings import MUON_STEPS
from .matrices import (
    frobenius_norm,
    from_wide,
    in_full_precision,
    multiply_add,
    replace_zeros,
    to_wide,
)

# Keller Jordan's coefficients (kellerjordan.github.io/posts/muon), as in torch/optim/_muon.py: the
# steepest slope at zero for which the iteration stays within about [0.7, 1.2].
# test_muons_map_has_the_bits_of_torch compares them.
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7
PROMOTION = (1.875, -1.25, 0.375)
"""a, b, c of a x + b x^3 + c x^5: 15/8 near 0, and 1 at 1 with a slope of 0."""
SUPPRESSION = (0.0, 2.5, -1.5)
"""Fixed points: 0, sqrt(2/3) and 1. Below sqrt(2/3) a step lowers a singular value, above it raises
it towards 1."""


@in_full_precision
def newton_schulz(x: Tensor, steps: int = MUON_STEPS) -> Tensor:
    """U S' V^T of x = U S V^T, with S' between about 0.7 and 1.2 where sigma is above 1% of |x|_F.

    x: [..., m, n], floating point; not modified. Returns [..., m, n] in the dtype of x. Computed in
    bfloat16 with the bits of torch.optim.Muon; a float64 input is computed in float64. Below |x|_F
    = 1e-7 the result shrinks with x, down to zero for zero. Above 1.8e19 float32's sum of squares
    overflows and the result is zero, as in torch. NaN or an infinity gives all NaN.
    """
    y = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.bfloat16)
    # with torch.optim.Muon's bits
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        y = quintic_step(y, A, B, C)
    return from_wide(y, x)


@in_full_precision
def high_pass(x: Tensor, promotions: int = 3, suppressions: int = 2) -> Tensor:
    """U f(S / |x|_F) V^T of x = U S V^T: f is `promotions` steps of PROMOTION, then `suppressions`
    of SUPPRESSION.

    x: [..., m, n], floating point; not modified. Returns [..., m, n] in the dtype of x, with
    singular values in [0, 1]: near 1 for the leading ones, near 0 for the others, and for all of
    them where no mode leads. Computed in float32, or float64 for a float64 input. Zero for zero; a
    matrix that contains a NaN or an infinity gives all NaN. Source: Pion, arXiv 2605.19282, with
    five steps in all; how many of them promote was not in what we could read, and is our choice.
    """
    y = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.float32)
    y = y / replace_zeros(frobenius_norm(y))
    for a, b, c in [PROMOTION] * promotions + [SUPPRESSION] * suppressions:
        y = quintic_step(y, a, b, c)
    return from_wide(y, x)


def quintic_step(y: Tensor, a: float, b: float, c: float) -> Tensor:
    """a y + (b G + c G^2) y for G = y y^T; y: wide, not modified."""
    gram = y @ y.mT
    return multiply_add(y, multiply_add(gram, gram, gram, beta=b, alpha=c), y, beta=a, alpha=1.0)
