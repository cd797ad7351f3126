"""Four Sorens side by side: the table "Which Soren this is" of docs/optimizers.md.

    python docs/which_soren.py         a minute

Each map is applied in float64 to diagonal matrices: a map commutes with rotations, so a spectrum stands for any matrix
that has it. Numbers over several matrices are medians. Cosines and sizes are in the Frobenius norm.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from soren_align.bench import spectra
from soren_align.spectral import exact_sigmoid, minimax_sigmoid, newton_schulz, released_sigmoid, soft_newton_schulz

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "text (sns, K = 15)": soft_newton_schulz,
    "released (K = 5)": released_sigmoid,
    "exact": exact_sigmoid,
    "our default (minimax)": minimax_sigmoid,
}
POWERS = {"1 / i": 1.0, "1 / sqrt(i)": 0.5, "flat": 0.0}
SIZE = 512  # of the synthetic spectra, with a Frobenius norm of 1
SHARES = (0.0, 0.1, 0.5, 0.9)  # of the ranks: the singular values that are shown


def momenta() -> dict[str, list[Tensor]]:
    """Spectra by name: the synthetic ones, then those recorded in trainings, all steps of a set."""
    index = torch.arange(1, SIZE + 1, dtype=torch.float64)
    sets = {name: [index**-power / (index**-power).norm()] for name, power in POWERS.items()}
    for spectrum in spectra.load():
        sets.setdefault(spectrum.set, []).append(spectrum.sigma)
    return sets


def measurements(sigma: Tensor, spectral_map: Callable[[Tensor], Tensor], muon: Tensor) -> Tensor:
    """[7]: the output at SHARES, its norm over Muon's, its cosine with Muon's and with the gradient."""
    output = spectral_map(torch.diag(sigma)).diagonal()
    cosines = [torch.nn.functional.cosine_similarity(output, other, dim=0) for other in (muon, sigma)]
    return torch.stack([*output[positions(sigma)], output.norm() / muon.norm(), *cosines])


def positions(sigma: Tensor) -> list[int]:
    """The indices of SHARES."""
    return [int(share * (len(sigma) - 1)) for share in SHARES]


def main() -> None:
    """Print the table."""
    print(f"| momenta | | {' | '.join(MAPS)} |\n|{'---|' * (len(MAPS) + 2)}")
    for name, sigmas in momenta().items():
        inputs = torch.stack([sigma[positions(sigma)] / sigma[0] for sigma in sigmas])
        muons = [newton_schulz(torch.diag(sigma)).diagonal() for sigma in sigmas]
        medians = [
            torch.stack([measurements(sigma, f, muon) for sigma, muon in zip(sigmas, muons, strict=True)]).quantile(
                0.5, 0
            )
            for f in MAPS.values()
        ]
        label = f"{name}: {_listed(inputs.quantile(0.5, 0))}"
        rows = {"mapped to": [_listed(column[: len(SHARES)]) for column in medians]}
        for number, quantity in enumerate(
            ("size over Muon's", "cosine to Muon", "cosine to the gradient"), len(SHARES)
        ):
            rows[quantity] = [f"{column[number].item():.2f}" for column in medians]
        for quantity, columns in rows.items():
            print(f"| {label} | {quantity} | {' | '.join(columns)} |")
            label = ""


def _listed(values: Tensor) -> str:
    return ", ".join(f"{value:.2g}" for value in values.tolist())


if __name__ == "__main__":
    main()
