"""Maps and bfloat16 on single matrices: numbers of docs/studies/optimizers.md.

    python docs/studies/single_matrices.py        a minute of one core

Prints the size of each map's output beside that of U c V^T (what `match_rms_adamw` assumes), the
noise of a gradient that is rounded to bfloat16, and how much the rounding of the ranks' gradients
changes an update.
"""

import sys
from itertools import product
from math import sqrt
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from soren_align.spectral import exact_sigmoid, minimax_sigmoid, newton_schulz, soft_newton_schulz

MAPS = {
    "minimax": minimax_sigmoid,
    "exact": exact_sigmoid,
    "sns": soft_newton_schulz,
    "Muon": newton_schulz,
}
FULL = {"minimax": 0.5, "exact": 0.5, "sns": 0.5, "Muon": 1.0}
"""What `match_rms_adamw` takes every singular value of the output to be."""


def matrix(sigma: Tensor, m: int, n: int) -> Tensor:
    """Return U diag(sigma) V^T [m, n] in float64 with random U and V, and a Frobenius norm of 1."""
    u, v = (
        torch.linalg.qr(torch.randn(size, len(sigma), dtype=torch.float64)).Q for size in (m, n)
    )
    return (u * (sigma / sigma.norm())) @ v.T


def spectra(m: int) -> dict[str, Tensor]:
    """Return spectra of an m x n matrix by name."""
    index = torch.arange(1, m + 1, dtype=torch.float64)
    return {
        "1/i": 1 / index,
        "1/sqrt(i)": index**-0.5,
        f"flat, rank m/8 = {m // 8}": torch.ones(m // 8).double(),
    }


def sizes() -> None:
    """Print |map(X)|_F over c sqrt(min(m, n)), the norm that `match_rms_adamw` assumes."""
    m, n = 256, 512
    ranks = {f"rank {rank}": torch.ones(rank, dtype=torch.float64) for rank in (16, m)}
    for name, sigma in (spectra(m) | ranks).items():
        x = matrix(sigma, m, n)
        values = [
            f"{label} {apply(x).norm() / (FULL[label] * sqrt(m)):.2f}"
            for label, apply in MAPS.items()
        ]
        print(f"size over the assumed size, {m} x {n}, {name}: {', '.join(values)}")


def rounding_noise() -> None:
    """Print the largest singular value of a rounding to bfloat16, over (1/sqrt(m) + 1/sqrt(n))
    |G|_F.
    """
    for m, n, rank in (
        (256, 256, 256),
        (384, 1024, 48),
        (512, 2048, 512),
        (1024, 1024, 16),
        (384, 1024, 1),
    ):
        gradient = matrix(torch.ones(rank, dtype=torch.float64), m, n)
        noise = gradient.bfloat16().double() - gradient
        ratio = torch.linalg.matrix_norm(noise, 2) / ((1 / sqrt(m) + 1 / sqrt(n)) * gradient.norm())
        print(f"noise of bfloat16, {m} x {n}, rank {rank}: {ratio:.2e}")


def changes() -> None:
    """Print how much an update changes where each rank rounds its gradient to bfloat16.

    A rank's own gradient is G plus a Gaussian matrix with the norm of G; the Gaussian matrices sum
    to zero.
    """
    m, n = 384, 1024
    for name, sigma in spectra(m).items():
        gradient = matrix(sigma, m, n)
        for resolution in (0.0004, 0.01) if "flat" in name else (0.0004,):
            update = minimax_sigmoid(gradient, resolution=resolution)
            cells = []
            for ranks, dtype in product((8, 64), (torch.float32, torch.bfloat16)):
                own = torch.randn(ranks, m, n, dtype=torch.float64) / sqrt(m * n)
                own = gradient + own - own.mean(dim=0)
                total = torch.zeros(m, n, dtype=dtype)
                for each in own.bfloat16():
                    total += each.to(dtype)
                change = minimax_sigmoid(total.double() / ranks, resolution=resolution) - update
                cells.append(f"{change.norm() / update.norm():.1%}")
            print(f"change of the update, {name}, resolution {resolution}: {' | '.join(cells)}")


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes()
    rounding_noise()
    changes()
