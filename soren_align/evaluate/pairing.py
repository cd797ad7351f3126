"""Two models, the same questions: how much better is the second, and how sure is that?

Questions differ in difficulty more than models do, so the difference is taken question by question. Answers to
different prompts are never compared.
"""

import statistics
from math import sqrt

from ..recipe import UserError
from .harness import Answers

Z95 = statistics.NormalDist().inv_cdf(0.975)


def differences(first: tuple[str, Answers], later: tuple[str, Answers]) -> dict[str, dict[str, float]]:
    """By column, `later` minus `first` in percent: {"value", "low", "high"}, a 95% interval.

    The interval is the normal one around the mean of the paired differences. Raises UserError, naming the column,
    where the two were not asked the same.
    """
    (first_name, a), (later_name, b) = first, later
    for key, value in a.settings.items():
        if b.settings[key] != value:
            raise UserError(
                f"{later_name} was asked with {key} = {b.settings[key]}, {first_name} with {value}:"
                " their scores do not compare"
            )
    for column, prompts in a.prompts.items():
        if b.prompts[column] != prompts:
            raise UserError(
                f"{column}: {later_name} was asked in other words than {first_name} (another chat template?):"
                " their scores do not compare"
            )
    return {column: paired(a.points[column], b.points[column]) for column in a.points}


def paired(first: list[float], later: list[float]) -> dict[str, float]:
    """Mean of the differences and its 95% interval, in percent."""
    each = [100 * (y - x) for x, y in zip(first, later, strict=True)]
    mean = statistics.fmean(each)
    margin = Z95 * statistics.stdev(each) / sqrt(len(each)) if len(each) > 1 else float("inf")
    return {"value": mean, "low": mean - margin, "high": mean + margin}
