"""The mean difference of two optimizers with its uncertainty, over seeds and questions, and what a
study can detect.

Seeds and questions are random and crossed: the difference of a candidate on question q after the
run with seed s is

    d[s, q] = effect + seed[s] + question[q] + residual[s, q]

The variance of its mean has a part of the seeds, which also holds residual / (S Q), and a part of
the questions, which holds residual / (S Q) too; the sum of both, less residual / (S Q), is its
variance. A held-out example is a question whose score is a loss.

Each comparison has the spread of its own runs. A spread pooled over all optimizers has more degrees
of freedom, but a single optimizer with another spread then makes wrong answers frequent, and one
noisy optimizer hides the differences of all others (research/studies/statistics.md has the
simulations).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any

import numpy as np
from scipy.optimize import brentq

from ..evaluate.stats.paired import EQUAL, Paired, least_p
from ..evaluate.stats.power import FAMILY_ERROR, NOTHING, Part, Real, detectable, mean_part, part_of

SMALLEST_P = 1e-12
"""Beyond it a p-value depends on the tail of a model that was not checked."""
DRAWS, SEED = 10_000, 0
"""Simulated studies for a minimum detectable effect: 1% of it is the error."""


@dataclass(frozen=True)
class Spread:
    """The variance of a mean difference, in its parts."""

    seeds: Part
    questions: Part = NOTHING
    residual: Part = NOTHING
    """Counted in both."""

    @property
    def variance(self) -> Real:
        """The variance of the mean difference."""
        of_seeds = np.maximum(self.seeds.variance - self.residual.variance, 0.0)
        return self.questions.variance + of_seeds

    @property
    def seed_share(self) -> float:
        """The share of the variance that the seeds cause."""
        others, variance = float(self.questions.variance), float(self.variance)
        return 1 - others / variance if variance else 0.0

    @property
    def degrees(self) -> Real:
        """Satterthwaite's degrees of freedom of the variance."""
        parts = (self.seeds, self.questions, self.residual)
        return self.variance**2 / sum(part.variance**2 / part.degrees for part in parts)

    def margin(self, alpha: float) -> Real:
        """Return half of the width of the 1 - alpha interval.

        Each part has Student's quantile for its own degrees of freedom (Cochran 1964), which is
        conservative.
        """
        of_seeds = np.maximum(self.seeds.at(alpha) - self.residual.at(alpha), 0.0)
        return np.sqrt(self.questions.at(alpha) + of_seeds)


@dataclass(frozen=True)
class Estimate:
    """A mean difference. Positive: the candidate's is larger."""

    value: float
    spread: Spread
    least_p: float = SMALLEST_P
    """The least p of so few questions that changed."""

    @property
    def has_spread(self) -> bool:
        """Whether the runs differ by more than rounding: no spread at all is no evidence."""
        return float(self.spread.variance) > (EQUAL * self.value) ** 2

    def p(self, null: float = 0.0) -> float:
        """Return the two-sided p-value of the hypothesis that the true difference is `null`."""
        distance = abs(self.value - null)
        if distance == 0 or not self.has_spread:
            return 1.0

        def excess(log_alpha: float) -> float:
            return float(self.spread.margin(exp(log_alpha))) - distance

        # p is the level at which the interval just reaches the null. On a logarithmic scale, since
        # Holm's thresholds lie far in the tail.
        lowest = log(SMALLEST_P)
        if excess(lowest) <= 0:
            p = SMALLEST_P
        else:
            root: Any = brentq(excess, lowest, 0.0, xtol=1e-3)
            p = exp(float(root))
        return p if null else max(p, self.least_p)

    def p_beyond(self, low: float, high: float) -> float:
        """Return the two-sided p-value of the hypothesis that the true difference is between `low`
        and `high`, of which the nearest to the estimate counts.
        """
        return max(self.p(min(max(self.value, low), high)), self.least_p)

    def p_above(self, bound: float) -> float:
        """Return the one-sided p-value of the hypothesis that the true difference is `bound` or
        less.
        """
        half = self.p(bound) / 2
        return half if self.value > bound else 1 - half

    def p_within(self, low: float, high: float) -> float:
        """Return the p-value of the hypothesis that the true difference is `low` or less, or `high`
        or more.

        Two one-sided tests (Schuirmann 1987): both must reject, so that neither needs a correction
        for the other.
        """
        mirrored = Estimate(-self.value, self.spread, self.least_p)
        return max(self.p_above(low), mirrored.p_above(-high))

    def detectable(self, num_tests: int, power: float) -> float | None:
        """Return the true difference that such a study finds with this power, at Holm's first
        threshold.

        None: all runs gave the same, which shows no spread.
        """
        if not self.has_spread:
            return None
        margin = float(self.spread.margin(FAMILY_ERROR / num_tests))
        return detectable(
            float(np.sqrt(self.spread.variance)), float(self.spread.degrees), margin, power
        )


def estimate(measures: Sequence[Paired]) -> Estimate:
    """Return the mean over measures of the mean difference.

    measures: differences [seeds, questions] of each, in its unit, with the same seeds.
    """
    count = len(measures)
    by_seed = np.mean([measure.each.mean(axis=1) for measure in measures], axis=0)
    num_seeds = len(by_seed)
    questions, residual, num_changed = [], [], 0
    for measure in measures:
        # Over the seeds first: answers to one question under several seeds are not independent of
        # each other.
        of_questions = measure.each.mean(axis=0)
        mean = measure._replace(each=of_questions)
        part = part_of(mean, smooth=measure.is_right_or_wrong)
        # The residual is a part of both variances: it is estimated here to be subtracted once.
        residuals = [
            part_of(measure._replace(each=row - of_questions)).variance for row in measure.each
        ]
        questions.append(part)
        residual.append(
            Part(sum(residuals) / ((num_seeds - 1) * num_seeds), part.degrees * (num_seeds - 1))
        )
        num_changed += mean.num_changed
    seeds = Part(float(by_seed.var(ddof=1)) / num_seeds, num_seeds - 1)
    spread = Spread(seeds, mean_part(questions, count), mean_part(residual, count))
    return Estimate(float(by_seed.mean()), spread, max(least_p(num_changed), SMALLEST_P))


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
    example_sd: float = 0.2
    """Standard deviation over held-out examples of the difference of two runs' metrics."""
    cluster_correlation: float = 0.02
    """Correlation of the changes of two questions of one cluster."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """The size of a study."""

    seeds: int
    num_tests: int
    """All of the study, see `stats.num_declared_tests`."""
    power: float = 0.8


def detectable_score(
    design: Design,
    assumed: Assumed,
    questions: int,
    cluster_sizes: Sequence[int] = (),
    *,
    to_base: bool,
    equivalence: bool = False,
) -> float:
    """Return the minimum detectable effect on a column, in percent.

    cluster_sizes: the number of questions of each cluster; empty: they are independent. to_base: of
    a candidate's difference to the starting checkpoint; else to another candidate. equivalence: the
    smallest margin within which two equal candidates are shown to be equivalent.
    """
    # Clusters of unequal size are worth fewer questions than equal ones: Kish's effective number.
    effective = (
        questions**2 / sum(size**2 for size in cluster_sizes) if cluster_sizes else questions
    )
    inflation = 1 + (questions / effective - 1) * assumed.cluster_correlation
    # one of the two differs from itself only
    by_seed = assumed.changed_by_seed * (0.5 if to_base else 1.0)
    changed = max(assumed.changed_by_training if to_base else assumed.changed_by_optimizer, by_seed)
    residual = by_seed * inflation / questions / design.seeds
    of_questions = (changed - by_seed) * inflation / questions
    parts = (of_questions, residual, effective - 1)
    return 100 * _effect(
        design, assumed.seed_sd / 100, *parts, to_base=to_base, equivalence=equivalence
    )


def detectable_loss(
    design: Design,
    assumed: Assumed,
    examples: int | None,
    *,
    to_base: bool,
    equivalence: bool = False,
) -> float:
    """Return the minimum detectable effect on the held-out metric, in its unit.

    examples: that judge; None: their number is unknown, and the effect is on these examples alone.
    """
    of_examples = assumed.example_sd**2 / examples if examples else 0.0
    degrees = max(1, (examples or 2) - 1)
    return _effect(
        design, assumed.loss_sd, of_examples, 0.0, degrees, to_base=to_base, equivalence=equivalence
    )


def _effect(
    design: Design,
    seed_sd: float,
    of_questions: float,
    residual: float,
    degrees: float,
    *,
    to_base: bool,
    equivalence: bool,
) -> float:
    """Return the true difference that simulated studies find with the design's power, or the margin
    of equivalence.

    seed_sd: of a score on the given questions. of_questions, residual: parts of the variance of the
    mean difference.
    """
    # Drawn with the mean: a study judges by its own estimate of the variance, which is sometimes
    # too large.
    rng = np.random.default_rng(SEED)
    of_seeds = seed_sd**2 * (1 if to_base else 2) / design.seeds
    error = sqrt(of_seeds + of_questions) * rng.standard_normal(DRAWS)

    def estimated(variance: float, f: float) -> Part:
        return Part(variance * rng.chisquare(f, DRAWS) / f, f)

    spread = Spread(
        estimated(of_seeds, design.seeds - 1),
        estimated(of_questions + residual, degrees),
        estimated(residual, degrees * (design.seeds - 1)),
    )
    alpha = FAMILY_ERROR / design.num_tests
    if equivalence:  # two one-sided tests of equal candidates
        return float(np.quantile(spread.margin(2 * alpha) + abs(error), design.power))
    return float(np.quantile(spread.margin(alpha) - error, design.power))
