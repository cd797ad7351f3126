"""The expected best metric against the number of trials: how much of a result is the search that found it."""

from collections.abc import Sequence
from math import comb


def expected_best(metrics: Sequence[float | None], higher_is_better: bool) -> list[float]:
    """Return the expected best metric of 1, 2, ... trials drawn from these without replacement (Dodge et al. 2019).

    None is a trial that diverged or failed: it counts as the worst of the others. Empty if no trial has a metric.
    """
    known = sorted((metric for metric in metrics if metric is not None), reverse=higher_is_better)
    if not known:
        return []
    ranked = known + [known[-1]] * (len(metrics) - len(known))
    n = len(ranked)
    # The best of k has rank i if the others are among the n - 1 - i worse ones.
    return [sum(x * comb(n - 1 - i, k - 1) for i, x in enumerate(ranked)) / comb(n, k) for k in range(1, n + 1)]
