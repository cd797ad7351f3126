"""Powers of the singular values by inverses of shifted Gram matrices, without a decomposition.

    U S^p V^T = N^p (r(R) x / N)  of  x = U S V^T,     R = x x^T / N^2,     N = (sum of sigma^4)^(1/4) = |x x^T|_F^(1/2)
    r(lambda) = c + sum of w_k / (lambda + t_k)  ~  lambda^((p - 1) / 2)

No composition of a few odd polynomials is a power: at the products of minimax their errors are 4%
to 47%. A rational function is: five inverses are within 1.5% for sigma / N from RESOLUTION on. All
w, t and c are positive, so that nothing cancels, the output rises from 0 at sigma = 0, and R + t I
is positive definite, whatever the rank of x is.

An inverse is a recursion on halves, which is matrix products but for blocks of LEAF rows. It loses
the square of the condition, up to 1 / t, so that those of small shifts are in float64, with a Gram
matrix that is. research/studies/powers.py computes POWERS; tests/spectral/test_powers.py proves
their errors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .exact import spectral_power
from .matrices import (
    all_finite,
    frobenius_norm,
    from_wide,
    in_full_precision,
    multiply_add,
    replace_zeros,
    to_wide,
)

RESOLUTION = 0.0004
"""The sigma / N from which the errors hold."""
FROM_ROWS = 1024
"""Rows (the shorter side) from which `power` has no decomposition."""
FLOAT32_FROM = 1e-3
"""The shift from which an inverse is in float32. Then 1/i is 6e-6 from float64, and rank m/8 and
rank 1, where x itself has noise in its null space, are 2e-4 and 5e-4; with those of 2e-4 in float32
too 8e-4, 3e-4, 1e-3 (1024 x 1024)."""
LEAF = 256
"""Rows of a block that is inverted by its Cholesky factor."""


class Poles(NamedTuple):
    """lambda^((p - 1) / 2) ~ constant + sum of weights / (lambda + shifts), for lambda from
    RESOLUTION^2 to TOP^2.
    """

    shifts: tuple[float, ...]
    weights: tuple[float, ...]
    constant: float
    error: float  # the relative error is at most this


POWERS: dict[float, Poles] = {
    0.5: Poles(
        shifts=(2.068527e-07, 7.2140973e-06, 0.00022784943, 0.0071509262, 0.22065857),
        weights=(8.9376374e-06, 0.00010732889, 0.0014489607, 0.018816251, 0.26465285),
        constant=0.77210457,
        error=0.01,
    ),
    0.25: Poles(
        shifts=(1.5475331e-07, 5.7557046e-06, 0.00018119631, 0.0056919843, 0.17518525),
        weights=(7.1293068e-05, 0.00053482041, 0.0046767108, 0.039600153, 0.35760654),
        constant=0.6635815,
        error=0.0134,
    ),
    0.125: Poles(
        shifts=(1.4951887e-07, 6.1757633e-06, 0.00019685415, 0.0058802923, 0.17214321),
        weights=(0.00020918616, 0.0012714514, 0.0088544956, 0.058192239, 0.41168005),
        constant=0.59205058,
        error=0.0136,
    ),
}


@torch.no_grad()
@in_full_precision
def rational_power(x: Tensor, p: float) -> Tensor:
    """U S^p V^T of x = U S V^T, by products and inverses of small blocks; p is one of POWERS.

    x: [..., m, n], floating point; not modified. Returns [..., m, n] in the dtype of x. Within 1.5%
    for singular values from RESOLUTION N on, where N is between the largest one and m^(1/4) times
    it; below, the output falls to 0 in proportion to sigma, where `spectral_power` cuts off at eps
    max(m, n). Zero for zero; a matrix that contains a NaN or an infinity gives all NaN.
    """
    if p not in POWERS:
        raise ValueError(
            f"p: found {p!r}; write one of {', '.join(map(str, POWERS))}, or use spectral_power"
        )
    wide = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.float32)
    finite = all_finite(wide)
    # Entries up to 1, whose squares neither overflow nor vanish.
    scale = torch.linalg.vector_norm(wide, torch.inf, dim=(-2, -1), keepdim=True)
    scale = replace_zeros(scale).where(finite, 1.0)
    result = _by_poles((wide / scale).where(finite, 0.0), scale, p)
    return from_wide(result.masked_fill_(~finite, torch.nan), x)


def power(x: Tensor, p: float) -> Tensor:
    """`rational_power` where it is faster than the decomposition of `spectral_power` and has this
    p.
    """
    return (rational_power if is_rational(min(x.shape[-2:]), p) else spectral_power)(x, p)


def is_rational(num_rows: int, p: float) -> bool:
    """Whether `power` needs no decomposition for matrices of so many rows (the shorter side)."""
    return num_rows >= FROM_ROWS and p in POWERS


def _by_poles(x: Tensor, scale: Tensor, p: float) -> Tensor:
    """The map of scale * x for x of shape [..., m, n] with m <= n; scale is [..., 1, 1]."""
    # In float64: an inverse loses the square of the condition, up to 1 / shift.
    poles, double = POWERS[p], x.double()
    gram = double @ double.mT
    del double
    square = replace_zeros(frobenius_norm(gram))  # N^2
    gram.div_(square)
    total = torch.zeros_like(gram, dtype=x.dtype)
    _diagonal(total).add_(poles.constant)
    # Large shifts are inverted in float32, which takes half the time (18 and 35 ms at 1024 x 1024,
    # notes/log.md) and loses little there, see FLOAT32_FROM.
    for shift, weight in zip(poles.shifts, poles.weights, strict=True):
        shifted = gram.to(x.dtype if shift >= FLOAT32_FROM else torch.float64, copy=True)
        _diagonal(shifted).add_(shift)
        total.add_(invert_(shifted), alpha=weight)
    unit = square.sqrt()
    return total.mul_(((unit * scale) ** p / unit).to(x.dtype)) @ x


def _diagonal(a: Tensor) -> Tensor:
    return a.diagonal(dim1=-2, dim2=-1)


def invert_(a: Tensor) -> Tensor:
    """The inverse of a [..., m, m], symmetric and positive definite, in its place; only its upper
    triangle is read.
    """
    rows = a.shape[-1]
    if rows <= LEAF:
        factor, _ = torch.linalg.cholesky_ex(a, upper=True)  # no host read, unlike `cholesky`
        return a.copy_(torch.cholesky_inverse(factor, upper=True))
    # By halves: all but the leaves is matrix products, so that an inverse runs at their speed
    # (notes/log.md).
    half = rows // 2
    first, side, last = a[..., :half, :half], a[..., :half, half:], a[..., half:, half:]
    invert_(first)
    solved = first @ side
    last.copy_(multiply_add(last, side.mT, solved, beta=1.0, alpha=-1.0))  # the Schur complement
    invert_(last)
    torch.neg(solved @ last, out=side)
    first.copy_(multiply_add(first, side, solved.mT, beta=1.0, alpha=-1.0))
    a[..., half:, :half] = side.mT
    return a


def power_flops(num_rows: int, num_columns: int, p: float) -> int | None:
    """Floating-point operations of `power`, num_rows <= num_columns; None where it is a
    decomposition.
    """
    if not is_rational(num_rows, p):
        return None
    return 4 * num_rows**2 * num_columns + len(POWERS[p].shifts) * _inverse_flops(num_rows)


def _inverse_flops(rows: int) -> int:
    if rows <= LEAF:
        return rows**3
    first, last = rows // 2, rows - rows // 2
    products = 4 * first * last * rows
    return _inverse_flops(first) + _inverse_flops(last) + products
