"""The verdict: each candidate against the starting checkpoint and against the reference, with three answers only.

Better, worse, or not distinguishable, and then the difference that this study could have found. All statements of a
study are one family: at most 5% of studies state anything wrong.

Seeds and questions are random and crossed: the difference of a candidate on question q after the run with seed s is

    d[s, q] = effect + seed[s] + question[q] + residual[s, q]

The variance of its mean has a part of the seeds, which also holds residual / (S Q), and a part of the questions, which
holds residual / (S Q) too; the sum of both, less residual / (S Q), is its variance. With three seeds the first part has
few degrees of freedom: a bootstrap of seeds, or Satterthwaite's approximation, finds a difference far too often
(docs/studies/statistics.md).

The minimum detectable effect is the true difference that a study answers with "better" with the declared power.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import nctdtrinc, stdtrit
from scipy.stats import bartlett

from ..evaluate.stats.paired import Paired, Points, holm, least_p, read_points
from ..run.folder import RunFolder
from .config import ALL_PAIRS, VerdictSection
from .study import AVERAGE, BASE, HELD_OUT, Candidate, Difference

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
class _Comparison:
    """A comparison before the correction."""

    candidate: str
    reference: str
    measure: str
    estimate: "Estimate"
    """In units of the loss, or of points in [0, 1]."""
    unit: Literal["percent", "loss"]
    margin: float | None = None


def verdict(
    rules: VerdictSection,
    candidates: Sequence[Candidate],
    points: Mapping[str, Sequence[Points]],
    base: Points | None,
    *,
    higher_is_better: bool = False,
    average: bool = False,
) -> list[Difference]:
    """Return the differences of the candidates whose verdict's runs are all finished.

    points: of each candidate, in the order of its verdict's runs; all candidates have the same seeds. base: of the
    starting checkpoint; None: it was not evaluated. Columns with unlike prompts are not compared. higher_is_better: of
    the metric of the held-out examples. average: compare the plain mean of the columns too.
    """
    complete = [candidate for candidate in candidates if is_complete(candidate)]
    answers = {candidate.name: points[candidate.name] for candidate in complete if points}
    comparisons = [*_of_questions(rules, answers, base, average), *_of_held_out(rules, complete, higher_is_better)]
    comparisons.sort(key=lambda each: each.reference != BASE)

    # Holm's correction is for all differences and all tests of retention together.
    p = [each.estimate.p() for each in comparisons]
    retention: dict[int, float] = {}
    for i, each in enumerate(comparisons):
        if each.margin is not None:  # one-sided, of the hypothesis that the loss is at least the margin
            half = each.estimate.p(-each.margin / 100) / 2
            retention[i] = half if each.estimate.value > -each.margin / 100 else 1 - half
    family = holm([*p, *retention.values()])
    retained = dict(zip(retention, family[len(p) :], strict=True))
    differences = []
    for i, each in enumerate(comparisons):
        factor, limit = (100.0, 1.0) if each.unit == "percent" else (1.0, float("inf"))
        value, half = each.estimate.value, float(each.estimate.spread.margin(0.05))
        answer = "not distinguishable" if family[i] >= FAMILY_ERROR else "better" if value > 0 else "worse"
        differences.append(
            Difference(
                each.candidate,
                each.reference,
                each.measure,
                each.unit,
                value=factor * value,
                low=factor * max(value - half, -limit),
                high=factor * min(value + half, limit),
                p=p[i],
                p_holm=family[i],
                answer=answer,
                detectable=factor * detectable(each.estimate.spread, len(family), rules.power),
                margin=each.margin,
                retained=retained[i] < FAMILY_ERROR if i in retained else None,
            )
        )
    return differences


def is_complete(candidate: Candidate) -> bool:
    """Whether all its runs with fresh seeds are finished: the mean of those that survived would be too good."""
    return bool(candidate.verdict) and all(run.status == "finished" for run in candidate.verdict)


def _of_questions(
    rules: VerdictSection, answers: Mapping[str, Sequence[Points]], base: Points | None, average: bool
) -> Iterator[_Comparison]:
    """Yield the comparisons of the columns and of their average."""
    names = list(answers)
    if not names:
        return
    runs = [points for each in answers.values() for points in each]
    columns = [column for column in runs[0] if all(are_alike(runs[0], other, [column]) for other in runs)]
    stacked = {c: np.array([[points[c].each for points in answers[name]] for name in names]) for c in columns}
    measures = {column: [column] for column in columns}
    if average and len(columns) == len(answers[names[0]][0]):
        measures[AVERAGE] = columns
    for measure, parts in measures.items():
        alike = base is not None and are_alike(base, answers[names[0]][0], parts)
        start = {c: base[c].each for c in parts} if base is not None and alike else {}
        scores = np.mean([stacked[column].mean(axis=2) for column in parts], axis=0)
        for k, reference, name in _pairs(names, rules.reference):
            if reference is None and not start:
                continue
            others = start if reference is None else {c: stacked[c][reference] for c in parts}
            pairs = [Paired(stacked[c][k] - others[c], answers[names[0]][0][c].clusters) for c in parts]
            difference = estimate(pairs, seeds_part(scores, k, reference))
            retention = rules.retention if reference is None else None
            margin = retention.margin if retention and measure in retention.columns else None
            yield _Comparison(names[k], name, measure, difference, "percent", margin)


def _of_held_out(rules: VerdictSection, complete: Sequence[Candidate], higher_is_better: bool) -> Iterator[_Comparison]:
    """Yield the comparisons of the metric of the held-out examples, for which only the seeds are random."""
    names = [candidate.name for candidate in complete]
    metrics = [[run.metric for run in candidate.verdict] for candidate in complete]
    if not names or any(metric is None for each in metrics for metric in each):
        return
    scores = np.array(metrics, dtype=float) * (1 if higher_is_better else -1)
    starts = [run.curve[0].metric for c in complete for run in c.verdict if run.curve and run.curve[0].step == 0]
    start = next((metric for metric in starts if metric is not None), None)
    for k, reference, name in _pairs(names, rules.reference):
        if reference is not None:
            other = float(scores[reference].mean())
        elif start is not None:
            other = start if higher_is_better else -start
        else:
            continue
        difference = Estimate(float(scores[k].mean()) - other, Spread(seeds_part(scores, k, reference)))
        yield _Comparison(names[k], name, HELD_OUT, difference, "loss")


def _pairs(names: list[str], reference: str) -> list[tuple[int, int | None, str]]:
    """Return the comparisons as (candidate, reference, the reference's name), None for the starting checkpoint."""
    pairs: list[tuple[int, int | None, str]] = [(k, None, BASE) for k in range(len(names))]
    if reference == ALL_PAIRS:
        pairs += [(k, other, names[other]) for other in range(len(names)) for k in range(other + 1, len(names))]
    elif reference in names:
        other = names.index(reference)
        pairs += [(k, other, reference) for k in range(len(names)) if k != other]
    return pairs


def are_alike(a: Points, b: Points, columns: Sequence[str]) -> bool:
    """Whether two models answered the same prompts in these columns."""
    return all(column in a and column in b and a[column].prompts == b[column].prompts for column in columns)


def read_answers(
    study: Path, candidates: Sequence[Candidate], suite: str
) -> tuple[dict[str, list[Points]], Points | None, list[str]]:
    """Return (points of each candidate's runs, those of the starting checkpoint, cautions) for `verdict`.

    Only candidates whose verdict's runs are all finished have points. The starting checkpoint is the row before the
    run's own; None: the tables have no such row. Raises UserError if the points of a run are missing or damaged.
    """
    answers: dict[str, list[Points]] = {}
    starts: list[Points] = []
    for candidate in filter(is_complete, candidates):
        answers[candidate.name] = []
        for run in candidate.verdict:
            rows = list(read_points(RunFolder(study / run.folder).evaluation(suite)).values())
            answers[candidate.name].append(rows[-1])
            starts += rows[-2:-1]
    base, sentences = starts[0] if starts else None, []
    for column in base or ():
        different = sum(not np.array_equal(start[column].each, starts[0][column].each) for start in starts)
        if different:
            sentences.append(
                f"{column}: {different} of {len(starts)} evaluations gave the starting checkpoint other points"
                " than the first, which counts"
            )
    runs = [points for each in answers.values() for points in each]
    for column in runs[0] if runs else ():
        if not all(are_alike(runs[0], other, [column]) for other in runs):
            sentences.append(f"{column}: not compared, because the prompts of the runs differ")
        elif base is not None and not are_alike(runs[0], base, [column]):
            sentences.append(f"{column}: not compared with {BASE}, because its prompts differ")
    return answers, base, sentences


def cautions(candidates: Sequence[Candidate], answers: Mapping[str, Sequence[Points]]) -> Iterator[str]:
    """Yield facts about the runs that weaken a verdict.

    Among them measures whose spread over seeds differs between candidates (Bartlett's test at 5% for all measures).
    """
    for candidate in candidates:
        bad = [run.status for run in candidate.verdict if run.status != "finished"]
        if bad:
            number, reasons = f"{len(bad)} of {len(candidate.verdict)}", " or ".join(sorted(set(bad)))
            yield f"{candidate.name}: {number} runs with fresh seeds {reasons}: it has no verdict"
    scores: dict[str, dict[str, list[float]]] = {}
    for column in next(iter(answers.values()))[0] if answers else ():
        scores[column] = {
            name: [100 * float(run[column].each.mean()) for run in runs] for name, runs in answers.items()
        }
    complete = filter(is_complete, candidates)
    scores[HELD_OUT] = {c.name: [run.metric for run in c.verdict if run.metric is not None] for c in complete}
    for measure, by_name in scores.items():
        if len(by_name) < 2 or min(map(len, by_name.values())) < 2:
            continue
        deviations = {name: float(np.std(each, ddof=1)) for name, each in by_name.items()}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # a spread of 0 makes the statistic infinite
            p = bartlett(*by_name.values()).pvalue
        if p < 0.05 / len(scores):
            most, least = max(deviations, key=deviations.__getitem__), min(deviations, key=deviations.__getitem__)
            yield (
                f"{measure}: the standard deviation over seeds is {deviations[most]:.3g} with {most} and"
                f" {deviations[least]:.3g} with {least}; the verdict expects about equal ones"
            )


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
        part = _part(Paired(of_questions, column.clusters), smooth=column.is_right_or_wrong)
        residuals = [_part(Paired(row - of_questions, column.clusters)).variance for row in column.each]
        questions.append(part)
        residual.append(Part(sum(residuals) / ((num_seeds - 1) * num_seeds), part.degrees * (num_seeds - 1)))
    total_changed = sum(Paired(column.each.mean(axis=0), column.clusters).num_changed for column in columns)
    spread = Spread(seeds, _mean(questions, count), _mean(residual, count))
    return Estimate(value, spread, max(least_p(total_changed), SMALLEST_P))


def _part(column: Paired, smooth: bool = False) -> Part:
    """Return the variance of a mean over questions. smooth: as if each model had won one more (Bonett, Price 2012)."""
    column = column.without_equal_clusters()
    each = column.each
    if clustered := column.clustered_error():
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
