"""What each Soren and Muon make of a spectrum: the first two tables of research/studies/spectra.md.

    python -m research.studies.mapped_spectra         a minute

Each map is applied in float64 to diagonal matrices: a map commutes with rotations, so a spectrum
stands for any matrix that has it. Numbers over several matrices are medians. Cosines and sizes are
in the Frobenius norm.
"""

import math
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from research.recorded import recorded_spectra
from soren_align.spectral import (
    exact_sigmoid,
    minimax_sigmoid,
    newton_schulz,
    released_sigmoid,
    soft_newton_schulz,
)

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "text (sns, K = 15)": soft_newton_schulz,
    "released (K = 5)": released_sigmoid,
    "exact": exact_sigmoid,
    "our default (minimax)": minimax_sigmoid,
    "Muon": newton_schulz,
}
POWERS = {"1 / i": 1.0, "1 / sqrt(i)": 0.5, "flat": 0.0}
SIZE = 512  # of the synthetic spectra, with a Frobenius norm of 1
SHARES = (0.0, 0.1, 0.5, 0.9)  # of the ranks: the singular values that are shown
QUANTITIES = (
    "size over Muon's",
    "cosine to Muon",
    "cosine to the gradient",
    "neighbours in reverse order",
)
ROUNDING = 1e-9  # of the output
LEADING = 0.1  # of the singular values, the largest ones


def synthetic() -> dict[str, list[Tensor]]:
    """Spectra of POWERS by name."""
    index = torch.arange(1, SIZE + 1, dtype=torch.float64)
    return {name: [index**-power / (index**-power).norm()] for name, power in POWERS.items()}


def recorded() -> dict[str, list[Tensor]]:
    """The spectra recorded in trainings, all steps of a set."""
    sets: dict[str, list[Tensor]] = {}
    for spectrum in recorded_spectra():
        sets.setdefault(spectrum.set, []).append(spectrum.sigma)
    return sets


def measurements(sigma: Tensor) -> Tensor:
    """[maps, 8]: each output at SHARES, then QUANTITIES."""
    outputs = [f(torch.diag(sigma)).diagonal() for f in MAPS.values()]
    muon = outputs[-1]
    rows = []
    for output in outputs:
        cosines = [cosine_similarity(output, other, dim=0) for other in (muon, sigma)]
        reversed_pairs = (output.diff() > ROUNDING).double().mean()
        rows.append(
            torch.stack(
                [*output[positions(sigma)], output.norm() / muon.norm(), *cosines, reversed_pairs]
            )
        )
    return torch.stack(rows)


def positions(sigma: Tensor) -> list[int]:
    """The indices of SHARES."""
    return [int(share * (len(sigma) - 1)) for share in SHARES]


def rows(name: str, sigmas: list[Tensor]) -> list[str]:
    """The lines of one set of spectra, medians over them."""
    shown = torch.stack([sigma[positions(sigma)] / sigma[0] for sigma in sigmas]).quantile(0.5, 0)
    medians = torch.stack([measurements(sigma) for sigma in sigmas]).quantile(0.5, 0)
    cells = {"mapped to": [_listed(values) for values in medians[:, : len(SHARES)]]}
    for quantity, values in zip(QUANTITIES, medians.T[len(SHARES) :], strict=True):
        share = quantity == QUANTITIES[-1]
        cells[quantity] = [f"{value:.0%}" if share else f"{value:.2f}" for value in values.tolist()]
    labels = [f" {name}: {_listed(shown)}", *[""] * len(QUANTITIES)]
    return [
        f"|{label} | {quantity} | {' | '.join(columns)} |"
        for label, (quantity, columns) in zip(labels, cells.items(), strict=True)
    ]


def _listed(values: Tensor) -> str:
    return ", ".join(f"{value:.2g}" for value in values.tolist())


def leading_share(sigma: Tensor, output: Tensor) -> float:
    """The share of the first-order decrease of the loss, sum of sigma alpha, that comes from the
    largest LEADING.
    """
    products = sigma * output
    return float(products[: math.ceil(LEADING * len(sigma))].sum() / products.sum())


def leading_row(name: str, sigmas: list[Tensor]) -> str:
    """The line of one set of spectra in the table of `leading_share`, medians over them; the first
    map is SGD.
    """
    maps: list[Callable[[Tensor], Tensor]] = [lambda x: x, *MAPS.values()]
    shares = [
        median(leading_share(sigma, f(torch.diag(sigma)).diagonal()) for sigma in sigmas)
        for f in maps
    ]
    return f"| {name} | {' | '.join(f'{share:.0%}' for share in shares)} |"


def main() -> None:
    """Print the tables."""
    print(f"| momenta | | {' | '.join(MAPS)} |\n|{'---|' * (len(MAPS) + 2)}")
    for name, sigmas in (synthetic() | recorded()).items():
        print("\n".join(rows(name, sigmas)))
    print(f"\n| momenta | SGD | {' | '.join(MAPS)} |\n|{'---|' * (len(MAPS) + 2)}")
    for name, sigmas in (synthetic() | recorded()).items():
        print(leading_row(name, sigmas))


if __name__ == "__main__":
    main()
