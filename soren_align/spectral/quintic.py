"""Muon's map: five steps of a quintic that pushes every singular value towards 1."""

import torch
from torch import Tensor

from ..core.optimizer_settings import MUON_STEPS
from .matrices import from_wide, in_full_precision, multiply_add, to_wide

# Keller Jordan's coefficients (kellerjordan.github.io/posts/muon), as in torch/optim/_muon.py: the steepest slope at
# zero for which the iteration stays within about [0.7, 1.2]. test_muons_map_has_the_bits_of_torch compares them.
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


@in_full_precision
def newton_schulz(x: Tensor, steps: int = MUON_STEPS) -> Tensor:
    """U S' V^T of x = U S V^T, with S' between about 0.7 and 1.2 where sigma is above 1% of |x|_F.

    x: [..., m, n], floating point; not modified.
    Returns [..., m, n] in the dtype of x. Computed in bfloat16 with the bits of torch.optim.Muon; a float64
    input is computed in float64. Below |x|_F = 1e-7 the result shrinks with x, down to zero for zero. Above 1.8e19
    float32's sum of squares overflows and the result is zero, as in torch. NaN or an infinity gives all NaN.
    """
    y = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.bfloat16)
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=EPS)  # with torch.optim.Muon's bits
    for _ in range(steps):
        y = quintic_step(y, A, B, C)
    return from_wide(y, x)


def quintic_step(y: Tensor, a: float, b: float, c: float) -> Tensor:
    """a y + (b G + c G^2) y for G = y y^T; y: wide, not modified."""
    gram = y @ y.mT
    return multiply_add(y, multiply_add(gram, gram, gram, beta=b, alpha=c), y, beta=a, alpha=1.0)
