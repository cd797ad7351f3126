"""The answers behind a verdict: the points of its runs' evaluations, and facts about them that weaken it."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import bartlett

from ..evaluate.points import Points, read_points
from ..run_folder import RunFolder
from .study import Candidate
from .verdict import BASE, HELD_OUT, are_alike, is_complete


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
    base = starts[0] if starts else None
    return answers, base, [*_about_starts(starts), *_about_prompts(answers, base)]


def cautions(candidates: Sequence[Candidate], answers: Mapping[str, Sequence[Points]]) -> list[str]:
    """Return facts about the runs that weaken a verdict."""
    sentences = []
    for candidate in candidates:
        bad = [run.status for run in candidate.verdict if run.status != "finished"]
        if bad:
            number, reasons = f"{len(bad)} of {len(candidate.verdict)}", " or ".join(sorted(set(bad)))
            sentences.append(f"{candidate.name}: {number} runs with fresh seeds {reasons}: it has no verdict")
    return [*sentences, *_about_spreads([c for c in candidates if is_complete(c)], answers)]


def _about_starts(starts: Sequence[Points]) -> Iterator[str]:
    for column in starts[0] if starts else ():
        different = [start for start in starts if not np.array_equal(start[column].each, starts[0][column].each)]
        if different:
            yield (
                f"{column}: {len(different)} of {len(starts)} evaluations gave the starting checkpoint other points"
                " than the first, which counts"
            )


def _about_prompts(answers: Mapping[str, Sequence[Points]], base: Points | None) -> Iterator[str]:
    runs = [points for each in answers.values() for points in each]
    for column in runs[0] if runs else ():
        if not all(are_alike(runs[0], other, [column]) for other in runs):
            yield f"{column}: not compared, because the prompts of the runs differ"
        elif base is not None and not are_alike(runs[0], base, [column]):
            yield f"{column}: not compared with {BASE}, because its prompts differ"


def _about_spreads(complete: Sequence[Candidate], answers: Mapping[str, Sequence[Points]]) -> Iterator[str]:
    """Yield measures whose spread over seeds differs between candidates (Bartlett's test at 5% for all measures)."""
    scores: dict[str, dict[str, list[float]]] = {}
    for column in next(iter(answers.values()))[0] if answers else ():
        scores[column] = {
            name: [100 * float(run[column].each.mean()) for run in runs] for name, runs in answers.items()
        }
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
