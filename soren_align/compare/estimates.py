"""A mean difference over seeds and questions, both random and crossed: its interval and its p-value.

The difference of a candidate on question q after the run with seed s is

    d[s, q] = effect + seed[s] + question[q] + rest[s, q]

so that the variance of its mean has a part of the seeds (which also holds rest / (S Q)), a part of the questions (which
holds rest / (S Q) too), less rest / (S Q), which was counted twice. With three seeds the first part has few degrees of
freedom, and a bootstrap of seeds or Satterthwaite's approximation says "better" far too often
(docs/comparison.md, "Statistics").
"""

from dataclasses import dataclass
from math import exp, sqrt

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtrit

from ..evaluate.paired import Paired, clustered_error, is_right_or_wrong, least_p

SMALLEST_P = 1e-12
"""Beyond it a p-value depends on the tail of a model that nobody has checked."""


@dataclass(frozen=True)
class Part:
    """A part of a variance, as estimated with so many degrees of freedom."""

    variance: float
    degrees: float

    def at(self, alpha: float) -> float:
        """Return the square of the margin of a two-sided interval if there was only this part."""
        return self.variance and float(stdtrit(self.degrees, 1 - alpha / 2)) ** 2 * self.variance


NOTHING = Part(0.0, 1.0)


@dataclass(frozen=True)
class Estimate:
    """A mean difference and the parts of its variance. Positive: the candidate's is larger."""

    value: float
    seeds: Part
    questions: Part = NOTHING
    rest: Part = NOTHING
    """Counted in both."""
    least_p: float = SMALLEST_P
    """Of so few questions that changed."""

    @property
    def variance(self) -> float:
        """Of the mean difference."""
        return self.questions.variance + max(self.seeds.variance - self.rest.variance, 0.0)

    @property
    def degrees(self) -> float:
        """Satterthwaite's degrees of freedom of the variance."""
        parts = (self.seeds, self.questions, self.rest)
        return self.variance**2 / sum(part.variance**2 / part.degrees for part in parts)

    def margin(self, alpha: float) -> float:
        """Return half of the width of the 1 - alpha interval.

        Each part has Student's quantile for its own degrees of freedom (Cochran 1964), which is conservative.
        """
        return sqrt(self.questions.at(alpha) + max(self.seeds.at(alpha) - self.rest.at(alpha), 0.0))

    def p(self, null: float = 0.0) -> float:
        """Return the two-sided p-value of the hypothesis that the true difference is `null`."""
        distance = abs(self.value - null)
        if distance == 0 or self.variance == 0:  # no spread at all is no evidence
            return 1.0

        def excess(log_alpha: float) -> float:
            return self.margin(exp(log_alpha)) - distance

        lowest = float(np.log(SMALLEST_P))
        p = SMALLEST_P if excess(lowest) <= 0 else exp(brentq(excess, lowest, 0.0, xtol=1e-6))
        return max(p, self.least_p)

    def p_below(self, null: float) -> float:
        """Return the one-sided p-value of the hypothesis that the true difference is at most `null`."""
        p = self.p(null)
        return p / 2 if self.value > null else 1 - p / 2


def seeds_part(scores: np.ndarray, candidate: int, reference: int | None) -> Part:
    """Return the part of the seeds in the variance of a candidate's mean, or of its difference to the reference.

    scores: [candidates, seeds], with the same seeds for all.
    The variance is estimated from all candidates together, as in an analysis of variance with blocks, because two
    degrees of freedom of one candidate's three runs would find nothing after Holm's correction. If the candidates'
    spreads differ, its degrees of freedom shrink (Huynh and Feldt 1976), and the candidate's own variance counts if it
    is larger.
    """
    count, num_seeds = scores.shape
    own = scores[candidate] - (0.0 if reference is None else scores[reference])
    own_variance, f = float(own.var(ddof=1)), num_seeds - 1
    if count == 1:
        return Part(own_variance / num_seeds, f)
    of_seeds = scores.mean(axis=0)
    rest = scores - scores.mean(axis=1, keepdims=True) - of_seeds + scores.mean()
    between, within = float(of_seeds.var(ddof=1)), float((rest**2).sum()) / ((count - 1) * f)
    if reference is None:
        variances, degrees = np.array([between, within * (count - 1) / count]), np.array([f, (count - 1) * f])
    else:
        variances, degrees = np.array([2 * within]), np.array([(count - 1) * f])
    pooled = float(variances.sum())
    if pooled == 0:
        return Part(0.0, f)
    effective = _epsilon(scores.var(axis=1, ddof=1), num_seeds) * pooled**2 / float((variances**2 / degrees).sum())
    return Part(max(own_variance, pooled) / num_seeds, max(effective, f))


def _epsilon(variances: np.ndarray, num_seeds: int) -> float:
    """Return the share of the degrees of freedom that the candidates' unequal variances leave, in (0, 1]."""
    squares = float((variances**2).sum()) * (num_seeds - 1) / (num_seeds + 1)  # unbiased for normal scores
    return min(float(variances.sum()) ** 2 / (len(variances) * squares), 1.0) if squares else 1.0


def estimate(columns: list[Paired], seeds: Part) -> Estimate:
    """Return the mean over columns of the mean difference.

    columns: their differences [seeds, questions], as fractions. seeds: the part of the seeds in the mean's variance.
    """
    count = len(columns)
    value = float(np.mean([column.each.mean() for column in columns]))
    questions, rest = zip(*(_question_parts(column) for column in columns), strict=True)
    num_changed = sum(_num_changed(column) for column in columns)
    return Estimate(value, seeds, _mean(questions, count), _mean(rest, count), max(least_p(num_changed), SMALLEST_P))


def _question_parts(column: Paired) -> tuple[Part, Part]:
    """Return the part of the questions, and of the rest."""
    num_seeds = len(column.each)
    of_questions = column.each.mean(axis=0)
    questions = _part(Paired(of_questions, column.clusters), smooth=is_right_or_wrong(column.each))
    residuals = [_part(Paired(row - of_questions, column.clusters)) for row in column.each]
    variance = sum(part.variance for part in residuals) / ((num_seeds - 1) * num_seeds)
    return questions, Part(variance, questions.degrees * (num_seeds - 1))


def _part(column: Paired, smooth: bool = False) -> Part:
    """Return the variance of a mean over questions. smooth: as if each model had won one more (Bonett, Price 2012)."""
    each = column.each
    if clustered := clustered_error(column):
        return Part(clustered[0] ** 2, clustered[1])
    n = len(each) + 2 * smooth
    if n == 1:
        return NOTHING
    squares = float((each**2).sum()) + 2 * smooth - float(each.sum()) ** 2 / n
    return Part(squares / (n * n if smooth else n * (n - 1)), n - 1)


def _mean(parts: tuple[Part, ...], count: int) -> Part:
    """Return the part of a mean over independent columns, with Satterthwaite's degrees of freedom."""
    variance = sum(part.variance for part in parts) / count**2
    if variance == 0:
        return parts[0]
    degrees = variance**2 / sum((part.variance / count**2) ** 2 / part.degrees for part in parts)
    return Part(variance, degrees)


def _num_changed(column: Paired) -> int:
    """Return the number of independent observations that are not 0."""
    of_questions = column.each.mean(axis=0)
    if column.clusters is not None and column.clusters.max() > 0:
        return int(np.count_nonzero(np.bincount(column.clusters, of_questions)))
    return int(np.count_nonzero(of_questions))
