"""The uncertainty of a search, from its own trials: how sharp the optimum is, and how the selection
would vary.

Learning rates are compared on a logarithmic axis. The tried rates are taken as they are: the gain
of the interpolated optimum shows how much they miss, and the resampled seeds show how much the
selection depends on chance.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, isclose, log
from statistics import fmean
from typing import Literal

import numpy as np

from .study import ENDED, Candidate, Run, by_number, finished, mean_metric

RATE = "optimizer.lr"
NEAR = 0.01
"""The distance from the best metric, as a share of it, up to which a trial is about as good."""
APART = 1.2
"""The factor between learning rates from which on a parabola joins them: the metrics of closer ones
differ by noise."""
MIN_SEARCH_SEEDS = 3
"""From which on a selection is resampled: two seeds have three resamples, two of which are one seed
alone."""
RESAMPLES, SEED = 2000, 0
"""Of the seeds: a share of 50% has a standard error of 1.1%."""
Profile = Mapping[float, float | None]
"""The metric by learning rate, in ascending order; None: a trial with this rate diverged or
failed."""


@dataclass(frozen=True)
class Reading:
    """The metric at a learning rate, interpolated between trials."""

    rate: float
    metric: float | None
    reason: Literal["", "not tried", "no result"] = ""
    """Why there is no metric: the rate lies outside of the tried ones, or beside one without a
    result."""


@dataclass(frozen=True)
class Optimum:
    """The vertex of a parabola: a prediction, not a run."""

    rate: float
    gain: float
    """Over the metric of the selected trial, not negative."""


@dataclass(frozen=True)
class Selection:
    """The selections of searches with resampled seeds."""

    shares: dict[int, float]
    """The share of the resamples that select a trial, by its number, the largest first."""
    variance: float
    """Of the selected trial's metric, which is that of all its seeds: another search, with other
    seeds and the same tried settings, would select another setting. Its degrees of freedom are at
    most the number of seeds less one."""


@dataclass(frozen=True)
class Tuning:
    """The search of one candidate."""

    candidate: Candidate
    rate: float | None
    """Of the selected trial; None: the search has no learning rate."""
    metric: float
    """Of the selected trial."""
    half: Reading | None
    """None, as `twice`: no other rate was tried with the selected trial's other settings."""
    twice: Reading | None
    optimum: Optimum | None
    num_near: int
    """Trials with a metric within NEAR of the best one."""
    num_trials: int
    selection: Selection | None


def tuning(candidate: Candidate, *, higher_is_better: bool) -> Tuning | None:
    """Return the numbers of a candidate's search; None without a second trial or without a
    result.
    """
    trials = _ended_trials(candidate)
    best = (
        mean_metric(trials.get(candidate.selected, ())) if candidate.selected is not None else None
    )
    if best is None or len(trials) < 2:
        return None
    metrics = [mean_metric(runs) for runs in trials.values()]
    along, rate = profile(candidate), rate_of(candidate.selected_trial)
    half = twice = optimum = None
    if rate is not None and len(along) > 1:
        half, twice = metric_at(along, rate / 2), metric_at(along, rate * 2)
        optimum = parabola(along, rate, higher_is_better=higher_is_better)
    return Tuning(
        candidate,
        rate,
        best,
        half,
        twice,
        optimum,
        num_near=sum(
            metric is not None and abs(metric - best) <= NEAR * abs(best) for metric in metrics
        ),
        num_trials=len(trials),
        selection=resampled_selection(candidate, higher_is_better=higher_is_better),
    )


def resampled_selection(candidate: Candidate, *, higher_is_better: bool) -> Selection | None:
    """Return the selections of searches whose seeds are drawn from the search's seeds with
    replacement.

    The unit of resampling is a seed of the whole search, whose runs share their batches, as a study
    is the unit in AlgoPerf's scores (Dahl et al. 2023). A trial is lost in a resample that has a
    seed at which it was lost. None with fewer than MIN_SEARCH_SEEDS seeds, or if every trial is
    lost at all seeds. With equal trials the variance is too large, at most that of a trial's mean:
    their metrics differ by chance (test_tuning.py).
    """
    trials = _ended_trials(candidate)
    seeds = sorted({run.seed for runs in trials.values() for run in runs})
    sign = -1.0 if higher_is_better else 1.0
    by_seed = [
        {run.seed: sign * run.metric for run in finished(runs) if run.metric is not None}
        for runs in trials.values()
    ]
    costs = np.array([[each.get(seed, np.inf) for seed in seeds] for each in by_seed])
    is_lost = ~np.isfinite(costs)
    if len(seeds) < MIN_SEARCH_SEEDS or is_lost.all():
        return None
    counts = np.random.default_rng(SEED).multinomial(
        len(seeds), [1 / len(seeds)] * len(seeds), size=RESAMPLES
    )
    # Not a product of matrices, whose rounding may differ between equal trials.
    totals = (counts[:, None] * np.where(is_lost, 0.0, costs)).sum(axis=2)
    totals[(counts[:, None] * is_lost).any(axis=2)] = np.inf
    selected = totals[np.isfinite(totals).any(axis=1)].argmin(axis=1)
    if not len(selected):
        return None
    means = [fmean(each.values()) if each else 0.0 for each in by_seed]
    numbers, shares = [*trials], np.bincount(selected, minlength=len(trials)) / len(selected)
    order = sorted(range(len(numbers)), key=lambda i: -shares[i])
    mean = sum(shares[i] * means[i] for i in order)
    variance = sum(shares[i] * (means[i] - mean) ** 2 for i in order)
    return Selection({numbers[i]: float(shares[i]) for i in order if shares[i]}, float(variance))


def profile(candidate: Candidate) -> Profile:
    """Return the metric by learning rate of the trials that have the selected trial's other
    settings.

    A key that equals the learning rate in all trials is not another setting. Trials of equal rates
    count as their mean.
    """
    selected = candidate.selected_trial
    if selected is None or rate_of(selected) is None:
        return {}
    trials = [(runs[0].parameters, mean_metric(runs)) for runs in _ended_trials(candidate).values()]
    others = {
        key: value
        for key, value in selected.parameters.items()
        if any(parameters.get(key) != parameters.get(RATE) for parameters, _ in trials)
    }
    by_rate: dict[float, list[float | None]] = {}
    for parameters, metric in trials:
        if parameters.get(RATE, 0) > 0 and all(
            parameters.get(key) == value for key, value in others.items()
        ):
            by_rate.setdefault(parameters[RATE], []).append(metric)
    return {
        rate: None if None in metrics else fmean(metrics)
        for rate, metrics in sorted(by_rate.items())
    }  # pyright: ignore[reportArgumentType]


def metric_at(along: Profile, rate: float) -> Reading:
    """Return the metric at a learning rate, linear in the logarithm of the rate between
    neighbouring trials.
    """
    rates = [*along]
    right = bisect_left(rates, rate * (1 - 1e-9))
    if right < len(rates) and isclose(rates[right], rate):
        metric = along[rates[right]]
    elif right in (0, len(rates)):
        return Reading(rate, None, "not tried")
    else:
        (low, high), (a, b) = (
            rates[right - 1 : right + 1],
            (along[each] for each in rates[right - 1 : right + 1]),
        )
        metric = None if a is None or b is None else a + (b - a) * log(rate / low) / log(high / low)
    return Reading(rate, metric, "no result" if metric is None else "")


def parabola(along: Profile, rate: float, *, higher_is_better: bool) -> Optimum | None:
    """Return the vertex of the parabola through the best trial and its neighbours on log rate.

    The neighbours are at least APART away. None at an end of the tried rates, if a trial up to the
    neighbours has no result, or if the three metrics are equal. If the metric is much worse on one
    side, the gain is too large.
    """
    sign = -1.0 if higher_is_better else 1.0
    lower, upper = (
        [each for each in along if each <= rate / APART],
        [each for each in along if each >= rate * APART],
    )
    if not lower or not upper:
        return None
    costs = {each: metric for each, metric in along.items() if lower[-1] <= each <= upper[0]}
    below, middle, above = (costs[each] for each in (lower[-1], rate, upper[0]))
    if below is None or middle is None or above is None or None in costs.values():
        return None
    # The cost minus that of the best rate is a x^2 + b x, with x = log(rate / best rate).
    u, w = log(lower[-1] / rate), log(upper[0] / rate)
    fall, rise = sign * (below - middle), sign * (above - middle)
    if min(fall, rise) < 0 or max(fall, rise) == 0:
        return None
    a = (rise / w - fall / u) / (w - u)
    b = fall / u - a * u
    return Optimum(rate * exp(-b / (2 * a)), b**2 / (4 * a))


def rate_of(run: Run | None) -> float | None:
    """Return a run's searched learning rate; None if it was not searched."""
    rate = run.parameters.get(RATE) if run else None
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def _ended_trials(candidate: Candidate) -> dict[int, list[Run]]:
    trials = by_number(candidate.trials)
    return {
        number: runs for number, runs in trials.items() if all(run.status in ENDED for run in runs)
    }
