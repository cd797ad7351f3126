"""Draws nested in seeds: the runs of one seed from starts that differ by rounding (verdict.draws).

A training is chaotic, so that a run with one seed on one machine is a draw. Its variance is part of
the spread over seeds, of which the verdict's intervals are made: they cover it whether there are
draws or not. The mean over the draws of a seed is the score of that seed. Draws show how much of
the spread they are, and make it smaller.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from statistics import fmean

import numpy as np

from ..evaluate.stats.paired import ColumnPoints
from .stats import Answers, is_complete
from .study import HELD_OUT, Candidate, DrawSpread, by_number, mean_metric


def over_draws(
    candidates: Sequence[Candidate], answers: Answers
) -> tuple[list[Candidate], Answers]:
    """Return candidates and answers with one run per seed of the verdict: the mean over its draws.

    A column whose draws answered unlike prompts is left out.
    """
    means = []
    for points in (answers.runs, answers.starts):
        means.append({})
        for candidate in (candidate for candidate in candidates if candidate.name in points):
            answered = iter(points[candidate.name])
            seeds = [
                [next(answered) for _ in runs] for runs in by_number(candidate.verdict).values()
            ]
            means[-1][candidate.name] = [
                {
                    column: ColumnPoints(
                        np.mean([draw[column].each for draw in draws], axis=0),
                        own.clusters,
                        own.prompts,
                    )
                    for column, own in draws[0].items()
                    if all(column in draw and draw[column].prompts == own.prompts for draw in draws)
                }
                for draws in seeds
            ]
    return [mean_candidate(candidate) for candidate in candidates], Answers(*means)


def mean_candidate(candidate: Candidate) -> Candidate:
    """Return a candidate with one run per seed of the verdict: the mean over its draws."""
    verdict = []
    for runs in by_number(candidate.verdict).values():
        failed = next((run for run in runs if run.status != "finished"), None)
        if len(runs) == 1 or failed is not None:  # one draw that failed fails its seed
            verdict.append(failed or runs[0])
            continue
        scores = [run.scores for run in runs if run.scores is not None]
        columns = (
            [column for column in scores[0] if all(column in each for each in scores)]
            if scores
            else []
        )
        means = (
            {c: fmean(each[c] for each in scores) for c in columns}
            if len(scores) == len(runs)
            else None
        )
        verdict.append(replace(runs[0], metric=mean_metric(runs), scores=means))
    return replace(candidate, verdict=verdict)


def draw_spreads(candidates: Sequence[Candidate]) -> list[DrawSpread]:
    """Return the spread over seeds and over draws of every measure, of the candidates whose runs
    are all finished.
    """
    complete = [[*by_number(each.verdict).values()] for each in candidates if is_complete(each)]
    if not complete or len(complete[0][0]) < 2:
        return []
    runs = [run for seeds in complete for draws in seeds for run in draws]
    spreads = []
    for measure in (
        name for name in runs[0].results if all(run.results.get(name) is not None for run in runs)
    ):
        scores = np.array(
            [[[run.results[measure] for run in draws] for draws in seeds] for seeds in complete],
            float,
        )
        between, within = variance_components(scores)
        unit = "loss" if measure == HELD_OUT else "percent"
        spreads.append(DrawSpread(measure, unit, sqrt(between), sqrt(within), *scores.shape))
    return spreads


def variance_components(scores: np.ndarray) -> tuple[float, float]:
    """Return the variances of the effect of a seed and of a draw, by a nested analysis of variance.

    scores: [candidates, seeds, draws], two or more of the last two; the candidates' means may
    differ, their variances are taken as equal. With s and d for these variances and D draws, the
    expected mean square within seeds is d, and that between the seeds of a candidate D s + d
    (Searle, Casella and McCulloch 1992, section 3.6).
    """
    candidates, seeds, draws = scores.shape
    means = scores.mean(axis=2)
    within = float(((scores - means[:, :, None]) ** 2).sum() / (candidates * seeds * (draws - 1)))
    between = draws * float(
        ((means - means.mean(axis=1, keepdims=True)) ** 2).sum() / (candidates * (seeds - 1))
    )
    return max((between - within) / draws, 0.0), within
