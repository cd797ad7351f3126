"""Intervals that contain the exact values of a function and of its derivative, whatever float64
rounds.

An operation on intervals returns an interval that contains every exact result: its ends are moved
outwards by more than the rounding error of float64. `Jet` has the derivative beside the value, by
the chain rule. Both hold arrays of many intervals, so that a function is bounded on thousands of
boxes at once. An operation that is not defined on the whole interval (a division by 0, a logarithm
of a negative number) gives NaN, and so does all that is computed with it.
"""

from collections.abc import Callable
from typing import Any, Union

import numpy as np

EPS = 2.0**-52
ARITHMETIC, FUNCTION = 1, 8
"""Ulps by which ends are moved: of + - * / and sqrt, which IEEE 754 rounds correctly, and of exp,
log, tanh and powers, whose errors in numpy are below 4 (its own test suite)."""
Array = np.ndarray


class Interval:
    """[low, high], element by element."""

    __slots__ = ("high", "low")

    def __init__(self, low: Any, high: Any):
        self.low, self.high = low, high

    def __neg__(self) -> "Interval":
        return Interval(-self.high, -self.low)

    def __add__(self, other: "Interval") -> "Interval":
        return _outwards(self.low + other.low, self.high + other.high)

    def __sub__(self, other: "Interval") -> "Interval":
        return _outwards(self.low - other.high, self.high - other.low)

    def __mul__(self, other: "Interval") -> "Interval":
        products = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return _outwards(np.minimum.reduce(products), np.maximum.reduce(products))

    def __truediv__(self, other: "Interval") -> "Interval":
        quotients = [a / b for a in (self.low, self.high) for b in (other.low, other.high)]
        result = _outwards(np.minimum.reduce(quotients), np.maximum.reduce(quotients))
        return result.where((other.low > 0) | (other.high < 0))

    def where(self, defined: Any) -> "Interval":
        """This interval, or NaN where it is not defined."""
        return Interval(np.where(defined, self.low, np.nan), np.where(defined, self.high, np.nan))

    def within(self, other: "Interval") -> "Interval":
        """The intersection of two intervals that contain the same exact value; of one, where the
        other is NaN.
        """
        return Interval(np.fmax(self.low, other.low), np.fmin(self.high, other.high))

    def largest(self) -> Array:
        """The largest absolute value."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def whole_power(self, exponent: int) -> "Interval":
        """The interval to the power of a whole number."""
        if exponent < 0:
            return constant(1.0, self) / self.whole_power(-exponent)
        low, high = self.low**exponent, self.high**exponent
        if exponent % 2 == 0:
            holds_zero = (self.low < 0) & (self.high > 0)
            low, high = np.where(holds_zero, 0.0, np.minimum(low, high)), np.maximum(low, high)
        return _outwards(low, high, FUNCTION)


def _outwards(low: Any, high: Any, ulps: int = ARITHMETIC) -> Interval:
    low = low - (ulps + 1) * EPS * np.abs(low)
    return Interval(low, high + (ulps + 1) * EPS * np.abs(high))


def constant(value: float, like: Interval) -> Interval:
    """A number as an interval of no width, of the shape of another interval."""
    return Interval(np.full_like(like.low, value), np.full_like(like.low, value))


def _rising(
    function: Callable[[Array], Array], least: float = -np.inf
) -> Callable[[Interval], Interval]:
    """A rising function on intervals; least: the smallest number that it is defined for."""

    def apply(x: Interval) -> Interval:
        return _outwards(function(x.low), function(x.high), FUNCTION).where(x.low >= least)

    return apply


_exp, _log, _sqrt, _tanh = (
    _rising(np.exp),
    _rising(np.log, 0.0),
    _rising(np.sqrt, 0.0),
    _rising(np.tanh),
)


class Jet:
    """An interval of values and one of derivatives."""

    __slots__ = ("slope", "value")

    def __init__(self, value: Interval, slope: Interval):
        self.value, self.slope = value, slope

    def __neg__(self) -> "Jet":
        return Jet(-self.value, -self.slope)

    def __add__(self, other: "Jet") -> "Jet":
        return Jet(self.value + other.value, self.slope + other.slope)

    def __sub__(self, other: "Jet") -> "Jet":
        return Jet(self.value - other.value, self.slope - other.slope)

    def __mul__(self, other: "Jet") -> "Jet":
        return Jet(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def __truediv__(self, other: "Jet") -> "Jet":
        quotient = self.value / other.value
        return Jet(quotient, (self.slope - quotient * other.slope) / other.value)

    def __pow__(self, exponent: Union["Jet", float]) -> "Jet":
        if isinstance(exponent, Jet):
            return (exponent * log(self)).through(_exp, _exp)
        if exponent == 0:
            return Jet(constant(1.0, self.value), constant(0.0, self.value))
        factor = constant(exponent, self.value)
        if exponent == int(exponent):
            whole = int(exponent)
            slope = factor * self.value.whole_power(whole - 1) * self.slope
            return Jet(self.value.whole_power(whole), slope)
        value = _real_power(self.value, exponent)
        return Jet(value, factor * _real_power(self.value, exponent - 1) * self.slope)

    def through(
        self, function: Callable[[Interval], Interval], derivative: Callable[[Interval], Interval]
    ) -> "Jet":
        """A function of this, by the chain rule."""
        return Jet(function(self.value), derivative(self.value) * self.slope)


def _real_power(x: Interval, exponent: float) -> Interval:
    ends = (x.low**exponent, x.high**exponent)
    low, high = ends if exponent > 0 else ends[::-1]
    return _outwards(low, high, FUNCTION).where(x.low >= 0)


def exp(x: Jet) -> Jet:
    """e to the power of x."""
    return x.through(_exp, _exp)


def log(x: Jet) -> Jet:
    """The natural logarithm."""
    return x.through(_log, lambda value: constant(1.0, value) / value)


def sqrt(x: Jet) -> Jet:
    """The square root."""
    return x.through(_sqrt, lambda value: constant(0.5, value) / _sqrt(value))


def tanh(x: Jet) -> Jet:
    """The hyperbolic tangent, whose slope, 1 / cosh^2, falls on both sides of 0."""
    box, largest = x.value, x.value.largest()
    holds_zero = (box.low <= 0) & (box.high >= 0)
    near = np.where(holds_zero, 0.0, np.minimum(np.abs(box.low), np.abs(box.high)))
    squares = [np.cosh(np.minimum(end, 350.0)) ** 2 for end in (largest, near)]
    slope = _outwards(np.where(largest > 350, 0.0, 1 / squares[0]), 1 / squares[1], 4 * FUNCTION)
    return Jet(_tanh(box), slope * x.slope)


def minimum(x: Jet, y: Jet) -> Jet:
    """The smaller one; where either may be, the slope is the hull of both."""
    value = Interval(np.minimum(x.value.low, y.value.low), np.minimum(x.value.high, y.value.high))
    return Jet(value, _chosen(x, y, x.value.high < y.value.low, y.value.high < x.value.low))


def maximum(x: Jet, y: Jet) -> Jet:
    """The larger one; where either may be, the slope is the hull of both."""
    value = Interval(np.maximum(x.value.low, y.value.low), np.maximum(x.value.high, y.value.high))
    return Jet(value, _chosen(x, y, x.value.low > y.value.high, y.value.low > x.value.high))


def _chosen(x: Jet, y: Jet, is_x: Array, is_y: Array) -> Interval:
    both = Interval(np.minimum(x.slope.low, y.slope.low), np.maximum(x.slope.high, y.slope.high))
    low = np.where(is_x, x.slope.low, np.where(is_y, y.slope.low, both.low))
    return Interval(low, np.where(is_x, x.slope.high, np.where(is_y, y.slope.high, both.high)))


def number(value: float, like: Jet) -> Jet:
    """A number as a jet, of the shape of another."""
    return Jet(constant(value, like.value), constant(0.0, like.value))


def variable(low: Array, high: Array) -> Jet:
    """x itself on boxes [low, high]."""
    box = Interval(low, high)
    return Jet(box, constant(1.0, box))
