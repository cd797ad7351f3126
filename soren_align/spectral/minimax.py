"""The sigmoid by a few composed minimax polynomials, closer to it than SNS on recorded momenta at a third of the FLOPs.

    s(sigma) = (1 + tanh(sigma / 2)) / 2  ~  (f(u) + t(sigma)) / 2,     u = sigma / nu,  nu = (sum of sigma^8)^(1/8)

f rises from 0 to 1 on [0, resolution] and is within its certificate of 1 on [resolution, 1]; t is an odd polynomial.
nu costs nothing, since the first step computes (x x^T)^2, and it is smaller than |x|_F, so that u is larger.
"""

from typing import Literal

import torch
from torch import Tensor

from ..optimizer_settings import RESOLUTION
from .coefficients import SIGN, WIDE_FROM
from .matrices import all_finite, frobenius_norm, from_wide, replace_zeros, to_wide
from .precision import in_full_precision
from .products import by_products, num_beyond, tanh_coefficients

SAFE_NORMS = (1e-6, 1e6)  # |x|_F in between needs no scaling: neither sigma^4 nor its sums leave float32

Method = Literal["products", "eigh"]
Precision = Literal["full", "float16"]


def minimax_sigmoid(
    x: Tensor, method: Method = "products", resolution: float = RESOLUTION, precision: Precision = "full"
) -> Tensor:
    """U s(S) V^T of x = U S V^T, approximately: s is the sigmoid.

    x: [..., m, n], floating point; not modified.
    method: evaluates the polynomials by "products" of matrices, or by "eigh" of the Gram matrix in float64, which took
        1.1 to 1.4 times as long at 512 and 1024 rows (float32, CPU). In float32 they agree to 2e-3 of the norm.
    resolution: the singular value, as a share of nu (at most |x|_F), from which the result is accurate: 0.0004, 0.001
        or 0.01. Singular values far below it map to nearly 0.
    precision: "float16" rounds the factors of every product to float16 and sums in float32.
    Returns [..., m, n] in the dtype of x. Within 0.5% (float16: 1%) of the sigmoid for singular values above
    `resolution` in a matrix with none above 4; below it falls to 0 for 0. With a singular value above about 4 the tanh
    part is evaluated at sigma * 4.3 / sigma_max ("guarded"): finite, bounded by 1, and increasing with sigma except for
    the ripple of f. Zero for zero; a matrix that contains a NaN or an infinity gives all NaN.
    """
    return guarded_minimax_sigmoid(x, method, resolution, precision)[0]


@torch.no_grad()
@in_full_precision
def guarded_minimax_sigmoid(
    x: Tensor, method: Method = "products", resolution: float = RESOLUTION, precision: Precision = "full"
) -> tuple[Tensor, int]:
    """`minimax_sigmoid`, and the number of guarded matrices: those scaled down to the domain of tanh's polynomial."""
    _check(method, resolution, precision)
    double = x.dtype == torch.float64 and precision == "full"
    wide = to_wide(x, torch.float64 if double else torch.float32)
    norm = frobenius_norm(wide)
    # One host read decides the usual case, a matrix of clipped gradients; it is False for NaN and overflow too.
    low, high = SAFE_NORMS
    if precision == "full" and bool(((norm > low) & (norm < high)).all()):
        result, num_guarded = _map(wide, torch.ones_like(norm), norm, method, resolution, half=False)
        return from_wide(result, x), num_guarded

    finite = all_finite(wide)
    wide = wide.where(finite, 0.0)
    scale = wide.abs().amax(dim=(-2, -1), keepdim=True)
    scale = scale.where(scale > 0, 1.0)
    unit = wide / scale
    norm = frobenius_norm(unit) * scale
    result, num_guarded = _map(unit, scale, norm, method, resolution, half=precision == "float16")
    return from_wide(result.masked_fill(~finite, torch.nan), x), num_guarded


def _map(x: Tensor, scale: Tensor, norm: Tensor, method: Method, resolution: float, half: bool) -> tuple[Tensor, int]:
    """The map of scale * x for wide x, and the number of guarded matrices.

    norm: of scale * x; scale, norm: [..., 1, 1].
    """
    if method == "eigh":
        return _by_eigh(x, scale, norm, resolution)
    return by_products(x, scale, norm, resolution, half)


def _by_eigh(x: Tensor, scale: Tensor, norm: Tensor, resolution: float) -> tuple[Tensor, int]:
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
    top, known_share = nu * scale[..., 0].double(), share if bool((norm > WIDE_FROM[0]).any()) else None
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
    if precision not in ("full", "float16"):
        raise ValueError(f"precision: found {precision!r}; write one of 'full', 'float16'")
    if precision == "float16" and (method == "eigh" or resolution < RESOLUTION):
        raise ValueError(
            f"precision: 'float16' is for products in resolution {RESOLUTION}; "
            f"found method {method!r} and resolution {resolution}: write precision='full'"
        )
