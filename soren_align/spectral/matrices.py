"""Helpers of all maps: check the input, transpose it to wide, return the result in the input's shape and dtype.

A map works on [m, n] or [batch, m, n] with m <= n, so that products and decompositions have the smaller dimension.
"""

import torch
from torch import Tensor


def to_wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as [m, n] or [batch, m, n] with m <= n, in `dtype`; may share memory with `x`.

    Raises ValueError if `x` has fewer than two dimensions or is not floating point.
    """
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(
            f"a spectral map takes floating-point matrices [..., m, n]; found {x.dtype} of shape {tuple(x.shape)}"
        )
    if x.ndim > 3:
        x = x.flatten(0, -3)
    return (x.mT if x.shape[-2] > x.shape[-1] else x).to(dtype)


def from_wide(y: Tensor, x: Tensor) -> Tensor:
    """`y`, the map of `to_wide(x)`, in the shape and dtype of `x`."""
    y = y.mT if x.shape[-2] > x.shape[-1] else y
    return y.reshape(x.shape).to(x.dtype)


def multiply_add(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float) -> Tensor:
    """beta * c + alpha * a @ b, in one rounding, for [m, n] or [batch, m, n]."""
    # addmm for single matrices: torch.optim.Muon uses it, and baddbmm may sum in another order.
    product = torch.addmm if c.ndim == 2 else torch.baddbmm
    return product(c, a, b, beta=beta, alpha=alpha)


def frobenius_norm(x: Tensor) -> Tensor:
    """|x|_F of every matrix, [..., 1, 1]."""
    # Row by row: one float32 sum over 2048 x 2048 squares is off by up to 1e-3 on a CPU.
    rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)


def all_finite(x: Tensor) -> Tensor:
    """Whether every entry of a matrix is finite, [..., 1, 1] bool."""
    return x.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)


def replace_zeros(norm: Tensor) -> Tensor:
    """`norm`, or 1 where it is 0, so that a zero matrix is divided by 1."""
    return norm.where(norm > 0, 1.0)
