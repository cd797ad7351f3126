"""The cheapest composition of quintic steps for a formula, with a certificate, or a refusal with
what is reachable.

`compose` tries more and more steps, until the proved bound of the error (`bound`) is
within the error that is asked for. The work is bounded: a minute for a formula that nothing
matches.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from statistics import geometric_mean
from typing import Any

import numpy as np

from soren_align.core.errors import UserError
from soren_align.core.optimizer_settings import MUON_STEPS
from soren_align.spectral.coefficients import MUON
from soren_align.spectral.composition import TOP, Composed, Composition, Of
from soren_align.spectral.maps import steps_flops

from . import intervals
from .bound import Array, largest_error
from .fitting import as_composition, fit, grid
from .formula import Formula, parse
from .intervals import Jet

MOST_STEPS = 8
"""`composition.from_dict` reads no more."""
SHAPES = ((512, 512), (512, 1376), (2048, 2048), (256, 2048), (2048, 11008))
"""Of FLOPs over Muon's, a geometric mean: matrices of llama-60m and qwen2.5-3b (benchmarks.shapes)."""
NUM_SAMPLES = 4001
USELESS = 0.3
"""An error from which on a composition is not offered."""


@dataclass(frozen=True)
class Target:
    """What is matched: a formula of x, the singular value over its normalization.

    x lies in [0, limit]; the formula is matched on [resolution * limit, limit].
    """

    formula: Formula
    of: Of
    resolution: float
    limit: float

    def __call__(self, u: Any) -> Any:
        """f(limit * u), and f(limit) for u above 1."""
        if isinstance(u, Jet):
            x = intervals.minimum(u, intervals.number(1.0, u)) * intervals.number(self.limit, u)
        else:
            x = np.minimum(u, 1.0) * self.limit
        return self.formula(x)


def over_muon(flops: Callable[[int, int], int]) -> float:
    """A map's operations over those of Muon's five steps, the geometric mean over SHAPES.
    flops: of m <= n.
    """
    return geometric_mean(
        flops(m, n) / steps_flops(m, n, [MUON] * MUON_STEPS) for m, n in map(sorted, SHAPES)
    )


def target_of(
    text: str,
    parameters: Mapping[str, float] | None = None,
    of: Of = "nu",
    resolution: float = 4e-4,
    limit: float = 1.0,
) -> Target:
    """The target of a formula. Raises UserError for a text that is none."""
    return Target(parse(text, parameters), of, resolution, 1.0 if of in ("nu", "norm") else limit)


def refuse_unsuitable(target: Target) -> None:
    """Raise UserError for a formula that is not finite, negative, or 0 everywhere on its domain."""
    resolution = target.resolution
    u = np.unique(
        np.concatenate(
            [np.geomspace(resolution, 1, NUM_SAMPLES), np.linspace(resolution, 1, NUM_SAMPLES)]
        )
    )
    numbers, name = target(u), str(target.formula)
    domain = f"on [{resolution * target.limit:g}, {target.limit:g}]"
    is_finite = np.isfinite(numbers)
    if is_finite.all():  # between the samples too: no composition, so the bound is that of |f|
        bound, where = largest_error(Composition((), 0.0, 0.0), target, resolution, 1.0)
        place = None if isfinite(bound) else where
    else:
        place = u[~is_finite][0]
    if place is not None:
        raise UserError(
            f"formula: {name} is not finite at or near x = {place * target.limit:.3g}; write a function that is finite "
            f"{domain}"
        )
    largest = float(np.abs(numbers).max())
    if not 1e-30 < largest < 1e30:
        raise UserError(
            f"formula: the largest value of {name} {domain} is {largest:g}; write one between 1e-30 and 1e30"
        )
    if (least := numbers.min()) < -1e-9 * largest:
        place = u[numbers.argmin()] * target.limit
        raise UserError(
            f"formula: {name} is {least:.3g} at x = {place:.3g}, and with a negative value the update would raise "
            f"the loss; write max({name}, 0) or another function"
        )


def compose(target: Target, error: float) -> Composed:
    """Return the cheapest composition whose proved error is at most `error` of the largest |f|.

    Raises UserError if there is none, with what is reachable at which cost.
    """
    refuse_unsuitable(target)
    reached: list[Composed] = []
    for composed in search(target, error):
        reached.append(composed)
        if composed.error <= error:
            return composed
    raise UserError(refusal(target, error, reached))


def search(target: Target, error: float) -> Iterator[Composed]:
    """Compositions of more and more steps, each improved until its largest error is within `error`,
    if it can be.
    """
    largest = float(np.abs(target(grid(target.resolution))).max())
    parameters: Array | None = None
    for count in range(1, MOST_STEPS + 1):
        parameters = fit(
            count, lambda u: target(u) / largest, target.resolution, 0.95 * error, parameters
        )
        if parameters is None:
            continue
        composition = as_composition(parameters, largest)
        bound, _ = largest_error(composition, target, target.resolution, TOP)
        below = largest_error(composition, target, 0.0, target.resolution)[0] / largest
        composition = composition._replace(error=bound)
        yield Composed(
            formula=str(target.formula),
            of=target.of,
            resolution=target.resolution,
            limit=target.limit,
            composition=composition,
            largest=largest,
            error=bound / largest,
            error_below=below if isfinite(below) else None,
        )


def refusal(target: Target, error: float, reached: list[Composed]) -> str:
    """The sentence for a formula without a certificate within `error`."""
    name = str(target.formula)
    front: list[Composed] = []
    for composed in reached:
        if not front or composed.error < 0.9 * front[-1].error:
            front.append(composed)
    if not front or front[-1].error > USELESS:
        return (
            f"formula: even {MOST_STEPS} steps have an error above {USELESS:g} of {name}'s "
            "largest value; write a smoother function, or a larger error"
        )
    offers = []
    for composed in front[-3:]:
        steps = composed.composition.steps
        share = over_muon(partial(steps_flops, steps=steps))
        offers.append(f"{composed.error:.2g} with {len(steps)} steps ({share:.2f} of Muon's FLOPs)")
    # A tenth more, rounded up to two digits: a fit to it ends earlier, elsewhere on the grid, and its
    # proved error may be some percent above that of the best one.
    least = 1.1 * front[-1].error
    unit = 10.0 ** (math.floor(math.log10(least)) - 1)
    least = math.ceil(least / unit * (1 - 1e-12)) * unit
    return (
        f"formula: no polynomials reach the error {error:g} for {name}; possible errors: {', '.join(offers)}; write "
        f"--error {least:g}, or a smoother function"
    )
