"""A proved bound of the error of a composition of quintic steps, by interval arithmetic."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from soren_align.spectral.composition import Composition, all_weights

from . import intervals
from .intervals import Interval, Jet

Array = np.ndarray
Function = Callable[[Any], Any]
"""Of an array, or of a jet (`intervals`)."""
MAX_BOXES = 400_000
"""Of one bound, in all: a second or two. Functions that need more have no certificate."""


def _polynomial(coefficients: Sequence[float], square: Interval) -> Interval:
    """A polynomial of an interval, by Horner's rule."""
    result = intervals.constant(coefficients[-1], square)
    for coefficient in reversed(coefficients[:-1]):
        result = result * square + intervals.constant(coefficient, square)
    return result


def composed_jet(composition: Composition, u: Jet) -> Jet:
    """The composition on boxes of u, with its derivative.

    A value is bounded by Horner's rule, and by the mean value theorem about the middle of the box,
    which is tighter on small boxes.
    """
    middle = (u.value.low + u.value.high) / 2
    at_middle = Interval(middle, middle)
    radius = (u.value - at_middle).largest()
    around = Interval(-radius, radius)
    box, point, slope = u.value, at_middle, u.slope
    linear = intervals.constant(composition.linear, box)
    total_box, total_point, total_slope = linear * box, linear * point, linear * slope
    for step, weight in zip(composition.steps, all_weights(composition), strict=True):
        square, factor = box.whole_power(2), intervals.constant(weight, box)
        slope = _polynomial((step[0], 3 * step[1], 5 * step[2]), square) * slope
        point = _polynomial(step, point.whole_power(2)) * point
        box = (_polynomial(step, square) * box).within(point + slope * around)
        total_box, total_point = total_box + factor * box, total_point + factor * point
        total_slope = total_slope + factor * slope
    return Jet(total_box.within(total_point + total_slope * around), total_slope)


def largest_error(
    composition: Composition, target: Function, low: float, high: float
) -> tuple[float, float]:
    """An upper bound of |composition - target| on [low, high], and the u where the largest error
    was seen.

    The bound is proved: the interval is covered by boxes, on each of which interval arithmetic
    bounds the error and its derivative. Boxes that may hold more than the largest error at their
    middles are halved, until the bound is within 0.5% of it. It is infinite where the target cannot
    be bounded: a pole.
    """
    ends = np.linspace(low, high, 1001) if low == 0 else np.geomspace(low, high, 1001)
    ends[0], ends[-1] = low, high
    left, right = ends[:-1], ends[1:]
    bound, seen, where, num_boxes = 0.0, 0.0, low, 0
    with np.errstate(all="ignore"):
        while len(left):
            num_boxes += len(left)
            middle = (left + right) / 2
            points = _error(composition, target, middle, middle).value
            at_middle = np.maximum(np.maximum(points.low, -points.high), 0.0)
            if at_middle.max(initial=0.0) > seen:
                seen, where = float(at_middle.max()), float(middle[at_middle.argmax()])
            boxes = _error(composition, target, left, right)
            radius = np.maximum(middle - left, right - middle) * (1 + 4 * intervals.EPS)
            moved = (points.largest() + boxes.slope.largest() * radius) * (1 + 8 * intervals.EPS)
            # NaN: the target is not defined, or its derivative is not.
            upper = np.where(
                np.isnan(boxes.value.largest()), np.inf, np.fmin(boxes.value.largest(), moved)
            )
            is_open = upper > max(1.005 * seen, 1e-9)
            is_last = num_boxes + 2 * is_open.sum() > MAX_BOXES or (right - left).min() < 1e-15
            bound = max(bound, float((upper if is_last else upper[~is_open]).max(initial=0.0)))
            if is_last:
                worst = int(upper.argmax())
                return bound, where if np.isfinite(bound) else float(middle[worst])
            left, middle, right = left[is_open], middle[is_open], right[is_open]
            left, right = np.concatenate([left, middle]), np.concatenate([middle, right])
    return bound, where


def _error(composition: Composition, target: Function, low: Array, high: Array) -> Jet:
    u = intervals.variable(low, high)
    return composed_jet(composition, u) - target(u)
