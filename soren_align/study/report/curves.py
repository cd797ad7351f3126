"""Compute the curves of a report: means over seeds, values at equal displacement, expected bests.

The expected best metric of so many trials shows how much of a result is the search that found it.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import comb, isfinite
from statistics import fmean, median

from ...run.metrics import IN_STUDIES
from ..study import ENDED, Candidate, Point, Run, Study, by_number, finished, mean_metric

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


def interpolate(run: Run, along: str, level: float, key: str) -> float | None:
    """Return a quantity of a run where it first reaches a level of another, a displacement.

    Linear between the evaluations.
    """
    for (x0, y0), (x1, y1) in pairwise(curve(run, along, key)):
        if x0 <= level <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (level - x0) / (x1 - x0)
    return None


def common_level(study: Study, along: str) -> float | None:
    """Return the largest displacement (or KL) that every shown run reaches.

    None without two candidates.
    """
    groups = [runs for candidate in study.candidates if (runs := shown_runs(candidate))]
    tops = [
        max((x for x, _ in curve(run, along, "metric")), default=0.0)
        for runs in groups
        for run in runs
    ]
    return min(tops) if len(groups) > 1 and min(tops) > 0 else None


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


def trial_metrics(study: Study, candidate: Candidate) -> list[float | None]:
    """Return the metric of every ended trial, the mean of its runs.

    A trial without a result has the metric of the start, if it is known.
    """
    # To leave out what diverged would reward an optimizer that is hard to tune.
    trials = by_number(run for run in candidate.trials if run.status in ENDED)
    means = [mean_metric(runs) for runs in trials.values()]
    if all(mean is None for mean in means):
        return []
    begin = start(study, "metric")
    return [begin if mean is None else mean for mean in means]


def expected_best(metrics: Sequence[float | None], higher_is_better: bool) -> list[float]:
    """Return the expected best metric of 1, 2, ... of these trials (Dodge et al. 2019).

    They are drawn without replacement. None is a trial that diverged or failed: it counts as the
    worst of the others. Empty if no trial has a metric.
    """
    known = sorted((metric for metric in metrics if metric is not None), reverse=higher_is_better)
    if not known:
        return []
    ranked = known + [known[-1]] * (len(metrics) - len(known))
    n = len(ranked)
    # The best of k has rank i if the others are among the n - 1 - i worse ones.
    return [
        sum(x * comb(n - 1 - i, k - 1) for i, x in enumerate(ranked)) / comb(n, k)
        for k in range(1, n + 1)
    ]
