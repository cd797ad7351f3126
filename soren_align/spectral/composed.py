"""A composition of odd polynomials on matrices, by products as `minimax`, and a function of
singular values by a decomposition.

    U f(S / N) V^T  of  x = U S V^T

N is nu, (sum of sigma^8)^(1/8), for `of: nu`; |x|_F for `norm`; the root mean square of the
singular values for `rms`; and 1 for `none`. nu is at hand, since the first step computes (x x^T)^2,
and the host reads none of them. With `rms` and `none`, f is matched up to `limit`: a matrix whose
nu / N is larger is scaled down to it ("guarded"). nu is between the largest singular value and 2.4
times it (for 1000 equal ones).
"""

from collections.abc import Callable
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from ..core.optimizer_settings import FactorPrecision
from .composition import Composed, Of, value
from .exact import map_singular_values
from .flops import ends_thin, row_padding
from .matrices import in_full_precision, mapped_in_range, replace_zeros
from .products import Workspace, add_to_diagonal_, evaluate, gram_over_nu


@torch.no_grad()
@in_full_precision
def guarded_composition(
    x: Tensor,
    composed: Composed,
    precision: FactorPrecision = "float32",
    max_norm: float | None = None,
) -> tuple[Tensor, Tensor | int]:
    """U f(S / N) V^T of x = U S V^T within the composition's certificate, and the number of guarded
    matrices.

    x: [..., m, n], floating point; not modified. precision, max_norm: as in `minimax_sigmoid`.
    Returns [..., m, n] in the dtype of x. Zero for zero. A matrix that contains a NaN or an
    infinity gives all NaN.
    """
    function = partial(_by_products, composed=composed, precision=precision)
    return mapped_in_range(x, function, precision, max_norm)


def _by_products(
    x: Tensor,
    scale: Tensor | float,
    may_be_large: bool,
    composed: Composed,
    precision: FactorPrecision,
) -> tuple[Tensor, Tensor | int]:
    """The map of scale * x for x of shape [..., m, n] with m <= n; scale is [..., 1, 1] or a
    number.
    """
    composition, of, limit = composed.composition, composed.of, composed.limit
    work = Workspace(x, precision)
    # (x x^T)^2 is the first product of every composition, and its norm is nu^4: nu is for nothing.
    r, r2, unit = gram_over_nu(x, work)
    num_guarded: Tensor | int = 0
    if of != "nu":
        nu = unit
        # The Gram matrix in the wanted unit. Its trace is |x|_F^2 / nu^2, so that no other norm of
        # x is computed, and the host reads none.
        trace = r.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None].clamp(min=1.0)
        norm = nu * trace.sqrt()
        if of == "norm":
            unit = norm
        else:
            unit = (
                limit * norm / sqrt(x.shape[-2])
                if of == "rms"
                else torch.as_tensor(limit / scale, dtype=x.dtype)
            )
            # nu is at least the largest singular value, so that no matrix beyond the limit is
            # missed; 1e-6 is for rounding.
            num_guarded = (nu > unit * (1 + 1e-6)).sum()
            unit = torch.maximum(nu, unit.to(nu.device))
        # R and its square are in units of nu: another unit scales them, and costs no product.
        share = (nu / unit).square()
        r.mul_(share)
        r2.mul_(share.square())
    # The polynomial b costs no product, since R and R^2 are at hand.
    linear, *others = composition.base or (0.0,)
    base = None
    if others:
        base = torch.mul(r, others[0], out=work.take()).add_(r2, alpha=others[1])
        base, linear = add_to_diagonal_(base, linear).div_(unit), 0.0
    return evaluate(composition, x, r, r2, unit, work, base=base, linear=linear), num_guarded


@in_full_precision
def exact_function(
    x: Tensor, function: Callable[[Tensor], Tensor], of: Of = "nu", limit: float = 1.0
) -> Tensor:
    """U f(S / N) V^T of x = U S V^T, by a decomposition in float64.

    x: [..., m, n], floating point; not modified. Zero on the numerical null space, as
    `exact_sigmoid`. Beyond `limit` f has its value there.
    """

    return map_singular_values(
        x, lambda sigma: function((sigma / unit_of(sigma, of)).clamp(max=limit))
    )


def composed_values(sigma: Tensor, composed: Composed) -> Tensor:
    """f(S / N) of the singular values [..., r] of matrices, as `guarded_composition` has it."""
    u = sigma / unit_of(sigma, composed.of) / composed.limit
    return value(composed.composition, u.clamp(max=1.0))


def unit_of(sigma: Tensor, of: Of) -> Tensor:
    """N of singular values [..., r]: [..., 1], and 1 where all are 0."""
    largest = replace_zeros(sigma.amax(dim=-1, keepdim=True))
    share = sigma / largest  # neither its eighth power nor its square overflows
    if of == "none":
        return torch.ones_like(largest)
    if of == "rms":
        return replace_zeros(largest * share.square().mean(dim=-1, keepdim=True).sqrt())
    return replace_zeros(
        largest * torch.linalg.vector_norm(share, 8 if of == "nu" else 2, dim=-1, keepdim=True)
    )


def usual_workspace_numbers(num_rows: int, num_columns: int, precision: FactorPrecision) -> int:
    """The workspace, as that of `minimax`, num_rows <= num_columns: the most of any composition;
    two polynomials need half of it.
    """
    m, n = num_rows, num_columns
    if precision != "float32":
        return (13 * m * m + 12 * m * n) // 2
    return (6 if ends_thin(m, n) else 9) * m * (m + row_padding(m)) + 2 * m * n
