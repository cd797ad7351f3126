"""A score with its standard error and its 95% interval, from the points of each question.
Neither torch nor lm-eval.
"""

import statistics
from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np

from .paired import EQUAL, Z95, Paired, cluster_numbers, t95


def score_points(
    points: Sequence[Sequence[float]], labels: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Return the score over all questions of a column's tasks, in percent.
    labels: as in `score_column`.

    The standard error is lm-eval's. The 95% interval is Wilson's if answers are right or wrong:
    four wrong answers of four do not prove 0.0 ± 0.0. Otherwise it is Student's t, which is wider
    than the normal interval for few questions.

    With clusters, error and interval are those of an effective number of independent questions: as
    many as would have the clustered error (CR2) of `Paired`, but never more than there are. If the
    clusters show no spread, as at 0% and 100%, it is Kish's effective number of clusters: as if all
    questions of a cluster were answered alike.
    """
    parts = [np.asarray(p, float) for p in points]
    sizes = [len(p) for p in parts]
    every = np.concatenate(parts)
    value, n = statistics.fmean(every), len(every)
    numbers = None if labels is None else cluster_numbers(labels)
    # The clustered error is turned into a number of independent questions, since Wilson's interval
    # needs a count; never more than there are, because clusters add no information.
    if clustered := Paired(every, numbers).clustered_error():
        error, degrees = clustered
        variance = float(every.var())
        effective = min(variance / error**2, n) if error > EQUAL else degrees + 1
        stderr, quantile = sqrt(variance / effective), t95(degrees)
    else:
        errors = [statistics.stdev(p) / sqrt(len(p)) if len(p) > 1 else 0.0 for p in parts]
        stderr = errors[0]
        # lm-eval's pooled_sample_stderr; a --limit of 1 leaves no degrees of freedom
        if len(parts) > 1:
            pooled = sum(
                (size - 1) * error**2 * size for size, error in zip(sizes, errors, strict=True)
            )
            stderr = sqrt(pooled / (n - len(parts)) / n) if n > len(parts) else 0.0
        effective, quantile = n, t95(n - len(parts))
    if np.isin(every, (0.0, 1.0)).all():
        low, high = _wilson(value, effective, quantile if clustered else Z95)
    else:
        low = max(value - quantile * stderr, min(0.0, every.min()))
        high = min(value + quantile * stderr, 1.0)
    return {
        "value": 100 * value,
        "stderr": 100 * stderr,
        "low": 100 * low,
        "high": 100 * high,
        "n": n,
    }


def _wilson(share: float, n: float, quantile: float) -> tuple[float, float]:
    """Return Wilson's interval of a share of n answers (1927).
    Also for n that is no whole number.
    """
    weight = n / (n + quantile**2)
    middle = weight * share + (1 - weight) / 2
    # The second term keeps the width positive at 0% and 100%, where the answers show no spread.
    half = sqrt(weight * (1 - weight) * share * (1 - share) + ((1 - weight) / 2) ** 2)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def average(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the plain mean of independent scores."""
    value = statistics.fmean(s["value"] for s in scores)
    stderr = sqrt(sum(s["stderr"] ** 2 for s in scores)) / len(scores)
    return {
        "value": value,
        "stderr": stderr,
        "low": value - Z95 * stderr,
        "high": value + Z95 * stderr,
    }
