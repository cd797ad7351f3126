"""The verdict: compare each candidate with the starting checkpoint and with the reference.

Better, worse, equivalent within a margin that was declared, or not distinguishable, and then the
difference that this study could have found. All statements of a study are one family: at most 5% of
studies state anything wrong, if the seeds of the optimizers spread in shapes that are alike. A mean
of five runs cannot hold an optimizer's rare collapse that none of them shows, and no test of means
repairs this (research/studies/statistics.md has Welch's and others): the report states beside every
answer how often such a run may happen.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..evaluate.stats.paired import ColumnPoints, Paired, Points, holm, read_points
from ..evaluate.stats.power import FAMILY_ERROR
from ..run.folder import RunFolder
from ..run.held_out import read_held_out
from .config import ALL_PAIRS, VerdictSection
from .estimates import Estimate, estimate
from .study import AVERAGE, BASE, HELD_OUT, Answer, Candidate, Difference


@dataclass(frozen=True)
class Answers:
    """What the final runs of the candidates answered: points by column, and the metric by held-out
    example.
    """

    runs: Mapping[str, Sequence[Points]]
    """By candidate, in the order of its final runs; all candidates have the same seeds. HELD_OUT is
    a column whose points are positive where better, and no shares."""
    starts: Mapping[str, Sequence[Points]]
    """The same of the starting checkpoint of each run; columns that it did not answer are left
    out."""


@dataclass(frozen=True)
class _Comparison:
    """A comparison before the correction; values in units of the held-out metric, or of points in
    [0, 1].
    """

    candidate: str
    reference: str
    measure: str
    estimate: Estimate
    finer: tuple[float, float] = (0.0, 0.0)
    """How much a search with more values might lower and raise the difference: the reference's gain
    and the candidate's. An answer must hold for the best values, not for those tried."""

    @property
    def p(self) -> float:
        """The p-value of no difference at the optimizers' best values."""
        lower, higher = self.finer
        return self.estimate.p_beyond(-higher, lower)

    @property
    def factor(self) -> float:
        """Of the unit in which the difference is shown."""
        return 1.0 if self.measure == HELD_OUT else 100.0


def verdict(
    rules: VerdictSection,
    candidates: Sequence[Candidate],
    answers: Answers,
    *,
    average: bool = False,
    look: int = 1,
) -> list[Difference]:
    """Return the differences of the candidates whose final runs are all finished.

    Columns with unlike prompts are not compared. average: compare the plain mean of the suite's
    columns too. look: the number of this verdict, from 1, among those that were computed of the
    study, by which its p-values are multiplied.
    """
    complete = [candidate.name for candidate in candidates if is_complete(candidate)]
    names = [name for name in complete if name in answers.runs]
    if not names:
        return []
    columns = [*answers.runs[names[0]][0]]
    measures = {column: [column] for column in columns}
    suite = [column for column in columns if column != HELD_OUT]
    if average and suite:
        measures[AVERAGE] = suite
    finer = {candidate.name: candidate.finer for candidate in candidates}
    comparisons = list(_comparisons(rules, names, answers, measures, finer))
    comparisons.sort(key=lambda each: each.reference != BASE)

    # Holm's correction is for all tests that were declared, also of candidates that have no
    # answers.
    tests, margins = _tests_of(rules, comparisons)
    missing = [1.0] * max(0, num_declared_tests(rules, len(candidates), measures) - len(tests))
    # A study that is extended after a look at its answers has another chance of a wrong one.
    # Bonferroni's correction for the looks is simple, and covers any reason to look again.
    corrected = [min(1.0, look * p) for p in holm([*(p for _, _, p in tests), *missing])]
    p_holm = {(i, test): p for (i, test, _), p in zip(tests, corrected, strict=False)}
    num_tests = look * (len(tests) + len(missing))

    differences = []
    for i, each in enumerate(comparisons):
        value, half = each.estimate.value, float(each.estimate.spread.margin(0.05))
        lower, higher = each.finer
        limit = float("inf") if each.measure == HELD_OUT else 1.0
        is_equivalent = p_holm[i, "equivalence"] < FAMILY_ERROR if i in margins else None
        answer: Answer = "equivalent" if is_equivalent else "not distinguishable"
        # A difference that was shown wins: it may lie within the margin too, and is then both.
        if p_holm[i, "difference"] < FAMILY_ERROR:
            answer = "better" if value > 0 else "worse"
        detectable = each.estimate.detectable(num_tests, rules.power)
        differences.append(
            Difference(
                each.candidate,
                each.reference,
                each.measure,
                "loss" if each.measure == HELD_OUT else "percent",
                value=each.factor * value,
                low=each.factor * max(value - half - lower, -limit),
                high=each.factor * min(value + half + higher, limit),
                p=each.p,
                p_holm=p_holm[i, "difference"],
                answer=answer,
                detectable=None if detectable is None else each.factor * (detectable + lower),
                margin=(
                    rules.retention.margin
                    if rules.retention and (i, "retention") in p_holm
                    else None
                ),
                retained=(
                    p_holm[i, "retention"] < FAMILY_ERROR if (i, "retention") in p_holm else None
                ),
                equivalence=margins.get(i),
                is_equivalent=is_equivalent,
                seed_share=each.estimate.spread.seed_share,
                finer=max(each.finer),
            )
        )
    return differences


def _tests_of(
    rules: VerdictSection, comparisons: Sequence[_Comparison]
) -> tuple[list[tuple[int, str, float]], dict[int, float]]:
    """Return (number of the comparison, kind, p) of every test, and the margins of equivalence by
    the comparison's number.
    """
    tests: list[tuple[int, str, float]] = []
    margins: dict[int, float] = {}
    for i, each in enumerate(comparisons):
        tests.append((i, "difference", each.p))
        if rules.retention and each.reference == BASE and each.measure in rules.retention.columns:
            tests.append((i, "retention", each.estimate.p_above(-rules.retention.margin / 100)))
        margin = (
            rules.equivalence.margin(each.measure)
            if rules.equivalence and each.reference != BASE
            else None
        )
        if margin is not None:
            margins[i] = margin
            own, (lower, higher) = margin / each.factor, each.finer
            tests.append((i, "equivalence", each.estimate.p_within(lower - own, own - higher)))
    return tests, margins


def num_declared_tests(
    rules: VerdictSection, num_candidates: int, measures: Collection[str]
) -> int:
    """Return the number of tests that a study declares, for which Holm's method corrects.

    measures: HELD_OUT, the columns of the suite, and AVERAGE if the suite has one.
    """
    num_retained = len(rules.retention.columns) if rules.retention else 0
    num_margins = (
        sum(rules.equivalence.margin(each) is not None for each in measures)
        if rules.equivalence
        else 0
    )
    num_pairs = (
        num_candidates * (num_candidates - 1) // 2
        if rules.reference == ALL_PAIRS
        else num_candidates - 1
    )
    return num_candidates * (len(measures) + num_retained) + num_pairs * (
        len(measures) + num_margins
    )


def is_complete(candidate: Candidate) -> bool:
    """Whether all its runs with fresh seeds are finished: the mean of those that survived would be
    too good.
    """
    return bool(candidate.verdict) and all(run.status == "finished" for run in candidate.verdict)


def _comparisons(
    rules: VerdictSection,
    names: list[str],
    answers: Answers,
    measures: Mapping[str, list[str]],
    finer: Mapping[str, float],
) -> Iterator[_Comparison]:
    """Yield the comparisons of all measures. measures: the columns of which each is the mean.
    finer: `Candidate.finer` by name; the search measures the held-out metric alone.
    """
    runs = [points for name in names for points in answers.runs[name]]
    # (candidate, reference, the reference's name); None: the starting checkpoint.
    compared: list[tuple[int, int | None, str]] = [(k, None, BASE) for k in range(len(names))]
    if rules.reference == ALL_PAIRS:
        compared += [
            (k, other, names[other])
            for other in range(len(names))
            for k in range(other + 1, len(names))
        ]
    elif rules.reference in names:
        other = names.index(rules.reference)
        compared += [(k, other, rules.reference) for k in range(len(names)) if k != other]
    for measure, columns in measures.items():
        # Differences of answers are paired by question: other prompts would be other questions.
        if not all(are_alike(runs[0], other, columns) for other in runs):
            continue
        stacked = {
            c: np.array([[points[c].each for points in answers.runs[name]] for name in names])
            for c in columns
        }
        for k, reference, name in compared:
            pairs = []
            for column in columns:
                if reference is not None:
                    others = stacked[column][reference]
                elif all(
                    are_alike(runs[0], start, [column])
                    for start in answers.starts.get(names[k], [{}])
                ):
                    # The start of its own run: a later evaluation may give it other scores (see
                    # `read_answers`).
                    others = np.array([start[column].each for start in answers.starts[names[k]]])
                else:
                    break
                own = runs[0][column]
                pairs.append(Paired(stacked[column][k] - others, own.clusters, own.weights))
            if len(pairs) == len(columns):
                gains = finer.get(name, 0.0), finer[names[k]]
                gains = gains if measure == HELD_OUT else (0.0, 0.0)
                yield _Comparison(names[k], name, measure, estimate(pairs), gains)


def are_alike(a: Points, b: Points, columns: Sequence[str]) -> bool:
    """Whether two models answered the same prompts in these columns."""
    return all(
        column in a and column in b and a[column].prompts == b[column].prompts for column in columns
    )


def read_answers(
    study: Path,
    candidates: Sequence[Candidate],
    metric: str,
    suite: str | None,
    *,
    higher_is_better: bool,
) -> tuple[Answers, list[str]]:
    """Return the answers of the candidates whose final runs are all finished, and cautions about
    them.

    metric: of the held-out examples. suite: its name; None: the runs have no benchmarks. The
    starting checkpoint is the row of a table before the run's own. Raises UserError if the answers
    of a run are missing or damaged.
    """
    runs: dict[str, list[Points]] = {}
    starts: dict[str, list[Points]] = {}
    for candidate in filter(is_complete, candidates):
        runs[candidate.name], starts[candidate.name] = [], []
        for run in candidate.verdict:
            folder = RunFolder(study / run.folder)
            values, sign = read_held_out(folder.held_out, metric), 1 if higher_is_better else -1
            own, start = (
                {
                    HELD_OUT: ColumnPoints(
                        sign * each, values.clusters, values.examples, values.weights
                    )
                }
                for each in (values.end, values.start)
            )
            if suite is not None:
                rows = list(read_points(folder.evaluation(suite)).values())
                own |= rows[-1]
                start |= rows[-2] if len(rows) > 1 else {}
            runs[candidate.name].append(own)
            starts[candidate.name].append(start)
    every, sentences = [points for of_name in runs.values() for points in of_name], []
    first = next(iter(starts.values()), [{}])[0]
    for column in every[0] if every else ():
        others = [
            start[column] for of_name in starts.values() for start in of_name if column in start
        ]
        different = sum(not np.array_equal(other.each, first[column].each) for other in others)
        if column != HELD_OUT and different:
            sentences.append(
                f"{column}: {different} of {len(others)} later evaluations gave the starting"
                " checkpoint other scores than the first evaluation; each run is compared with the"
                " starting checkpoint in the run's own evaluation"
            )
        name = "held-out metric" if column == HELD_OUT else column
        if not all(are_alike(every[0], other, [column]) for other in every):
            sentences.append(f"{name}: not compared, because the prompts of the runs differ")
        elif column in first and not are_alike(every[0], first, [column]):
            sentences.append(
                f"{name}: not compared with {BASE}, because {BASE} was evaluated with other prompts"
            )
    return Answers(runs, starts), sentences


def num_questions(answers: Answers) -> dict[str, int]:
    """Return the numbers of questions by column, of held-out examples, and of the average all
    questions.
    """
    runs = next(iter(answers.runs.values()), None)
    numbers = {column: len(points.each) for column, points in runs[0].items()} if runs else {}
    of_suite = sum(number for column, number in numbers.items() if column != HELD_OUT)
    return numbers | ({AVERAGE: of_suite} if of_suite else {})


def cautions(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield the candidates that have no verdict."""
    for candidate in candidates:
        bad = [run.status for run in candidate.verdict if run.status != "finished"]
        if bad:
            number = f"{len(bad)} of {len(candidate.verdict)}"
            reasons = " or ".join(sorted(set(bad)))
            yield (
                f"{candidate.name}: {number} runs with fresh seeds {reasons}, so this candidate has"
                " no verdict"
            )
