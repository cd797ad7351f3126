"""The singular values of a matrix, and the distance of a map's output from the exact sigmoid.

Both come from the smaller Gram matrix in float64, which is accurate to 1e-8 of the largest singular value: far cheaper
than a singular value decomposition.
"""

import torch
from torch import Tensor

from .exact import null_space_bound
from .precision import in_full_precision

CHUNK = 2**22
"""Elements of a matrix that are converted to float64 at a time: 32 MB."""


@in_full_precision
def singular_values(x: Tensor) -> Tensor:
    """The min(m, n) singular values of x [m, n] in descending order, in float64; x is not modified."""
    return torch.linalg.eigvalsh(_product(x, x)).clamp(min=0).sqrt().flip(0)


@in_full_precision
def distance_from_sigmoid(x: Tensor, output: Tensor) -> Tensor:
    """|output - S|_F / |S|_F for S = exact_sigmoid(x), as a scalar in float64, accurate to 1e-7; 0 where S is 0.

    x, output: [m, n]; not modified.
    """
    # S = U diag(s / sigma) U^T x, of which only <output, S> is needed: no m x n matrix is made in float64.
    eigenvalues, u = torch.linalg.eigh(_product(x, x))
    sigma = eigenvalues.clamp(min=0).sqrt()
    exact = torch.sigmoid(sigma).where(sigma > null_space_bound(x) * sigma[-1], 0.0)
    along = (u * (_product(x, output) @ u)).sum(dim=0)  # the diagonal of U^T x output^T U
    inner = (exact / sigma.where(exact > 0, 1.0) * along).sum()
    norm = exact.square().sum()
    difference = (output.norm(dtype=torch.float64).square() - 2 * inner + norm).clamp(min=0)
    return (difference / norm).where(norm > 0, 0.0).sqrt()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b^T for wide a and b [m, n], a^T @ b for tall ones, in float64."""
    is_gram, is_tall = a is b, a.shape[0] > a.shape[1]
    wide_a, wide_b = (a.mT, b.mT) if is_tall else (a, b)
    num_rows = wide_a.shape[0]
    result = torch.zeros(num_rows, num_rows, dtype=torch.float64, device=a.device)
    step = max(1, CHUNK // num_rows)
    for left, right in zip(wide_a.split(step, dim=1), wide_b.split(step, dim=1), strict=True):
        exact = left.double()
        result.addmm_(exact, (exact if is_gram else right.double()).mT)
    return result
