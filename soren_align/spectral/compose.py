"""The cheapest composition of odd polynomials for a formula, with a certificate, or a refusal with
what is reachable.

`compose` tries more and more products, until the proved bound of the error (`composition`) is
within the error that is asked for. The work is bounded: some seconds for a formula that nothing
matches. Results are cached by content.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from math import isfinite
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Literal

import numpy as np

from ..core.errors import UserError
from ..core.files import default_cache_folder, digest, read_json, write
from ..core.optimizer_settings import MUON_STEPS
from . import intervals
from .composition import TOP, Composition, largest_error, value
from .flops import POLYNOMIAL_PRODUCTS, composition_flops, quintic_flops
from .formula import Formula, parse
from .intervals import Jet

Of = Literal["nu", "norm", "rms", "none"]

NUM_TERMS = ((3,), (5,), (5, 3), (5, 5), (3, 3, 3), (5, 5, 5), (5, 5, 5, 5), (5, 5, 5, 5, 5))
"""The numbers of terms of the polynomials that are tried, from the cheapest on."""
SHAPES = ((512, 512), (512, 1376), (2048, 2048), (256, 2048), (2048, 11008))
"""Of FLOPs over Muon's, a geometric mean: matrices of llama-60m and qwen2.5-3b (`bench.shapes`)."""
JUMP = 0.05
"""Of the largest |f|: a formula with more at `resolution` gets a base of degree 5, at a product
more near squares."""
VERSION = 1
"""Of the cached files: another one whenever the search or the record changes."""
SHIPPED = Path(__file__).with_name("compositions.json")
"""Compositions of the maps by name with their default settings."""
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

    @property
    def key(self) -> dict[str, Any]:
        """What identifies it, as plain data."""
        return {
            "formula": str(self.formula),
            "of": self.of,
            "resolution": float(self.resolution),
            "limit": float(self.limit),
        }


@dataclass(frozen=True)
class Composed:
    """A composition with its certificate.

    largest: of |f| on the domain; error and error_below are shares of it. error: proved on
    [resolution, 1].
    error_below: proved on [0, resolution]; large where f jumps at 0, since the composition falls to
    0 there; None where f is not bounded there.
    """

    composition: Composition
    largest: float
    error: float
    error_below: float | None

    @property
    def num_products(self) -> int:
        """Matrix products for a matrix that is far from square."""
        steps, restarts = self.composition.steps, self.composition.num_restarts
        num_square = sum(POLYNOMIAL_PRODUCTS[len(step)] for step in steps) + 3 * (
            len(steps) - 1 - restarts
        )
        return 1 + restarts + num_square + (restarts + 1) + restarts

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data, for a recipe, run.json and a checkpoint."""
        steps = [list(step) for step in self.composition.steps]
        rest = {key: value for key, value in self.composition._asdict().items() if key != "steps"}
        record = {
            "steps": steps,
            **{key: list(v) if isinstance(v, tuple) else v for key, v in rest.items()},
        }
        return {
            **record,
            "largest": self.largest,
            "error": self.error,
            "error_below": self.error_below,
        }


def over_muon(flops: Callable[[int, int], int]) -> float:
    """A map's operations over those of Muon's five steps, the geometric mean over SHAPES.
    flops: of m <= n.
    """
    return geometric_mean(
        flops(m, n) / quintic_flops(m, n, MUON_STEPS) for m, n in map(sorted, SHAPES)
    )


def from_dict(record: Mapping[str, Any]) -> Composed:
    """The record of `Composed.as_dict`.
    Raises KeyError, TypeError or ValueError for another one.
    """
    steps = tuple(tuple(map(float, step)) for step in record["steps"])
    weights, centers, base = (
        tuple(map(float, record[key])) for key in ("weights", "centers", "base")
    )
    error, below = float(record["error"]), record["error_below"]
    if not steps or len(steps) > 5 or {len(step) for step in steps} - {3, 5}:
        raise ValueError("steps")
    if (
        len(centers) != len(steps)
        or len(weights) not in (0, len(steps) - 1)
        or len(base) > 3
        or not 0 <= int(record["num_restarts"]) < len(steps)
    ):
        raise ValueError("centers, weights, base, num_restarts")
    numbers = [
        *weights,
        *centers,
        *base,
        *(c for step in steps for c in step),
        float(record["slope"]),
    ]
    if not all(map(isfinite, numbers)):
        raise ValueError("numbers")
    largest = float(record["largest"])
    composition = Composition(
        steps,
        centers,
        int(record["num_restarts"]),
        error * largest,
        float(record["slope"]),
        weights,
        base,
    )
    return Composed(composition, largest, error, None if below is None else float(below))


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
        bound, where = largest_error(Composition((), (), 0, 0.0, 0.0), target, resolution, 1.0)
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


def compose(target: Target, error: float, folder: Path | None = None) -> Composed:
    """The cheapest composition whose proved error is at most `error` of the largest |f|; cached in
    `folder`.

    Raises UserError if there is none, with what is reachable at which cost.
    """
    name = key_of(target, error)
    record = shipped().get(name)
    file = (folder or default_cache_folder() / "maps") / f"{name}.json"
    if record is None and file.is_file():
        try:
            record = read_json(file)["composition"]
            from_dict(record)
        except (UserError, KeyError, TypeError, ValueError):
            record = None  # of a damaged file: computed again
    if record is not None:
        return from_dict(record)
    refuse_unsuitable(target)
    reached: list[Composed] = []
    for composed in search(target, error):
        reached.append(composed)
        if composed.error <= error:
            content = {**target.key, "error": error, "composition": composed.as_dict()}
            with suppress(OSError):  # a cache that cannot be written costs time only
                file.parent.mkdir(parents=True, exist_ok=True)
                write(file, json.dumps(content, indent=1) + "\n")
            return composed
    raise UserError(refusal(target, error, reached))


def key_of(target: Target, error: float) -> str:
    """The name of a composition in the cache: a digest of what it matches."""
    return digest({"version": VERSION, **target.key, "error": float(error)})


@cache
def shipped() -> dict[str, Any]:
    """The records that are shipped, by the digest of what they match."""
    return read_json(SHIPPED) if SHIPPED.is_file() else {}


def search(target: Target, error: float) -> Iterator[Composed]:
    """Compositions of more and more products, each improved until its largest error is within
    `error`, if it can be.
    """
    # with scipy, which takes as long to import as a search
    from .fitting import as_composition, fit, grid

    start = grid(target.resolution)
    largest = float(np.abs(target(start)).max())
    jumps = target(start[:1])[0] > JUMP * largest
    for num_terms in NUM_TERMS:
        points, num_base = start, 0 if len(num_terms) == 1 else 3 if jumps else 1
        for _ in range(3):
            parameters = fit(num_terms, num_base, target(points) / largest, points, 0.95 * error)
            if parameters is None:
                break
            composition = as_composition(num_terms, parameters, largest)
            bound, worst = largest_error(composition, target, target.resolution, TOP)
            residuals = np.abs(value(composition, points) - target(points)).max()
            # Where the grid has missed the largest error, it gets the point, and those beside it.
            if not residuals <= error * largest < bound < np.inf:
                break
            points = np.unique(
                np.append(
                    points, np.clip(worst * np.array([0.999, 1.0, 1.001]), target.resolution, TOP)
                )
            )
        if parameters is None:
            continue
        below = largest_error(composition, target, 0.0, target.resolution)[0] / largest
        composition = composition._replace(error=bound)
        yield Composed(composition, largest, bound / largest, below if isfinite(below) else None)


def refusal(target: Target, error: float, reached: list[Composed]) -> str:
    """The sentence for a formula without a certificate within `error`."""
    name = str(target.formula)
    front: list[Composed] = []
    for composed in reached:
        if not front or composed.error < 0.9 * front[-1].error:
            front.append(composed)
    if not front or front[-1].error > USELESS:
        return (
            f"formula: even {len(NUM_TERMS[-1])} composed polynomials have an error above {USELESS:g} of {name}'s "
            "largest value; write a smoother function, or exact: true for a decomposition"
        )
    offers = []
    for composed in front[-3:]:
        share = over_muon(partial(composition_flops, composed.composition))
        offers.append(
            f"{composed.error:.2g} with {composed.num_products} products ({share:.2f} of Muon's FLOPs)"
        )
    least = front[-1].error  # rounded up to two digits
    unit = 10.0 ** (math.floor(math.log10(least)) - 1)
    least = math.ceil(least / unit * (1 - 1e-12)) * unit
    return (
        f"formula: no polynomials reach the error {error:g} for {name}; possible errors: {', '.join(offers)}; write "
        f"error: {least:g}, or exact: true for a decomposition"
    )
