"""The sigmoid by a few composed minimax polynomials, closer to it than SNS on recorded momenta at a third of the FLOPs.

    s(sigma) = (1 + tanh(sigma / 2)) / 2  ~  (f(u) + t(sigma)) / 2,     u = sigma / nu,  nu = (sum of sigma^8)^(1/8)

f rises from 0 to 1 on [0, resolution] and is within its certificate of 1 on [resolution, 1]; t is an odd polynomial.
nu costs nothing, since the first step computes (x x^T)^2, and it is smaller than |x|_F, so that u is larger.
"""

from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from ..core.optimizer_settings import RESOLUTION, FactorPrecision
from .matrices import all_finite, frobenius_norm, from_wide, in_full_precision, replace_zeros, tf32_products, to_wide
from .products import SIGN, WIDE_FROM, by_products, num_beyond, tanh_coefficients

SAFE_NORMS = (1e-12, 1e6)  # |x|_F in between needs no scaling: neither sigma^4 nor its sums leave float32

Method = Literal["products", "eigh"]


def minimax_sigmoid(
    x: Tensor,
    method: Method = "products",
    resolution: float = RESOLUTION,
    precision: FactorPrecision = "float32",
    max_norm: float | None = None,
) -> Tensor:
    """U s(S) V^T of x = U S V^T, approximately: s is the sigmoid.

    x: [..., m, n], floating point; not modified.
    method: evaluates the polynomials by "products" of matrices, or by "eigh" of the Gram matrix in float64, which took
        1.1 to 1.4 times as long at 512 and 1024 rows (float32, CPU). In float32 they agree to 2e-3 of the norm.
    resolution: the singular value, as a share of nu (at most |x|_F), from which the result is accurate: 0.0004, 0.001
        or 0.01. Singular values far below it map to nearly 0.
    precision: of the factors of every product, whose sums are float32: "float32" (float64 for float64), "tf32",
        "float16" or "bfloat16"; see tests/spectral/test_precisions.py.
    max_norm: an upper bound of |x|_F of every matrix, if it is known: then the host reads nothing from the device, and
        the map can be compiled whole. None: it is read from x.
    Returns [..., m, n] in the dtype of x. Within 0.5% (float16: 1%) of the sigmoid for singular values above
    `resolution` in a matrix with none above 4; below it falls to 0 for 0. With a singular value above about 4 the tanh
    part is evaluated at sigma * 4.3 / sigma_max ("guarded"): finite, bounded by 1, and increasing with sigma except for
    the ripple of f. Zero for zero, and with max_norm falling to zero below |x|_F = 1e-15. A matrix that contains a NaN
    or an infinity gives all NaN.
    """
    return guarded_minimax_sigmoid(x, method, resolution, precision, max_norm)[0]


@torch.no_grad()
@in_full_precision
def guarded_minimax_sigmoid(
    x: Tensor,
    method: Method = "products",
    resolution: float = RESOLUTION,
    precision: FactorPrecision = "float32",
    max_norm: float | None = None,
) -> tuple[Tensor, Tensor | int]:
    """`minimax_sigmoid`, and the number of guarded matrices: those scaled down to the domain of tanh's polynomial."""
    _check(method, resolution, precision)
    narrow = precision != "float32"
    double = x.dtype == torch.float64 and not narrow
    wide = to_wide(x, torch.float64 if double else torch.float32)
    is_safe, may_be_large = _range(wide, max_norm)
    evaluate = partial(by_products, precision=precision) if method == "products" else _by_eigh
    if is_safe and not narrow:
        result, num_guarded = evaluate(wide, 1.0, may_be_large, resolution)
        return from_wide(result, x), num_guarded

    finite = all_finite(wide)
    wide = wide.where(finite, 0.0)
    scale = replace_zeros(wide.abs().amax(dim=(-2, -1), keepdim=True))
    with tf32_products(x.device.type, precision == "tf32"):
        result, num_guarded = evaluate(wide.div_(scale), scale, may_be_large, resolution)
    return from_wide(result.masked_fill(~finite, torch.nan), x), num_guarded


def _range(x: Tensor, max_norm: float | None) -> tuple[bool, bool]:
    """Whether |x|_F of all matrices is within SAFE_NORMS, and whether one may be above WIDE_FROM[0]."""
    low, high = SAFE_NORMS
    if max_norm is not None:
        return max_norm < high, not max_norm <= WIDE_FROM[0]
    norm = frobenius_norm(x)
    # Both are for NaN and overflow as for large matrices.
    is_safe, is_small = torch.stack([((norm > low) & (norm < high)).all(), (norm <= WIDE_FROM[0]).all()]).tolist()
    return is_safe, not is_small


def _by_eigh(x: Tensor, scale: Tensor | float, may_be_large: bool, resolution: float) -> tuple[Tensor, Tensor | int]:
    """As `by_products`."""
    # float64: for sigma_i = 1/i with 512 rows the error of float32's eigh is 2e-3 of the result, 20 times the stated.
    double = x.double()
    eigenvalues, vectors = torch.linalg.eigh(double @ double.mT)
    del double
    largest = replace_zeros(eigenvalues[..., -1:])
    eigenvalues = (eigenvalues / largest).clamp(min=0.0)
    norm4 = eigenvalues.pow(4).sum(dim=-1, keepdim=True).clamp(min=1.0)
    r = eigenvalues / norm4.pow(0.25)  # u^2
    nu = (largest * norm4.pow(0.25)).sqrt()

    share = (eigenvalues.pow(64).sum(dim=-1, keepdim=True).clamp(min=1.0) ** (1 / 64) / norm4.pow(0.25)).sqrt()
    top = nu * (scale[..., 0].double() if isinstance(scale, Tensor) else scale)
    known_share = share if may_be_large else None
    coefficients = tanh_coefficients(top, known_share)
    tanh = sum(c * r**i for i, c in enumerate(coefficients))
    sign, power = torch.ones_like(r), r
    for step in SIGN[resolution].steps:
        factor = sum(c * power**i for i, c in enumerate(step))
        sign, power = sign * factor, power * factor**2
    gain = (sign + tanh) / (2 * nu)
    return ((vectors * gain.unsqueeze(-2)) @ vectors.mT).to(x.dtype) @ x, num_beyond(top, known_share)


def _check(method: str, resolution: float, precision: str) -> None:
    if method not in ("products", "eigh"):
        raise ValueError(f"method: found {method!r}; write 'products' or 'eigh'")
    if resolution not in SIGN:
        raise ValueError(f"resolution: found {resolution!r}; write one of {', '.join(map(str, SIGN))}")
    if precision not in get_args(FactorPrecision):
        raise ValueError(
            f"precision: found {precision!r}; write one of {', '.join(map(repr, get_args(FactorPrecision)))}"
        )
    if precision != "float32" and method == "eigh":
        raise ValueError(f"precision: {precision!r} is for products; found method 'eigh': write precision='float32'")
