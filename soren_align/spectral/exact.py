"""Maps of singular values by their definition: decompose, map the singular values, compose.

They are the references in the tests. A singular value of zero has no direction, so the numerical null space
(sigma <= eps * max(m, n) * sigma_max) maps to zero: the sigmoid's 1/2 there would amplify rounding noise.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .matrices import all_finite, from_wide, to_wide
from .precision import in_full_precision


@in_full_precision
def exact_sigmoid(x: Tensor) -> Tensor:
    """U s(S) V^T of x = U S V^T: s is the sigmoid, 1 / (1 + exp(-sigma)).

    x: [..., m, n], floating point; not modified.
    Returns [..., m, n] in the dtype of x. Zero on the numerical null space, so a zero matrix gives zero; a matrix
    that contains a NaN or an infinity gives all NaN. Source: the paper's definition of Soren.
    """
    return _map_singular_values(x, torch.sigmoid)


@in_full_precision
def spectral_power(x: Tensor, p: float) -> Tensor:
    """U S^p V^T of x = U S V^T.

    x: [..., m, n], floating point; not modified.
    Returns [..., m, n] in the dtype of x, with the null space and non-finite matrices as in `exact_sigmoid`.
    Not scale-free: 100 times the gradient is 100^p times the result. Source: HTMuon, arXiv 2603.10067, p = 0.125.
    """
    return _map_singular_values(x, lambda sigma: sigma.pow(p))


def null_space_bound(x: Tensor) -> float:
    """The share of sigma_max up to which the singular values of x [..., m, n] are its numerical null space."""
    # float32's eps for bfloat16 and float16: with their own, 128 columns would make everything the null space.
    return min(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps) * max(x.shape[-2:])


def _map_singular_values(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    wide = to_wide(x, torch.float64)
    finite = all_finite(wide)
    wide = wide.where(finite, 0.0)
    threshold = null_space_bound(x)

    if x.dtype == torch.float64:
        u, sigma, vh = torch.linalg.svd(wide, full_matrices=False)
        keep = sigma > threshold * sigma.amax(dim=-1, keepdim=True)
        result = (u * function(sigma).where(keep, 0.0).unsqueeze(-2)) @ vh
    else:
        # The Gram matrix squares the condition number, which float64 can afford: sigma is accurate to 1e-8 of
        # sigma_max, and the threshold lies above 1e-7 of it.
        eigenvalues, u = torch.linalg.eigh(wide @ wide.mT)
        sigma = eigenvalues.clamp(min=0.0).sqrt()
        keep = sigma > threshold * sigma.amax(dim=-1, keepdim=True)
        gain = (function(sigma) / sigma).where(keep, 0.0)
        result = (u * gain.unsqueeze(-2)) @ (u.mT @ wide)
    return from_wide(result.masked_fill(~finite, torch.nan), x)
