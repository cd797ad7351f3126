"""Compositions of odd polynomials: the record, its file, and its value. Needs no torch.

    f(x)  ~  u_K + sum of w_k u_k + w_0 u,     u_0 = u = x / limit,  u_k = p_k(u_(k-1)),  0 < k < K

The polynomials p_k have the degree 5: a step of `iterate`, which evaluates a composition on
matrices. The sum of the iterates costs no product. `python -m research.maps` fits one to a formula
and writes its file, with a proved bound of the error. Those of Soren's maps by name are files of
the same kind, in configs/compositions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any, Literal, NamedTuple, cast

from ..core.errors import UserError
from ..core.files import ROOT, read_json, resolve_path
from .coefficients import TOP as TOP
from .coefficients import Step

Of = Literal["nu", "norm", "rms", "none"]
"""The norm by which a matrix's singular values are divided to get x, see
`iterate.guarded_composition`."""
SHIPPED = ROOT / "configs/compositions"
REMEDY = "write the file anew by `python -m research.maps` (research/README.md)"


class Composition(NamedTuple):
    """f(u) = linear u + sum of weights times the iterates u_1, u_2, ... of quintic steps."""

    steps: tuple[Step, ...]
    error: float  # the value is at most this far from the target, on [resolution, TOP]
    slope: float  # the derivative at 0
    # of u_1, ..., u_(K-1) in the result, K - 1 numbers; () for none. That of u_K is 1.
    weights: tuple[float, ...] = ()
    linear: float = 0.0


@dataclass(frozen=True)
class Composed:
    """A composition with its certificate, the content of a file.

    formula: what it matches, as text, a function of x = sigma / N on [0, limit]; of: N.
    largest: of |f| on the domain; error and error_below are shares of it. error: proved on
    [resolution * limit, limit]. error_below: proved below it; large where f jumps at 0, since the
    composition falls to 0 there; None where f is not bounded there.
    """

    formula: str
    of: Of
    resolution: float
    limit: float
    composition: Composition
    largest: float
    error: float
    error_below: float | None

    def as_dict(self) -> dict[str, Any]:
        """The content of its file, as plain data."""
        record = {**vars(self), **self.composition._asdict(), "error": self.error}
        del record["composition"]
        record["steps"] = [list(step) for step in self.composition.steps]
        return {key: list(v) if isinstance(v, tuple) else v for key, v in record.items()}


def value(composition: Composition, u: Any) -> Any:
    """The composition at u, a number, array or tensor."""
    total = composition.linear * u
    for (a, b, c), weight in zip(composition.steps, all_weights(composition), strict=True):
        square = u * u
        u = ((c * square + b) * square + a) * u
        total = total + weight * u
    return total


def all_weights(composition: Composition) -> tuple[float, ...]:
    """The weight of the iterate after each step; that of the last is 1."""
    num_others = len(composition.steps) - 1
    return (*(composition.weights or (0.0,) * num_others), 1.0) if composition.steps else ()


def from_dict(record: Mapping[str, Any]) -> Composed:
    """The record of `Composed.as_dict`.

    Raises ValueError, KeyError or TypeError if the record is damaged: a field is missing, a count
    is wrong, or the polynomials leave the range that the certificate states, as after an edit of a
    coefficient by hand.
    """
    steps = cast("tuple[Step, ...]", tuple(tuple(map(float, s)) for s in record["steps"]))
    weights = tuple(map(float, record["weights"]))
    largest, error = float(record["largest"]), float(record["error"])
    below = None if record["error_below"] is None else float(record["error_below"])
    of, (resolution, limit) = record["of"], (float(record[key]) for key in ("resolution", "limit"))
    is_whole = (
        {len(step) for step in steps} == {3}
        and len(steps) <= 8
        and all(step[1] != 0 for step in steps[:1])  # `iterate` divides by it
        and len(weights) in (0, len(steps) - 1)
        and of in ("nu", "norm", "rms", "none")
        and 0 < resolution <= 0.1
        and 0 < limit < float("inf")
    )
    if not is_whole:
        raise ValueError("composition")
    composition = Composition(
        steps,
        error=error * largest,
        slope=float(record["slope"]),
        weights=weights,
        linear=float(record["linear"]),
    )
    # After the counts, the values: an edit of a coefficient by hand changes no count, but takes the
    # polynomials out of the range that the certificate states.
    points = [resolution + (1 - resolution) * i / 200 for i in range(201)]
    values = [value(composition, u) for u in points]
    margin = (error + 1e-6) * largest
    if not all(isfinite(v) and -margin <= v <= largest + margin for v in values):
        raise ValueError("composition")
    return Composed(
        str(record["formula"]), of, resolution, limit, composition, largest, error, below
    )


def read(file: str) -> dict[str, Any]:
    """The content of a composition's file: a path, or `shipped:...`.

    Raises UserError if there is no such file, or if its content is none.
    """
    path = resolve_path(file)
    if not path.is_file():
        raise UserError(f"file: no file {file}; {REMEDY}")
    record = read_json(path)
    try:
        return from_dict(record).as_dict()
    except (KeyError, TypeError, ValueError):
        raise UserError(f"file: {file} is no composition, or is damaged; {REMEDY}") from None


@cache
def shipped(name: str, parameter: str, number: float) -> Composed:
    """The composition of one of Soren's maps by name, such as soft_sign with tau = 0.1.

    Raises UserError if none is shipped for this number.
    """
    file = SHIPPED / f"{name}-{number:.15g}.json"
    if not file.is_file():
        numbers = sorted(float(f.stem.rpartition("-")[2]) for f in SHIPPED.glob(f"{name}-*.json"))
        raise UserError(
            f"{parameter}: found {number:.15g}, but the polynomials of {name} are for "
            f"{', '.join(f'{n:g}' for n in numbers)}; write one of these, or exact: true, or a "
            "file of polynomials by `python -m research.maps` (research/README.md)"
        )
    return from_dict(read_json(file))
