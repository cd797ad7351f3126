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

    Raises UserError, naming the column, where the two were not asked the same.
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
    """Mean of the differences and its 95% interval, in percent; the points lie in [0, 1].

    Right-or-wrong answers get Bonett and Price's interval (2012): the normal one with one pair more for each model,
    which does not shrink to nothing where every question changed alike. Other points get the normal interval.
    """
    each = [y - x for x, y in zip(first, later, strict=True)]
    mean = statistics.fmean(each)
    if {*first, *later} <= {0.0, 1.0}:
        n = len(each) + 2
        won, lost = (each.count(1.0) + 1) / n, (each.count(-1.0) + 1) / n
        middle, margin = won - lost, Z95 * sqrt((won + lost - (won - lost) ** 2) / n)
    else:
        middle, margin = mean, Z95 * statistics.stdev(each) / sqrt(len(each)) if len(each) > 1 else 2.0
    low, high = max(middle - margin, -1.0), min(middle + margin, 1.0)
    return {"value": 100 * mean, "low": 100 * low, "high": 100 * high}
