"""Compute the numbers for the figures and tables of a report.

Curves are means over seeds. The expected best metric of so many trials shows how much of a result
is the search that found it.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import comb, isfinite
from statistics import fmean, median

from ...run.metrics import IN_STUDIES
from ..study import ENDED, Candidate, Point, Run, Study, by_number, finished, mean_metric

MAX_POINTS = 200
"""Of a drawn curve: more cannot be seen in a small panel."""
AT_START = {
    "step",
    "tokens",
    "seconds",
    *(metric.key for metric in IN_STUDIES if metric.at_start == 0),
}
"""Quantities that are 0 at the start, measured or not."""
Curve = list[tuple[float, float]]


def value_of(point: Point, key: str) -> float | None:
    """Return a quantity of a point; None if it was not measured or is not finite."""
    value = getattr(point, key)
    value = value if value is not None and isfinite(value) else None
    return 0.0 if value is None and point.step == 0 and key in AT_START else value


def start(study: Study, key: str) -> float | None:
    """Return a quantity of the starting checkpoint, by any run that measured it at step 0."""
    runs = [
        run for candidate in study.candidates for run in (*candidate.verdict, *candidate.trials)
    ]
    values = (value_of(point, key) for run in runs for point in run.curve if point.step == 0)
    return next((value for value in values if value is not None), None)


def shown_runs(candidate: Candidate) -> list[Run]:
    """Return the runs whose curves are shown: the verdict's, and before there are any the selected
    trial.
    """
    trial = candidate.selected_trial
    return finished(candidate.verdict) or finished([trial] if trial else [])


def cpu_loads(study: Study) -> list[float]:
    """Return the loads of the machine's CPUs that the shown runs were trained under; none of runs
    on GPUs.
    """
    return [
        run.load
        for candidate in study.candidates
        for run in shown_runs(candidate)
        if run.load is not None
    ]


def are_times_comparable(loads: Sequence[float]) -> bool:
    """Return whether loads of CPUs were about equal."""
    return not loads or max(loads) <= max(1.25 * min(loads), min(loads) + 0.5)


def curve(run: Run, x: str, y: str) -> Curve:
    """Return the points of a run where both quantities were measured."""
    pairs = [(value_of(point, x), value_of(point, y)) for point in run.curve]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def mean_curve(runs: Sequence[Run], x: str, y: str) -> Curve:
    """Return the means over runs of both quantities, at the steps that all runs have."""
    curves = [{point.step: point for point in run.curve} for run in runs]
    if not curves:
        return []
    points = []
    for step in sorted(set.intersection(*map(set, curves))):
        a = [value_of(each[step], x) for each in curves]
        b = [value_of(each[step], y) for each in curves]
        if None not in a and None not in b:
            points.append((fmean(a), fmean(b)))  # pyright: ignore[reportArgumentType]
    return points


def thin(points: Curve) -> Curve:
    """Return at most MAX_POINTS of the points, the first and the last among them."""
    if len(points) <= MAX_POINTS:
        return points
    return [points[round(i * (len(points) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]


def interpolate(run: Run, along: str, level: float, key: str) -> float | None:
    """Return a quantity of a run where it first reaches a level of another (a displacement), linear
    between points.
    """
    for (x0, y0), (x1, y1) in pairwise(curve(run, along, key)):
        if x0 <= level <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (level - x0) / (x1 - x0)
    return None


def common_level(study: Study, along: str) -> float | None:
    """Return the largest displacement (or KL) that every shown run reaches; None without two
    candidates.
    """
    tops = [
        max((x for x, _ in curve(run, along, "metric")), default=0.0)
        for candidate in study.candidates
        for run in shown_runs(candidate)
    ]
    num = sum(bool(shown_runs(candidate)) for candidate in study.candidates)
    return min(tops) if num > 1 and min(tops) > 0 else None


def focus(values: Sequence[float], higher_is_better: bool) -> tuple[float, float] | None:
    """Return the part of an axis where values differ: from the best to four times the median's
    distance from it.

    None without two values. Worse values are cut off: the first losses of a run would hide all
    differences at its end.
    """
    values = [value for value in values if isfinite(value)]
    if len(values) < 2:
        return None
    sign = -1.0 if higher_is_better else 1.0
    costs = sorted(sign * value for value in values)
    top = min(costs[-1], costs[0] + 4 * (median(costs) - costs[0]))
    top = top if top > costs[0] else costs[-1]
    room = 0.06 * (top - costs[0]) or 0.01 * abs(top) or 1.0
    low, high = sorted((sign * (costs[0] - room), sign * (top + room)))
    return low, high


def trial_metrics(study: Study, candidate: Candidate) -> list[float | None]:
    """Return the metric of every ended trial, the mean of its runs; of a lost one that of the
    start, if it is known.
    """
    trials = by_number(run for run in candidate.trials if run.status in ENDED)
    means = [mean_metric(runs) for runs in trials.values()]
    begin = start(study, "metric")
    return (
        [begin if mean is None else mean for mean in means]
        if any(mean is not None for mean in means)
        else []
    )


def expected_best(metrics: Sequence[float | None], higher_is_better: bool) -> list[float]:
    """Return the expected best metric of 1, 2, ...
    trials drawn from these without replacement (Dodge et al. 2019).

    None is a trial that diverged or failed: it counts as the worst of the others. Empty if no trial
    has a metric.
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
