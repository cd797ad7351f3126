"""Errors of a map on known spectra: the singular values of its output, compared with the exact ones.

Each spectrum has a largest singular value of 1. In "flat" all are 1; "power law" is 1/i; "gaussian" is the spectrum of
independent normal numbers. All modes count, including those below a map's accurate range.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .shapes import Shape

# Rows of the largest float64 decomposition. At 1024 one takes seconds on two CPU cores, at 2048 on a GPU.
DECOMPOSITION_ROWS = {"cpu": 1024, "cuda": 2048}


@dataclass(frozen=True)
class KnownMatrix:
    """x = u diag(sigma) vh: x in float32, its decomposition in float64."""

    x: Tensor
    u: Tensor
    sigma: Tensor
    vh: Tensor


def error_shape(shape: Shape, device: torch.device) -> Shape:
    """`shape`, or a smaller one of the same aspect ratio where its decomposition would take too long."""
    scale = min(1.0, DECOMPOSITION_ROWS[device.type] / min(shape))
    return (round(shape[0] * scale), round(shape[1] * scale))


def known_matrices(shape: Shape, device: torch.device) -> dict[str, KnownMatrix]:
    """A matrix of `shape` for each spectrum."""
    m, n = shape
    r = min(shape)
    normal = {"dtype": torch.float64, "device": device}
    u = torch.linalg.qr(torch.randn(m, r, **normal)).Q
    vh = torch.linalg.qr(torch.randn(n, r, **normal)).Q.mT
    index = torch.arange(1, r + 1, **normal)
    x = torch.randn(m, n, **normal)
    gaussian = torch.linalg.svd(x / torch.linalg.matrix_norm(x, 2), full_matrices=False)
    # Rounding x to float32 moves its singular values by less than 1e-8: no need to decompose it again.
    parts = {"flat": (u, torch.ones_like(index), vh), "power law": (u, 1 / index, vh), "gaussian": gaussian}
    return {name: KnownMatrix(((u * sigma) @ vh).float(), u, sigma, vh) for name, (u, sigma, vh) in parts.items()}


def errors(function: Callable[[Tensor], Tensor], matrix: KnownMatrix, target: str) -> dict[str, float]:
    """{"max", "mean"} relative error of the output along the input's singular vectors.

    target: of the singular values: "sigmoid", or "polar" for maps to 1.
    """
    output = function(matrix.x).double()
    values = ((matrix.u.mT @ output) * matrix.vh).sum(dim=-1)
    exact = torch.sigmoid(matrix.sigma) if target == "sigmoid" else torch.ones_like(matrix.sigma)
    relative = (values / exact - 1).abs()
    return {"max": relative.max().item(), "mean": relative.mean().item()}
