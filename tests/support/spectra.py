"""Matrices of known singular values, in random directions and in float64."""

import torch


def singular_vectors(shape, rank, seed=0):
    """u [m, rank] and v [n, rank], whose columns are orthonormal."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.linalg.qr(torch.randn(size, rank, dtype=torch.float64, generator=generator)).Q for size in shape]


def matrix_of(sigma, shape, seed=0):
    """u diag(sigma) v^T [m, n], u and v."""
    u, v = singular_vectors(shape, len(sigma), seed)
    return (u * torch.as_tensor(sigma, dtype=torch.float64)) @ v.mT, u, v
