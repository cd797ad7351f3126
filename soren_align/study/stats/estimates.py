"""A mean difference over seeds and questions, both random and crossed: its interval and its p-value.

The difference of a candidate on question q after the run with seed s is

    d[s, q] = effect + seed[s] + question[q] + residual[s, q]

The variance of its mean has a part of the seeds, which also holds residual / (S Q), and a part of the questions, which
holds residual / (S Q) too; the sum of both, less residual / (S Q), is its variance. With three seeds the first part has
few degrees of freedom: a bootstrap of seeds, or Satterthwaite's approximation, finds a difference far too often
(docs/comparison.md, "Statistics").

The minimum detectable effect is the true difference that a study answers with "better" with the declared power.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
from scipy.optimize import brentq
from scipy.special import nctdtrinc, stdtrit

from ...evaluate.stats.paired import (
    Paired,
    clustered_error,
    is_right_or_wrong,
    least_p,
    num_changed,
    without_equal_clusters,
)

Real = float | np.ndarray
"""One study's, or those of many simulated studies."""
SMALLEST_P = 1e-12
"""Beyond it a p-value depends on the tail of a model that was not checked."""
FAMILY_ERROR = 0.05
"""The probability of any wrong "better", "worse" or "retained" in a study."""
DRAWS, SEED = 10_000, 0
"""Simulated studies for a minimum detectable effect: 1% of it is the error."""
TINY = 1e-300
"""Added to denominators that are 0 if all seeds gave the same."""


@dataclass(frozen=True)
class Part:
    """A part of a variance, as estimated with so many degrees of freedom."""

    variance: Real
    degrees: Real

    def at(self, alpha: float) -> Real:
        """Return the square of the margin of a two-sided interval if there was only this part."""
        return stdtrit(self.degrees, alpha / 2) ** 2 * self.variance


NOTHING = Part(0.0, 1.0)


@dataclass(frozen=True)
class Spread:
    """The variance of a mean difference, in its parts."""

    seeds: Part
    questions: Part = NOTHING
    residual: Part = NOTHING
    """Counted in both."""

    @property
    def variance(self) -> Real:
        """Of the mean difference."""
        return self.questions.variance + np.maximum(self.seeds.variance - self.residual.variance, 0.0)

    @property
    def degrees(self) -> Real:
        """Satterthwaite's degrees of freedom of the variance."""
        parts = (self.seeds, self.questions, self.residual)
        return self.variance**2 / sum(part.variance**2 / part.degrees for part in parts)

    def margin(self, alpha: float) -> Real:
        """Return half of the width of the 1 - alpha interval.

        Each part has Student's quantile for its own degrees of freedom (Cochran 1964), which is conservative.
        """
        return np.sqrt(self.questions.at(alpha) + np.maximum(self.seeds.at(alpha) - self.residual.at(alpha), 0.0))


@dataclass(frozen=True)
class Estimate:
    """A mean difference. Positive: the candidate's is larger."""

    value: float
    spread: Spread
    least_p: float = SMALLEST_P
    """Of so few questions that changed."""

    def p(self, null: float = 0.0) -> float:
        """Return the two-sided p-value of the hypothesis that the true difference is `null`."""
        distance = abs(self.value - null)
        if distance == 0 or self.spread.variance == 0:  # no spread at all is no evidence
            return 1.0

        def excess(log_alpha: float) -> float:
            return float(self.spread.margin(exp(log_alpha))) - distance

        lowest = log(SMALLEST_P)
        p = SMALLEST_P if excess(lowest) <= 0 else exp(float(brentq(excess, lowest, 0.0, xtol=1e-3)))  # pyright: ignore[reportArgumentType]
        return max(p, self.least_p)

    def p_above(self, null: float) -> float:
        """Return the one-sided p-value of the hypothesis that the true difference is at most `null`."""
        p = self.p(null)
        return p / 2 if self.value > null else 1 - p / 2


def seeds_part(scores: np.ndarray, candidate: int, reference: int | None) -> Part:
    """Return the part of the seeds in the variance of a candidate's mean, or of its difference to the reference.

    scores: [..., candidates, seeds], with the same seeds for all candidates.
    The variance is estimated from all candidates together, as in an analysis of variance with blocks, because two
    degrees of freedom of one candidate's three runs would find nothing after Holm's correction. If the candidates'
    spreads differ, its degrees of freedom shrink (Huynh and Feldt 1976), and the candidate's own variance counts if it
    is larger.
    """
    count, num_seeds = scores.shape[-2:]
    own = scores[..., candidate, :] - (0.0 if reference is None else scores[..., reference, :])
    own_variance, f = own.var(axis=-1, ddof=1), num_seeds - 1
    if count == 1:
        return Part(own_variance / num_seeds, f)
    blocks = scores.mean(axis=-2, keepdims=True)
    interaction = scores - scores.mean(axis=-1, keepdims=True) - blocks + scores.mean(axis=(-2, -1), keepdims=True)
    within = (interaction**2).sum(axis=(-2, -1)) / ((count - 1) * f)
    if reference is None:
        between, within = blocks.var(axis=(-2, -1), ddof=1), within * (count - 1) / count
    else:
        between, within = 0.0 * within, 2 * within
    pooled = between + within
    inverse = (between**2 + within**2 / (count - 1)) / f + TINY
    # The share of the degrees of freedom that the candidates' unequal variances leave, in (0, 1].
    variances = scores.var(axis=-1, ddof=1)
    squares = (variances**2).sum(axis=-1) * (num_seeds - 1) / (num_seeds + 1)  # unbiased for normal scores
    epsilon = np.minimum(variances.sum(axis=-1) ** 2 / (variances.shape[-1] * squares + TINY), 1.0)
    degrees = np.maximum(epsilon * pooled**2 / inverse, f)
    return Part(np.maximum(own_variance, pooled) / num_seeds, degrees)


def estimate(columns: list[Paired], seeds: Part) -> Estimate:
    """Return the mean over columns of the mean difference.

    columns: their differences [seeds, questions], as fractions. seeds: the part of the seeds in the mean's variance.
    """
    count = len(columns)
    value = float(np.mean([column.each.mean() for column in columns]))
    questions, residual = [], []
    for column in columns:
        num_seeds, of_questions = len(column.each), column.each.mean(axis=0)
        part = _part(Paired(of_questions, column.clusters), smooth=is_right_or_wrong(column.each))
        residuals = [_part(Paired(row - of_questions, column.clusters)).variance for row in column.each]
        questions.append(part)
        residual.append(Part(sum(residuals) / ((num_seeds - 1) * num_seeds), part.degrees * (num_seeds - 1)))
    total_changed = sum(num_changed(Paired(column.each.mean(axis=0), column.clusters)) for column in columns)
    spread = Spread(seeds, _mean(questions, count), _mean(residual, count))
    return Estimate(value, spread, max(least_p(total_changed), SMALLEST_P))


def _part(column: Paired, smooth: bool = False) -> Part:
    """Return the variance of a mean over questions. smooth: as if each model had won one more (Bonett, Price 2012)."""
    column = without_equal_clusters(column)
    each = column.each
    if clustered := clustered_error(column):
        return Part(clustered[0] ** 2, clustered[1])
    n = len(each) + 2 * smooth
    if n == 1:
        return NOTHING
    squares = float((each**2).sum()) + 2 * smooth - float(each.sum()) ** 2 / n
    return Part(squares / (n * n if smooth else n * (n - 1)), n - 1)


def _mean(parts: Sequence[Part], count: int) -> Part:
    """Return the part of a mean over independent columns, with Satterthwaite's degrees of freedom."""
    variance = sum(part.variance for part in parts) / count**2
    if variance == 0:
        return parts[0]
    degrees = variance**2 / sum((part.variance / count**2) ** 2 / part.degrees for part in parts)
    return Part(variance, degrees)


def detectable(spread: Spread, comparisons: int, power: float) -> float:
    """Return the true difference that such a study finds with this power, at Holm's first threshold."""
    if spread.variance == 0:
        return 0.0
    error = float(np.sqrt(spread.variance))
    threshold = float(spread.margin(FAMILY_ERROR / comparisons)) / error
    return error * float(nctdtrinc(spread.degrees, 1 - power, threshold))


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """Assumptions about runs that do not exist yet. Scores are in percent."""

    changed_by_training: float = 0.10
    """Share of the answers that differ between the starting checkpoint and a run."""
    changed_by_optimizer: float = 0.08
    """Share of the answers that differ between two runs of different optimizers."""
    changed_by_seed: float = 0.06
    """Share of the answers that differ between two runs of one optimizer."""
    seed_sd: float = 0.5
    """Standard deviation of a score over seeds."""
    loss_sd: float = 0.01
    """Standard deviation of the held-out metric over seeds."""
    cluster_correlation: float = 0.02
    """Of the changes of two questions of one cluster."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """The size of a study."""

    candidates: int
    seeds: int
    comparisons: int
    """All of the study, see `num_comparisons`."""
    power: float = 0.8


def num_comparisons(candidates: int, measures: int, retention_columns: int = 0, *, all_pairs: bool = False) -> int:
    """Return the size of the family. measures: the columns, their average if the suite has one, the held-out metric.

    all_pairs: every candidate is compared with every other, and not all with one.
    """
    pairs = candidates * (candidates - 1) // 2 if all_pairs else candidates - 1
    return (candidates + pairs) * measures + candidates * retention_columns


def minimum_detectable(
    design: Design, assumed: Assumed, questions: int, cluster_sizes: Sequence[int] = (), *, to_base: bool
) -> float:
    """Return the minimum detectable effect on a column, in percent.

    cluster_sizes: the number of questions of each cluster; empty: they are independent. to_base: of a candidate's
    difference to the starting checkpoint; else to another candidate.
    """
    effective = questions**2 / sum(size**2 for size in cluster_sizes) if cluster_sizes else questions
    inflation = 1 + (questions / effective - 1) * assumed.cluster_correlation
    by_seed = assumed.changed_by_seed * (0.5 if to_base else 1.0)  # one of the two differs from itself only
    changed = max(assumed.changed_by_training if to_base else assumed.changed_by_optimizer, by_seed)
    residual = by_seed * inflation / questions / design.seeds
    of_questions = (changed - by_seed) * inflation / questions
    return 100 * _effect(design, assumed.seed_sd / 100, to_base, of_questions, residual, effective - 1)


def minimum_detectable_loss(design: Design, assumed: Assumed, *, to_base: bool) -> float:
    """Return the minimum detectable effect on the held-out metric, in its unit."""
    return _effect(design, assumed.loss_sd, to_base)


def _effect(
    design: Design,
    seed_sd: float,
    to_base: bool,
    of_questions: float = 0.0,
    residual: float = 0.0,
    degrees: float = 1.0,
) -> float:
    """Return the true difference that simulated studies find with the design's power.

    seed_sd: of a score on the given questions. of_questions, residual: parts of the variance of the mean difference.
    """
    rng = np.random.default_rng(SEED)
    scores = seed_sd * rng.standard_normal((DRAWS, design.candidates, design.seeds))
    reference = None if to_base else 1
    error = scores[:, 0].mean(axis=1) - (0.0 if to_base else scores[:, 1].mean(axis=1))
    error += sqrt(of_questions) * rng.standard_normal(DRAWS)

    def estimated(variance: float, f: float) -> Part:
        return Part(variance * rng.chisquare(f, DRAWS) / f, f)

    spread = Spread(
        seeds_part(scores, 0, reference),
        estimated(of_questions + residual, degrees),
        estimated(residual, degrees * (design.seeds - 1)),
    )
    threshold = spread.margin(FAMILY_ERROR / design.comparisons)
    return float(np.quantile(threshold - error, design.power))
