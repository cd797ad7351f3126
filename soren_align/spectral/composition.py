"""Compositions of odd polynomials: the record, its file, and its value. Needs no torch.

    f(x)  ~  u_K + sum of w_k u_k + b(u),     u_0 = u = x / limit,  u_k = p_k(u_(k-1)),  0 < k < K

The polynomials p_k have 3 or 5 terms: the degrees 5 and 9, which a Gram matrix can evaluate by 1
and 2 products. The sum of the iterates and the polynomial b, of degree 5 at most, cost no product
of two m x m matrices. `products` evaluates a composition on matrices.

`python -m research.maps` fits one to a formula and writes its file, with a proved bound of the
error. Those of Soren's maps by name are files of the same kind, in configs/compositions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any, Literal, NamedTuple

from ..core.errors import UserError
from ..core.files import ROOT, read_json, resolve_path

Of = Literal["nu", "norm", "rms", "none"]
"""The norm by which a matrix's singular values are divided to get x, see `composed`."""
TOP = 1.005
"""The largest u: 1, and a margin for rounding."""
SHIPPED = ROOT / "configs/compositions"
REMEDY = "write the file anew by `python -m research.maps` (research/README.md)"


class Composition(NamedTuple):
    """Composed odd polynomials of u, each by its coefficients of u, u^3, u^5, ..."""

    steps: tuple[tuple[float, ...], ...]
    centers: tuple[float, ...]  # of the interval of each step, in u^2
    # of wide matrices: the Gram matrix is computed again after each of the first num_restarts steps
    num_restarts: int
    error: float  # the value is at most this far from the target, on [resolution, TOP]
    slope: float  # the derivative at 0
    # of u_1, ..., u_(K-1) in the result, K - 1 numbers; () for none
    weights: tuple[float, ...] = ()
    base: tuple[float, ...] = ()  # b: the coefficients of u, u^3, u^5 in the result; () for none


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


def odd(coefficients: Sequence[float], u: Any) -> Any:
    """The odd polynomial with these coefficients of u, u^3, ..., of a number, array or tensor."""
    square, result = u * u, 0.0 * u
    for coefficient in reversed(coefficients):
        result = result * square + coefficient
    return result * u


def value(composition: Composition, u: Any) -> Any:
    """The composition at u, a number, array or tensor."""
    total = odd(composition.base, u)
    for step, weight in zip(composition.steps, all_weights(composition), strict=True):
        u = odd(step, u)
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
    steps = tuple(tuple(map(float, step)) for step in record["steps"])
    lists = {key: tuple(map(float, record[key])) for key in ("weights", "centers", "base")}
    largest, error = float(record["largest"]), float(record["error"])
    below = None if record["error_below"] is None else float(record["error_below"])
    composition = Composition(
        steps,
        error=error * largest,
        slope=float(record["slope"]),
        num_restarts=int(record["num_restarts"]),
        **lists,
    )
    of, (resolution, limit) = record["of"], (float(record[key]) for key in ("resolution", "limit"))
    is_whole = (
        {len(step) for step in steps} <= {3, 5}
        and 0 < len(steps) == len(composition.centers) <= 5
        and len(composition.weights) in (0, len(steps) - 1)
        and len(composition.base) <= 3
        and 0 <= composition.num_restarts < len(steps)
        and of in ("nu", "norm", "rms", "none")
        and 0 < resolution <= 0.1
        and 0 < limit < float("inf")
    )
    # After the counts, the values: an edit of a coefficient by hand changes no count, but takes the
    # polynomials out of the range that the certificate states.
    points = [resolution + (1 - resolution) * i / 200 for i in range(201)]
    values = [value(composition, u) for u in points]
    margin = (error + 1e-6) * largest
    if not is_whole or not all(isfinite(v) and -margin <= v <= largest + margin for v in values):
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
