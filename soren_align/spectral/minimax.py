"""The sigmoid by a few composed minimax polynomials, closer to it than SNS on recorded momenta at a
third of the FLOPs.

    s(sigma) = (1 + tanh(sigma / 2)) / 2  ~  (f(u) + t(sigma)) / 2,     u = sigma / nu,  nu = (sum of sigma^8)^(1/8)

f rises from 0 to 1 on [0, resolution] and is within its certificate of 1 on [resolution, 1]; t is
an odd polynomial. nu costs nothing, since the first step computes (x x^T)^2, and it is smaller than
|x|_F, so that u is larger.
"""

from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from ..core.optimizer_settings import RESOLUTION, FactorPrecision
from .flops import PADDING, ends_thin, row_padding
from .matrices import in_full_precision, mapped_in_range, replace_zeros
from .products import SIGN, WIDE_FROM, by_products, num_beyond, tanh_coefficients

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
    method: evaluates the polynomials by "products" of matrices, or by "eigh" of the Gram matrix in
    float64, which took
        1.1 to 1.4 times as long at 512 and 1024 rows (float32, CPU). In float32 they agree to 2e-3
        of the norm.
    resolution: the singular value, as a share of nu (at most |x|_F), from which the result is
    accurate: 0.0004, 0.001
        or 0.01. Singular values far below it map to nearly 0.
    precision: of the factors of every product, whose sums are float32: "float32" (float64 for
    float64), "tf32",
        "float16" or "bfloat16"; see tests/spectral/test_precisions.py.
    max_norm: an upper bound of |x|_F of every matrix, if it is known: then the host reads nothing
    from the device, and
        the map can be compiled whole. None: it is read from x.
    Returns [..., m, n] in the dtype of x. Within 0.5% (float16: 1%) of the sigmoid for singular
    values above `resolution` in a matrix with none above 4; below it falls to 0 for 0. With a
    singular value above about 4 the tanh part is evaluated at sigma * 4.3 / sigma_max ("guarded"):
    finite, bounded by 1, and increasing with sigma except for the ripple of f. Zero for zero, and
    with max_norm falling to zero below |x|_F = 1e-15. A matrix that contains a NaN or an infinity
    gives all NaN.
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
    """`minimax_sigmoid`, and the number of guarded matrices: those scaled down to the domain of
    tanh's polynomial.
    """
    if method not in ("products", "eigh"):
        raise ValueError(f"method: found {method!r}; write 'products' or 'eigh'")
    if resolution not in SIGN:
        raise ValueError(
            f"resolution: found {resolution!r}; write one of {', '.join(map(str, SIGN))}"
        )
    if precision not in (choices := get_args(FactorPrecision)):
        raise ValueError(
            f"precision: found {precision!r}; write one of {', '.join(map(repr, choices))}"
        )
    if precision != "float32" and method == "eigh":
        raise ValueError(
            f"precision: found {precision!r} with method 'eigh'; write precision='float32'"
        )
    evaluate = partial(by_products, precision=precision) if method == "products" else _by_eigh
    return mapped_in_range(
        x, partial(evaluate, resolution=resolution), precision, max_norm, WIDE_FROM[0]
    )


def _by_eigh(
    x: Tensor, scale: Tensor | float, may_be_large: bool, resolution: float
) -> tuple[Tensor, Tensor | int]:
    """Map by a decomposition what `by_products` maps by products."""
    # float64: for sigma_i = 1/i with 512 rows the error of float32's eigh is 2e-3 of the result, 20
    # times the stated.
    double = x.double()
    eigenvalues, vectors = torch.linalg.eigh(double @ double.mT)
    del double
    largest = replace_zeros(eigenvalues[..., -1:])
    # Divided by the largest: neither the fourth power nor its sum leaves the range.
    eigenvalues = (eigenvalues / largest).clamp(min=0.0)
    norm4 = eigenvalues.pow(4).sum(dim=-1, keepdim=True).clamp(min=1.0)
    r = eigenvalues / norm4.pow(0.25)  # u^2
    nu = (largest * norm4.pow(0.25)).sqrt()

    # The 128-norm, as in `_tanh_part`, so that both methods guard the same matrices.
    share = (
        eigenvalues.pow(64).sum(dim=-1, keepdim=True).clamp(min=1.0) ** (1 / 64) / norm4.pow(0.25)
    ).sqrt()
    top = nu * (scale[..., 0].double() if isinstance(scale, Tensor) else scale)
    known_share = share if may_be_large else None
    tanh = sum(c * r**i for i, c in enumerate(tanh_coefficients(top, known_share)))
    # As by products: `power` is u^2 after each step, `sign` the product of all factors so far.
    sign, power = torch.ones_like(r), r
    for step in SIGN[resolution].steps:
        factor = sum(c * power**i for i, c in enumerate(step))
        sign, power = sign * factor, power * factor**2
    gain = (sign + tanh) / (2 * nu)
    return ((vectors * gain.unsqueeze(-2)) @ vectors.mT).to(x.dtype) @ x, num_beyond(
        top, known_share
    )


def num_workspace_numbers(num_rows: int, num_columns: int, device_type: str = "cpu") -> int:
    """The largest number of elements that a map of one matrix allocates at once, its result
    included, not its input.

    That of `minimax_sigmoid` by products, the default map: 7 buffers of m x m, with padding, and
    two of m x n (test_no_more_memory_than_stated); on a GPU 6 of each, with the copies that narrow
    factors are (test_cost.py).
    """
    m, n = sorted((num_rows, num_columns))
    if device_type == "cpu":
        return 7 * m * (m + PADDING) + 2 * m * n
    return 6 * (m * (m + PADDING) + m * n)


def usual_workspace_numbers(num_rows: int, num_columns: int, precision: FactorPrecision) -> int:
    """Return `num_workspace_numbers` of a matrix of norm 1 at most, as clipped gradients are,
    num_rows <= num_columns.

    precision: of the factors. Narrow ones have 16 bits on a GPU; x is then copied, and each factor.
    TF32's are copied
        too, and take up to a fifth more.
    Source: measured for the shapes of test_usual_workspace.
    """
    m, n = num_rows, num_columns
    if precision != "float32":
        return 6 * m * m + 4 * m * n
    return (5 if ends_thin(m, n) else 7) * m * (m + row_padding(m)) + 2 * m * n
