"""`soren-align spectrum RUN --advise`: how far a run's map, and others, take an update from Muon's
and from SGD's.

All numbers follow from the singular values of the momenta. They state how updates differ, and not
which learns better.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Group
from rich.text import Text
from torch import Tensor

from ..core.text import Table, count, number
from ..recipe import Recipe
from ..spectral.composed import unit_of
from ..spectral.contrast import LOWEST_COSINE_OF_THE_SIGMOID, contrast, median_of_modes
from ..spectral.maps import HIGH_PASS, IDENTITY, SOFT_SIGN, TANH, SpectralMap, sigmoid
from .spectra import Spectrum

MIDDLE = 0.405
"""The sigmoid of it is 0.6."""
LARGE = 10_000
"""A larger ratio is not shown: the map takes the median singular value to almost 0."""
NUMBERS = ("ratio", "to_muon", "to_momentum")
"""Of `contrast.Contrast`."""


def candidates(
    spectra: Sequence[Spectrum], recipe: Recipe
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The map of the recipe's optimizer, and others, by their labels; a threshold in them is that
    of `threshold`.

    Each takes the singular values of a momentum, with 0 for the null space, to those of the update.
    """
    tau, spectral_map, settings = (
        threshold(spectra),
        recipe.optimizer.spectral_map,
        recipe.optimizer.map_settings,
    )
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
        values = [
            asdict(contrast(s.without_null_space, function(s.without_null_space))) for s in momenta
        ]
        numbers = {key: [each[key] for each in values if each[key] is not None] for key in NUMBERS}
        spread = {
            key: {"median": median(v), "min": min(v), "max": max(v)}
            for key, v in numbers.items()
            if v
        }
        maps.append({"map": label, **spread})
    about = {"num_momenta": len(momenta), "num_zero": len(spectra) - len(momenta)}
    about |= {"tau": threshold(momenta) if momenta else 0.1}
    return {**about, "sigmoids_lowest_cosine_to_muon": LOWEST_COSINE_OF_THE_SIGMOID, "maps": maps}


def show(source: str, contrasts: dict[str, Any], recipe: Recipe) -> Group:
    """The table of `advice` and what follows from it, in at most 80 columns."""
    rows = []
    for row in contrasts["maps"]:
        medians = [row.get(key, {}).get("median") for key in NUMBERS]
        ratio = (
            f"over {LARGE:,}" if medians[0] and medians[0] > LARGE else number(medians[0], ".3g")
        )
        rows.append([row["map"], ratio, *(number(cosine, ".3f") for cosine in medians[1:])])
    header = [
        "map",
        "largest / median\nsingular value",
        "cosine to\nMuon's",
        "cosine to\nthe momentum",
    ]
    title = (
        f"updates on {count(contrasts['num_momenta'], 'momentum', 'momenta')}, {source}: medians"
    )
    own = recipe.optimizer.spectral_map
    notes = [
        f"For any momentum and any T, the cosine of the sigmoid's update to Muon's is at least "
        f"{LOWEST_COSINE_OF_THE_SIGMOID:.3f}. An update differs more only if the map falls to 0 for small singular "
        "values, as soft_sign and tanh do. In a recipe, this soft_sign is `optimizer.map: {name: soft_sign, tau: "
        f"{contrasts['tau']:g}}}`; tau is in units of nu, (sum of sigma^8)^(1/8) of a matrix.",
        "These numbers describe how updates differ. They do not predict which map learns better; `soren-align "
        "compare` measures that.",
    ]
    if own and own.target is not sigmoid:
        notes = notes[1:]
    return Group(
        Table(header, rows, title).rich(collapse_padding=True),
        *(Text(f"\n{note}") for note in notes),
    )
