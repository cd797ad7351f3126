"""Maps of singular values by their definition: decompose, map the singular values, compose.

They are the references in the tests. A singular value of zero has no direction, so the numerical
null space (sigma <= eps * max(m, n) * sigma_max) maps to zero: the sigmoid's 1/2 there would
amplify rounding noise.

The singular values of a matrix and a map's distance from the sigmoid come from the smaller Gram
matrix in float64, accurate to 1e-8 of the largest singular value: far cheaper than a singular value
decomposition.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .composition import Composed, Of, value
from .matrices import all_finite, from_wide, in_full_precision, replace_zeros, to_wide


@in_full_precision
def exact_sigmoid(x: Tensor) -> Tensor:
    """U s(S) V^T of x = U S V^T: s is the sigmoid, 1 / (1 + exp(-sigma)).

    x: [..., m, n], floating point; not modified. Returns [..., m, n] in the dtype of x. Zero on the
    numerical null space, so a zero matrix gives zero; a matrix that contains a NaN or an infinity
    gives all NaN. Source: the paper's definition of Soren.
    """
    return map_singular_values(x, torch.sigmoid)


@in_full_precision
def spectral_power(x: Tensor, p: float) -> Tensor:
    """U S^p V^T of x = U S V^T.

    x: [..., m, n], floating point; not modified. Returns [..., m, n] in the dtype of x, with the
    null space and non-finite matrices as in `exact_sigmoid`. Not scale-free: 100 times the gradient
    is 100^p times the result. Source: HTMuon, arXiv 2603.10067, p = 0.125.
    """
    return map_singular_values(x, lambda sigma: sigma.pow(p))


@in_full_precision
def exact_function(
    x: Tensor, function: Callable[[Tensor], Tensor], of: Of = "nu", limit: float = 1.0
) -> Tensor:
    """U f(S / N) V^T of x = U S V^T, with the N of `iterate.guarded_composition`.

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


def identity(x: Tensor) -> Tensor:
    """A copy of x [..., m, n], floating point: momentum SGD.
    A matrix that contains a NaN or an infinity: all NaN.
    """
    wide = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.float32)
    return from_wide(wide.masked_fill(~all_finite(wide), torch.nan), x)


def null_space_bound(x: Tensor) -> float:
    """The share of sigma_max up to which the singular values of x [..., m, n] are its numerical
    null space.
    """
    # float32's eps for bfloat16 and float16: with their own, 128 columns would make everything the
    # null space.
    return min(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps) * max(x.shape[-2:])


def map_singular_values(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """U f(S) V^T of x = U S V^T [..., m, n] for any f of [..., r] singular values, in no order; 0
    on the null space.

    function: gets 0 for each mode of the numerical null space.
    """
    wide = to_wide(x, torch.float64)
    finite = all_finite(wide)
    # A decomposition fails on NaN; the matrix becomes all NaN at the end.
    wide = wide.where(finite, 0.0)
    threshold = null_space_bound(x)
    if x.dtype == torch.float64:
        # Not by the Gram matrix: it squares the condition number, for which float64 has no bits
        # left.
        u, sigma, vh = torch.linalg.svd(wide, full_matrices=False)
        keep = sigma > threshold * sigma.amax(dim=-1, keepdim=True)
        result = (u * function(sigma.where(keep, 0.0)).where(keep, 0.0).unsqueeze(-2)) @ vh
    else:
        # The Gram matrix squares the condition number, which float64 can afford: sigma is accurate
        # to 1e-8 of sigma_max, and the threshold lies above 1e-7 of it.
        eigenvalues, u = torch.linalg.eigh(wide @ wide.mT)
        sigma = eigenvalues.clamp(min=0.0).sqrt()
        keep = sigma > threshold * sigma.amax(dim=-1, keepdim=True)
        gain = (function(sigma.where(keep, 0.0)) / sigma).where(keep, 0.0)
        result = (u * gain.unsqueeze(-2)) @ (u.mT @ wide)
    return from_wide(result.masked_fill(~finite, torch.nan), x)


CHUNK = 2**22
"""Elements of a matrix that are converted to float64 at a time: 32 MB."""


@in_full_precision
def singular_values(x: Tensor) -> Tensor:
    """The min(m, n) singular values of x [m, n] in descending order, in float64; x is not
    modified.
    """
    return torch.linalg.eigvalsh(_product(x, x)).clamp(min=0).sqrt().flip(0)


@in_full_precision
def distance_from_sigmoid(x: Tensor, output: Tensor) -> Tensor:
    """|output - S|_F / |S|_F for S = exact_sigmoid(x), as a scalar in float64, accurate to 1e-7; 0
    where S is 0.

    x, output: [m, n]; not modified.
    """
    # S = U diag(s / sigma) U^T x, of which only <output, S> is needed: no m x n matrix is made in
    # float64.
    eigenvalues, u = torch.linalg.eigh(_product(x, x))
    sigma = eigenvalues.clamp(min=0).sqrt()
    exact = torch.sigmoid(sigma).where(sigma > null_space_bound(x) * sigma[-1], 0.0)
    along = (u * (_product(x, output) @ u)).sum(dim=0)  # the diagonal of U^T x output^T U
    inner = (exact / sigma.where(exact > 0, 1.0) * along).sum()
    norm = exact.square().sum()
    difference = (output.norm(dtype=torch.float64).square() - 2 * inner + norm).clamp(min=0)
    return (difference / norm).where(norm > 0, 0.0).sqrt()


def contrast_numbers(sigma: Tensor, values: Tensor) -> Tensor:
    """Return how much a map's output depends on the singular values of its input, as [3].

    sigma: [r], with 0 for the null space; values: those of the output U t V^T, in the same order.
    The numbers: the largest of t over the median, and the cosines of the output to Muon's update,
    U V^T, and to the input; NaN or infinite where sigma or t is 0 throughout. In float64, on the
    device of sigma: a log of a training step reads nothing from the host.
    """
    sigma, values = sigma.double(), values.double().where(sigma > 0, 0.0)
    num_modes, norm = (sigma > 0).double().sum(), values.norm()
    to_muon = values.sum() / (norm * num_modes.sqrt())
    to_momentum = values @ sigma / (norm * sigma.norm())
    return torch.stack([values.max() / median_of_modes(values, sigma), to_muon, to_momentum])


def median_of_modes(values: Tensor, sigma: Tensor) -> Tensor:
    """The median of `values` over the modes where sigma is not 0; NaN without one."""
    return values.masked_fill(sigma == 0, torch.nan).nanmedian()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b^T for wide a and b [m, n], a^T @ b for tall ones, in float64."""
    is_gram, is_tall = a is b, a.shape[0] > a.shape[1]
    wide_a, wide_b = (a.mT, b.mT) if is_tall else (a, b)
    num_rows = wide_a.shape[0]
    result = torch.zeros(num_rows, num_rows, dtype=torch.float64, device=a.device)
    # In chunks, so that there is no float64 copy of the whole matrix.
    step = max(1, CHUNK // num_rows)
    for left, right in zip(wide_a.split(step, dim=1), wide_b.split(step, dim=1), strict=True):
        exact = left.double()
        result.addmm_(exact, (exact if is_gram else right.double()).mT)
    return result
