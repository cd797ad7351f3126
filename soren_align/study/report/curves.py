"""Compute the curves of a report: the quantities along a run, and their means over seeds."""

from collections.abc import Sequence
from math import isfinite
from statistics import fmean, median

from ...run.metrics import IN_STUDIES
from ..study import Candidate, Point, Run, Study, finished

AT_START = {
    *("step", "tokens", "seconds"),
    *(metric.key for metric in IN_STUDIES if metric.at_start == 0),
}
"""Quantities that are 0 at the start, measured or not."""
Curve = list[tuple[float, float]]


def value_of(point: Point, key: str) -> float | None:
    """Return a quantity of a point; None if it was not measured or is not finite."""
    value = getattr(point, key)
    if value is not None and isfinite(value):
        return value
    return 0.0 if point.step == 0 and key in AT_START else None


def start(study: Study, key: str) -> float | None:
    """Return a quantity of the starting checkpoint, by any run that measured it at step 0."""
    for candidate in study.candidates:
        for run in (*candidate.verdict, *candidate.trials):
            for point in run.curve:
                if point.step == 0 and (value := value_of(point, key)) is not None:
                    return value
    return None


def shown_runs(candidate: Candidate) -> list[Run]:
    """Return the runs whose curves are shown: the final runs, before these the selected trial."""
    trial = candidate.selected_trial
    return finished(candidate.verdict) or finished([trial] if trial else [])


def curve(run: Run, x: str, y: str) -> Curve:
    """Return the points of a run where both quantities were measured."""
    pairs = [(value_of(point, x), value_of(point, y)) for point in run.curve]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def mean_curve(runs: Sequence[Run], x: str, y: str) -> Curve:
    """Return the means over runs of both quantities, at the steps where all runs have them."""
    by_step = [{point.step: point for point in run.curve} for run in runs]
    means = []
    for step in sorted(set.intersection(*map(set, by_step))) if runs else ():
        # A mean over fewer seeds would jump where one run has no evaluation.
        pairs = [(value_of(points[step], x), value_of(points[step], y)) for points in by_step]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if len(known) == len(runs):
            means.append((fmean(a for a, _ in known), fmean(b for _, b in known)))
    return means


def focus(values: Sequence[float], higher_is_better: bool) -> tuple[float, float] | None:
    """Return the part of an axis where values differ; None without two values.

    From the best value to four times the median's distance from it. Worse values are cut off: the
    first losses of a run would hide all differences at its end.
    """
    values = [value for value in values if isfinite(value)]
    if len(values) < 2:
        return None
    # Costs are better where they are lower, whatever the metric's direction.
    sign = -1.0 if higher_is_better else 1.0
    costs = sorted(sign * value for value in values)
    top = min(costs[-1], costs[0] + 4 * (median(costs) - costs[0]))
    top = top if top > costs[0] else costs[-1]
    room = 0.06 * (top - costs[0]) or 0.01 * abs(top) or 1.0
    low, high = sorted((sign * (costs[0] - room), sign * (top + room)))
    return low, high
