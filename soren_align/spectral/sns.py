"""Soft Newton-Schulz, the paper's Algorithm 1, approximates the sigmoid by matrix products.

    s(sigma) = (1 + tanh(sigma / 2)) / 2  ~  (Q_K + T_2) / 2,    Q_0 = x / (|x|_F + eps),  T_0 = x / 4

Q converges to the polar factor, T to tanh(sigma / 2), both by y <- (3 I - y y^T) y / 2. That step
increases from 0 to 1 on [0, 1], decreases beyond, and diverges beyond sqrt(5), so T is valid for
singular values up to 4 only. A matrix with a larger one is guarded: its T starts from x /
sigma_max, which keeps the result finite, monotone and bounded by 1. `released_sigmoid`, the map of
the authors' released code, takes the same steps from other starts.
"""

import torch
from torch import Tensor

from ..core.optimizer_settings import RELEASED_STEPS, SNS_STEPS
from .coefficients import NEWTON_SCHULZ
from .iterate import iterate
from .matrices import (
    all_finite,
    frobenius_norm,
    from_wide,
    in_full_precision,
    replace_zeros,
    to_wide,
)

T_STEPS = 2
T_LIMIT = 4.0
EPS = 1e-8


def soft_newton_schulz(
    x: Tensor, steps: int = SNS_STEPS, max_norm: float | None = None, in_bfloat16: bool = False
) -> Tensor:
    """U s(S) V^T of x = U S V^T, approximately: s is the sigmoid.

    x: [..., m, n], floating point; not modified.
    steps: K of the paper; singular values with sigma * 1.5^K well below |x|_F map to less than 1/2.
    max_norm: an upper bound of |x|_F of every matrix, if it is known; up to 4 the host reads
    nothing from the device.
    in_bfloat16: iterate in bfloat16, as the paper's authors do: on every sixth of the recorded
    momenta
        (`bench.spectra`) 31.2% from exact_sigmoid on average, in float32 30.6%.
    Returns [..., m, n] in the dtype of x. Within 4.4% of the sigmoid for singular values in [0.01,
    1] that are also above 1% of |x|_F, from 13 steps on. Zero for zero; below |x|_F = EPS the
    result shrinks with x. Singular values above 4 are guarded (see the module). A matrix that
    contains a NaN or an infinity gives all NaN.
    Source: the paper's Algorithm 1.
    """
    return guarded_soft_newton_schulz(x, steps, max_norm, in_bfloat16)[0]


@in_full_precision
def guarded_soft_newton_schulz(
    x: Tensor, steps: int = SNS_STEPS, max_norm: float | None = None, in_bfloat16: bool = False
) -> tuple[Tensor, Tensor | int]:
    """`soft_newton_schulz` and the number of guarded matrices."""
    if steps < 0:
        raise ValueError(f"steps: found {steps}; write 0 or more")

    def iterate(y: Tensor, num_steps: int) -> Tensor:
        return cubic_iteration(y.bfloat16() if in_bfloat16 else y, num_steps).to(y.dtype)

    wide = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.float32)
    norm = frobenius_norm(wide)

    # sigma_max <= |x|_F, which decides the usual case; it is False for NaN and overflow too.
    if bool((norm <= T_LIMIT).all()) if max_norm is None else max_norm <= T_LIMIT:
        q, t = wide / (norm + EPS), wide / T_LIMIT
        return from_wide((iterate(q, steps) + iterate(t, T_STEPS)) / 2, x), 0

    finite = all_finite(wide)
    q, t, guarded = _guarded_start(wide.where(finite, 0.0), norm)
    result = (iterate(q, steps) + iterate(t, T_STEPS)) / 2
    return from_wide(result.masked_fill(~finite, torch.nan), x), guarded.sum()


def _guarded_start(wide: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q_0, T_0, and a mask of the guarded matrices ([..., 1, 1] bool); the others have the bits of
    the usual case.
    """
    largest = wide.abs().amax(dim=(-2, -1), keepdim=True)
    # entries up to 1: its norm and Gram matrix cannot overflow
    unit = wide / largest.where(largest > 0, 1.0)
    sigma_max = torch.ones_like(largest, dtype=torch.float64)  # of unit
    # Only these are decomposed: |x|_F bounds sigma_max, and usually suffices.
    candidate = (norm > T_LIMIT)[..., 0, 0]
    large = unit[candidate].double()
    eigenvalues = torch.linalg.eigvalsh(large @ large.mT)
    sigma_max[candidate] = eigenvalues[..., -1:, None].sqrt()

    # The margin is for eigvalsh's rounding at sigma_max = 4 exactly; T_2 is flat there, so it costs
    # nothing.
    guarded = candidate[..., None, None] & (sigma_max * largest > T_LIMIT * (1 + 1e-12))
    q = (unit / frobenius_norm(unit)).where(norm.isinf(), wide / (norm + EPS))
    t = (unit / sigma_max.to(unit.dtype)).where(guarded, wide / T_LIMIT)
    return q, t, guarded


def cubic_iteration(y: Tensor, steps: int) -> Tensor:
    """y <- (3 I - y y^T) y / 2, `steps` times; y: wide, not modified."""
    return iterate(y, [NEWTON_SCHULZ] * steps)


@in_full_precision
def released_sigmoid(x: Tensor, steps: int = RELEASED_STEPS) -> Tensor:
    """U f(S / |x|_F) V^T of x = U S V^T: with 5 steps f(0.1) is 0.36, f(0.2) 0.53, f(1) 0.76.

        (Q_K + T_2) / 2,    Q_0 = x / (|x|_F + 1e-8),  T_0 = x / (4 |x|_F),  K = 5

    Both are divided by the norm, so that the result does not depend on the gradient's scale, and
    five steps multiply a small singular value by 1.5^5 = 7.6 only. Up to 0.1 |x|_F, where most of a
    large matrix's singular values are, the map is within 13% of 4.08 S / |x|_F: momentum SGD,
    normalised.
    x: [..., m, n], floating point; not modified. steps: K. Returns [..., m, n] in the dtype of x.
    Zero for zero; a matrix that contains a NaN or an infinity gives all NaN. No singular value is
    out of range, and the host reads nothing.
    Source: muon.py of github.com/PhiVanDat123/sigmoid_muon, commit c72cda5, its formulas written
    anew.
    """
    if steps < 0:
        raise ValueError(f"steps: found {steps}; write 0 or more")
    wide = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.float32)
    # Entries up to 1, so that no norm overflows or vanishes. NaN and infinity make the whole matrix
    # NaN.
    largest = replace_zeros(torch.linalg.vector_norm(wide, torch.inf, dim=(-2, -1), keepdim=True))
    unit = wide / largest
    norm = replace_zeros(frobenius_norm(unit))
    # Both starts have names, so that they live equally long whether or not CPython inlines the
    # call, and the memory is that of `usual_workspace_numbers`: without, it was once one matrix
    # more, in a process that had run other tests.
    q, t = unit / (norm + EPS / largest), unit / (T_LIMIT * norm)
    del unit
    q, t = cubic_iteration(q, steps), cubic_iteration(t, T_STEPS)
    return from_wide(q.add_(t).mul_(0.5), x)


def released_level(num_rows: int, num_columns: int, steps: int = RELEASED_STEPS) -> float:
    """The value to which `released_sigmoid` maps the singular values of a matrix whose singular
    values are all equal.

    A matrix with any other spectrum gets a smaller update, in the Frobenius norm.
    """
    spectrum = torch.eye(1, dtype=torch.float64) / min(num_rows, num_columns) ** 0.5
    return (
        float(cubic_iteration(spectrum, steps) + cubic_iteration(spectrum / T_LIMIT, T_STEPS)) / 2
    )
