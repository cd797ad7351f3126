"""What a map does to known spectra: its output's singular values against what they should be.

Each has a largest singular value of 1. "flat" has nothing else; "power law" is 1/i; "gaussian" is what a matrix of
independent normal numbers has. All modes count, also those that lie below a map's accurate range.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .shapes import Shape

# Rows of the largest float64 decomposition. At 1024 one takes seconds on two CPU cores, at 2048 on a GPU.
DECOMPOSITION_ROWS = {"cpu": 1024, "cuda": 2048}


@dataclass(frozen=True)
class Problem:
    """x = u diag(sigma) vh: x in float32, its decomposition in float64."""

    x: Tensor
    u: Tensor
    sigma: Tensor
    vh: Tensor


def stand_in(shape: Shape, device: torch.device) -> Shape:
    """`shape`, or a smaller one of the same aspect where its decomposition would take too long."""
    share = min(1.0, DECOMPOSITION_ROWS[device.type] / min(shape))
    return (round(shape[0] * share), round(shape[1] * share))


def problems(shape: Shape, device: torch.device) -> dict[str, Problem]:
    """A matrix of `shape` for every spectrum."""
    m, n = shape
    r = min(shape)
    normal = {"dtype": torch.float64, "device": device}
    u = torch.linalg.qr(torch.randn(m, r, **normal)).Q
    vh = torch.linalg.qr(torch.randn(n, r, **normal)).Q.mT
    index = torch.arange(1, r + 1, **normal)
    x = torch.randn(m, n, **normal)
    found = torch.linalg.svd(x / torch.linalg.matrix_norm(x, 2), full_matrices=False)
    # Rounding x to float32 moves its singular values by less than 1e-8: no need to decompose it again.
    parts = {"flat": (u, torch.ones_like(index), vh), "power law": (u, 1 / index, vh), "gaussian": found}
    return {name: Problem(((u * sigma) @ vh).float(), u, sigma, vh) for name, (u, sigma, vh) in parts.items()}


def errors(function: Callable[[Tensor], Tensor], problem: Problem, target: str) -> dict[str, float]:
    """Largest and mean relative error of the output along the input's singular vectors.

    target: "sigmoid", or "polar" for the maps that aim at 1.
    """
    output = function(problem.x).double()
    values = ((problem.u.mT @ output) * problem.vh).sum(dim=-1)
    aim = torch.sigmoid(problem.sigma) if target == "sigmoid" else torch.ones_like(problem.sigma)
    relative = (values / aim - 1).abs()
    return {"max": relative.max().item(), "mean": relative.mean().item()}
