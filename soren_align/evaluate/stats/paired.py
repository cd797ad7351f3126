"""Paired differences: standard errors, clustered or not, and p-values of many tests. Neither torch nor lm-eval.

Questions differ in difficulty more than models do, so models are compared question by question.
"""

import statistics
from math import sqrt
from typing import NamedTuple

import numpy as np
from scipy.stats import t

Z95 = statistics.NormalDist().inv_cdf(0.975)
EQUAL = 1e-12
"""Of numbers that differ by less, relative to their size, the difference is rounding."""
MODELS_OWN = {
    "generation_config": "generation config {1} instead of {0}",
    "chat_template": "prompts with and without a chat template",
    "bos": "prompts with and without a BOS token",
}
"""Settings that come with a model, with the reason if they differ. All others are equal for all rows of a table."""


class Paired(NamedTuple):
    """The differences of a column's points, later - first, and the cluster of each question; None: independent."""

    each: np.ndarray
    clusters: np.ndarray | None = None


def t95(degrees: float) -> float:
    """Return Student's quantile for a two-sided 95% interval: 12.7 for 1 degree of freedom, 1.963 for 816 (Z95)."""
    return float(t.ppf(0.975, degrees)) if degrees > 0 else Z95


def holm(p: list[float]) -> list[float]:
    """Return the p-values after Holm's correction, in the same order."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = largest
    return corrected


def is_right_or_wrong(each: np.ndarray) -> bool:
    """Whether these are differences of points that are 0 or 1."""
    return bool(np.isin(each, (-1.0, 0.0, 1.0)).all())


def num_changed(column: Paired) -> int:
    """Return the number of independent observations that are not 0: clusters, or questions."""
    if column.clusters is not None and column.clusters.max() > 0:
        return int(np.count_nonzero(np.bincount(column.clusters, column.each)))
    return int(np.count_nonzero(column.each))


def least_p(num_changed: int) -> float:
    """The least p of a sign-flip test on so many observations that changed. Other tests' are too small for very few."""
    return min(1.0, 2.0 ** (1 - num_changed))


def clustered_error(column: Paired) -> tuple[float, float] | None:
    """Return the standard error of a mean over clustered questions and its degrees of freedom; None without clusters.

    The sum of a cluster's deviations counts as one observation (Miller 2024, "Adding error bars to evals"), with the
    factor that corrects the bias of few clusters (Bell and McCaffrey 2002, CR2). The degrees of freedom are Kish's
    effective number of clusters less one: with one less than their number, an interval on MMLU's sizes covers 94.2%.
    """
    if column.clusters is None:
        return None
    n, sizes = len(column.each), np.bincount(column.clusters)
    if len(sizes) == 1:
        return None
    sums = np.bincount(column.clusters, column.each - column.each.mean())
    error = sqrt((sums**2 / (1 - sizes / n)).sum()) / n
    return error, n**2 / (sizes**2).sum() - 1


def without_equal_clusters(column: Paired) -> Paired:
    """Return a column whose clusters all changed alike as one observation per cluster; any other column unchanged.

    The spread between such clusters, 0, is no estimate of an error; counted as questions they would be too certain.
    """
    result, mean = clustered_error(column), float(column.each.mean())
    if result is None or result[0] > EQUAL * abs(mean) or mean == 0:
        return column
    assert column.clusters is not None
    return Paired(np.full(int(column.clusters.max()) + 1, mean))
