"""The verdict: each candidate against the starting checkpoint and against the reference, with three answers only.

Better, worse, or not distinguishable, and then the difference that this study could have found. All statements of a
study are one family: at most 5% of studies state anything wrong.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.stats import bartlett

from ...evaluate.stats.paired import Paired, Points, holm, read_points
from ...run.folder import RunFolder
from ..config import ALL_PAIRS
from ..study import AVERAGE, BASE, HELD_OUT, Candidate, Difference
from .estimates import FAMILY_ERROR, Estimate, Spread, detectable, estimate, seeds_part


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings of a verdict, declared before the study."""

    reference: str
    """The candidate that the others are compared with, besides the starting checkpoint; or ALL_PAIRS."""
    power: float = 0.8
    higher_is_better: bool = False
    """Of the metric of the held-out examples."""
    average: bool = False
    """Whether to compare the plain mean of the columns too."""
    margins: Mapping[str, float] = field(default_factory=dict)
    """Columns that are to be retained, with the loss in percent that does not count."""


@dataclass(frozen=True)
class _Comparison:
    """A comparison before the correction."""

    candidate: str
    reference: str
    measure: str
    estimate: Estimate
    """In units of the loss, or of points in [0, 1]."""
    unit: Literal["percent", "loss"]
    margin: float | None = None


def verdict(
    rules: Rules, candidates: Sequence[Candidate], points: Mapping[str, Sequence[Points]], base: Points | None
) -> list[Difference]:
    """Return the differences of the candidates whose verdict's runs are all finished.

    points: of each candidate, in the order of its verdict's runs; all candidates have the same seeds. base: of the
    starting checkpoint; None: it was not evaluated. Columns with unlike prompts are not compared.
    """
    complete = [candidate for candidate in candidates if is_complete(candidate)]
    answers = {candidate.name: points[candidate.name] for candidate in complete if points}
    comparisons = [*_of_questions(rules, answers, base), *_of_held_out(rules, complete)]
    comparisons.sort(key=lambda each: each.reference != BASE)

    # Holm's correction is for all differences and all tests of retention together.
    p = [each.estimate.p() for each in comparisons]
    retention = {
        i: each.estimate.p_above(-each.margin / 100) for i, each in enumerate(comparisons) if each.margin is not None
    }
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


def _of_questions(rules: Rules, answers: Mapping[str, Sequence[Points]], base: Points | None) -> Iterator[_Comparison]:
    """Yield the comparisons of the columns and of their average."""
    names = list(answers)
    if not names:
        return
    runs = [points for each in answers.values() for points in each]
    columns = [column for column in runs[0] if all(are_alike(runs[0], other, [column]) for other in runs)]
    stacked = {c: np.array([[points[c].each for points in answers[name]] for name in names]) for c in columns}
    measures = {column: [column] for column in columns}
    if rules.average and len(columns) == len(answers[names[0]][0]):
        measures[AVERAGE] = columns
    for measure, parts in measures.items():
        alike = base is not None and are_alike(base, answers[names[0]][0], parts)
        start = {c: base[c].each for c in parts} if base is not None and alike else {}
        scores = np.mean([stacked[column].mean(axis=2) for column in parts], axis=0)
        for k, reference in _pairs(names, rules.reference):
            if reference is None and not start:
                continue
            others = start if reference is None else {c: stacked[c][reference] for c in parts}
            pairs = [Paired(stacked[c][k] - others[c], answers[names[0]][0][c].clusters) for c in parts]
            difference = estimate(pairs, seeds_part(scores, k, reference))
            margin = rules.margins.get(measure) if reference is None else None
            name = BASE if reference is None else names[reference]
            yield _Comparison(names[k], name, measure, difference, "percent", margin)


def _of_held_out(rules: Rules, complete: Sequence[Candidate]) -> Iterator[_Comparison]:
    """Yield the comparisons of the metric of the held-out examples, for which only the seeds are random."""
    names = [candidate.name for candidate in complete]
    metrics = [[run.metric for run in candidate.verdict] for candidate in complete]
    if not names or any(metric is None for each in metrics for metric in each):
        return
    scores = np.array(metrics, dtype=float) * (1 if rules.higher_is_better else -1)
    starts = [run.curve[0].metric for c in complete for run in c.verdict if run.curve and run.curve[0].step == 0]
    start = next((metric for metric in starts if metric is not None), None)
    for k, reference in _pairs(names, rules.reference):
        if reference is not None:
            other = float(scores[reference].mean())
        elif start is not None:
            other = start if rules.higher_is_better else -start
        else:
            continue
        difference = Estimate(float(scores[k].mean()) - other, Spread(seeds_part(scores, k, reference)))
        name = BASE if reference is None else names[reference]
        yield _Comparison(names[k], name, HELD_OUT, difference, "loss")


def _pairs(names: list[str], reference: str) -> list[tuple[int, int | None]]:
    """Return the comparisons as (candidate, reference), None for the starting checkpoint."""
    pairs: list[tuple[int, int | None]] = [(k, None) for k in range(len(names))]
    if reference == ALL_PAIRS:
        pairs += [(k, other) for other in range(len(names)) for k in range(other + 1, len(names))]
    elif reference in names:
        other = names.index(reference)
        pairs += [(k, other) for k in range(len(names)) if k != other]
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
