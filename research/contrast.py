"""How far a run's map, and others, take an update from Muon's and from momentum SGD's.

    python -m research.contrast RUN [--matrices GLOB] [--json]

All numbers follow from the singular values of the momenta. They state how updates differ, and not
which learns better; `soren-align compare` measures that.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console, Group
from rich.text import Text
from torch import Tensor

from soren_align.core.text import Table, count, number
from soren_align.recipe import Recipe, load_resolved
from soren_align.run.folder import RunFolder
from soren_align.run.spectra import Spectrum, spectra_of_run
from soren_align.spectral.exact import contrast_numbers, median_of_modes, unit_of
from soren_align.spectral.maps import HIGH_PASS, IDENTITY, SOFT_SIGN, TANH, SpectralMap, sigmoid

MIDDLE = 0.405
"""The sigmoid of it is 0.6."""
LARGE = 10_000
"""A larger ratio is not shown: the map takes the median singular value to almost 0."""
NUMBERS = ("ratio", "to_muon", "to_momentum")
"""Of `Contrast`."""


def lowest_cosine(least: float, largest: float) -> float:
    """The lowest cosine to Muon's update that an output can have whose singular values lie in
    [least, largest].
    """
    return 2 * math.sqrt(least * largest) / (least + largest)


LOWEST_COSINE_OF_THE_SIGMOID = lowest_cosine(1 / 2, 1)
"""Of the exact sigmoid's update to Muon's, for any momentum and any temperature;
studies/theorems.md proves it."""


@dataclass(frozen=True)
class Contrast:
    """The output U t V^T of a map beside its input U S V^T and Muon's update U V^T, over the modes
    where S is not 0.

    ratio: the largest of t over the median. to_muon, to_momentum: cosines of the angles to U V^T
    and to U S V^T. All are None where S, or t, is zero.
    """

    ratio: float | None
    to_muon: float | None
    to_momentum: float | None


def contrast(sigma: Tensor, values: Tensor) -> Contrast:
    """The contrast of a map that makes `values` of the singular values sigma, as
    `contrast_numbers`.
    """
    numbers = contrast_numbers(sigma, values).tolist()
    return Contrast(*(number if math.isfinite(number) else None for number in numbers))


def candidates(
    spectra: Sequence[Spectrum], recipe: Recipe
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The map of the recipe's optimizer, and others, by their labels; a threshold in them is that
    of `threshold`.

    Each takes the singular values of a momentum, with 0 for the null space, to those of the update.
    """
    tau = threshold(spectra)
    spectral_map, settings = recipe.optimizer.spectral_map, recipe.optimizer.map_settings
    own = {}
    if spectral_map:

        def mapped(sigma: Tensor) -> Tensor:
            output, _ = spectral_map.function(
                sigma.float().diag(), precision="float32", max_norm=None, **settings
            )
            return output.diagonal().double()

        own = {f"this run: {spectral_map.label.format(**settings)}": mapped}
    return {
        **own,
        "sigmoid(x / T), T for a contrast": lambda x: torch.sigmoid(
            MIDDLE * x / median_of_modes(x, x)
        ),
        f"soft_sign, tau: {tau:g}": _target(SOFT_SIGN, tau=tau),
        f"tanh, tau: {tau:g}": _target(TANH, tau=tau),
        "identity: momentum SGD": _target(IDENTITY),
        "high_pass: Pion": _target(HIGH_PASS),
    }


def _target(spectral_map: SpectralMap, **settings: float) -> Callable[[Tensor], Tensor]:
    """A map's function of singular values, which needs no polynomials."""
    return partial(spectral_map.target, **{**spectral_map.plain_defaults, **settings})


def threshold(spectra: Sequence[Spectrum]) -> float:
    """The median over the momenta of the singular value, over nu, that 90% lie below, to two
    digits.
    """
    sigmas = [spectrum.without_null_space for spectrum in spectra]
    shares = (sigma[sigma > 0].quantile(0.9) / unit_of(sigma, "nu") for sigma in sigmas)
    return float(f"{median(map(float, shares)):.2g}")


def advice(spectra: Sequence[Spectrum], recipe: Recipe) -> dict[str, Any]:
    """The contrast of each candidate on each momentum that is not zero, as plain data."""
    momenta = [spectrum for spectrum in spectra if spectrum.nu]
    maps = []
    for label, function in candidates(momenta, recipe).items() if momenta else ():
        sigmas = [spectrum.without_null_space for spectrum in momenta]
        values = [asdict(contrast(sigma, function(sigma))) for sigma in sigmas]
        numbers = {key: [v[key] for v in values if v[key] is not None] for key in NUMBERS}
        medians = {key: median(v) for key, v in numbers.items() if v}
        maps.append({"map": label, **medians})
    about = {"num_momenta": len(momenta), "num_zero": len(spectra) - len(momenta)}
    about |= {"tau": threshold(momenta) if momenta else 0.1}
    return {**about, "sigmoids_lowest_cosine_to_muon": LOWEST_COSINE_OF_THE_SIGMOID, "maps": maps}


def show(source: str, contrasts: dict[str, Any], recipe: Recipe) -> Group:
    """The table of `advice` and what follows from it, in at most 80 columns."""
    rows = []
    for row in contrasts["maps"]:
        medians = [row.get(key) for key in NUMBERS]
        is_large = medians[0] is not None and medians[0] > LARGE
        ratio = f"over {LARGE:,}" if is_large else number(medians[0], ".3g")
        rows.append([row["map"], ratio, *(number(cosine, ".3f") for cosine in medians[1:])])
    header = ["map", "largest / median\nsingular value"]
    header += ["cosine to\nMuon's", "cosine to\nthe momentum"]
    num_momenta = count(contrasts["num_momenta"], "momentum", "momenta")
    title = f"updates on {num_momenta}, {source}: medians"
    parts = [Table(header, rows, title).rich(collapse_padding=True)]
    own = recipe.optimizer.spectral_map
    if own and own.target is sigmoid:
        parts.append(
            Text(
                "\nFor any momentum and any T, the cosine of the sigmoid's update to Muon's is at "
                f"least {LOWEST_COSINE_OF_THE_SIGMOID:.3f}. An update differs more only if the map "
                "falls to 0 for small singular values, as soft_sign and tanh do. tau is in units "
                "of nu, (sum of sigma^8)^(1/8) of a matrix; research/README.md has the command "
                f"that makes a map with tau = {contrasts['tau']:g}."
            )
        )
    return Group(*parts)


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m research.contrast")
    parser.add_argument("run", help="a run folder with spectra.jsonl or a checkpoint")
    parser.add_argument("--matrices", action="append", metavar="GLOB")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = RunFolder(options.run)
    recipe = load_resolved(folder.recipe)
    source, spectra = spectra_of_run(folder, options.matrices or ["*"])
    contrasts = advice(spectra, recipe)
    if options.json:
        print(json.dumps({"source": source, **contrasts}, indent=2))
    else:
        Console().print(show(source, contrasts, recipe), highlight=False)


if __name__ == "__main__":
    main()
