"""The minimum detectable effect: the true difference that a study answers with "better" with the declared power."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.special import nctdtrinc

from .estimates import Part, Spread, seeds_part

FAMILY_ERROR = 0.05
"""The probability of any wrong "better", "worse" or "retained" in a study."""
DRAWS, SEED = 10_000, 0
"""Simulated studies for a minimum detectable effect: 1% of it is the error."""


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
