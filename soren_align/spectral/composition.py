"""A function of singular values as a composition of odd polynomials: the record, and its value.

    f(x)  ~  u_K + sum of w_k u_k + b(u),     u_0 = u = x / limit,  u_k = p_k(u_(k-1)),  0 < k < K

The polynomials p_k have 3 or 5 terms: the degrees 5 and 9, which a Gram matrix can evaluate by 1 and 2 products. The
sum of the iterates and the polynomial b, of degree 5 at most, cost no product of two m x m matrices. `compose.compose`
finds one for a formula, `products` evaluates it on matrices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Function = Callable[[Any], Any]
"""Of an array, or of a jet (`intervals`)."""
TOP = 1.005
"""The largest u: 1, and a margin for rounding."""


class Composition(NamedTuple):
    """Composed odd polynomials of u, each by its coefficients of u, u^3, u^5, ..."""

    steps: tuple[tuple[float, ...], ...]
    centers: tuple[float, ...]  # of the interval of each step, in u^2
    num_restarts: int  # of wide matrices: the Gram matrix is computed again after each of the first num_restarts steps
    error: float  # the value is at most this far from the target, on [resolution, TOP]
    slope: float  # the derivative at 0
    weights: tuple[float, ...] = ()  # of u_1, ..., u_(K-1) in the result, K - 1 numbers; () for none
    base: tuple[float, ...] = ()  # b: the coefficients of u, u^3, u^5 in the result; () for none


def odd(coefficients: Sequence[float] | Array, u: Any) -> Any:
    """The odd polynomial with these coefficients of u, u^3, ..."""
    square = u * u
    result = 0.0 * u
    for coefficient in reversed(coefficients):
        result = result * square + coefficient
    return result * u


def value(composition: Composition, u: Array) -> Array:
    """The composition at u, in float64."""
    total = odd(composition.base, u)
    for step, weight in zip(composition.steps, all_weights(composition), strict=True):
        u = odd(step, u)
        total = total + weight * u
    return total


def all_weights(composition: Composition) -> tuple[float, ...]:
    """The weight of the iterate after each step; that of the last is 1."""
    num_others = len(composition.steps) - 1
    return (*(composition.weights or (0.0,) * num_others), 1.0) if composition.steps else ()
