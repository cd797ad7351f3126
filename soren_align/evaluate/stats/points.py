"""The points of each question, from lm-eval's samples, such that a score is their mean.
Neither torch nor lm-eval.

A metric is one of lm-eval's, or the mean of several ("a+b"). A suite may ask for a normalized
score, as the Open LLM Leaderboard v2 reports it: with n choices, 0 is the accuracy of answers at
random, 1/n, and 1 is that of right answers,

    (accuracy - 1/n) / (1 - 1/n).

n is the same for a whole column, or each subtask has its own; then the column is the plain mean of
its subtasks. Both are linear in the accuracy, so that a difference of two models is the mean of the
differences of single questions.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from ...core.errors import UserError

NumChoices = int | dict[str, int]
"""The number of choices of a column, or by subtask."""
NO_MEAN = "not a mean over questions, and models can be compared only by such means"
ANOTHER = "choose another metric of the task"
CLIPPED = "below random as 0"
"""The label of a score in which a subtask (or a column without subtasks) below random answers
counts as 0."""


def metric_points(samples: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """Return the points of a task's samples.

    If a sample has a list of outcomes, such as one for each of IFEval's instructions, the metric is
    the mean of all outcomes: the points are their sum over the mean length of the lists, and may
    exceed 1. Raises UserError if the points of a question are no number.
    """
    parts = []
    for name in metric.split("+"):
        values = [sample[name] for sample in samples]
        if any(isinstance(value, list) for value in values):
            mean_length = sum(map(len, values)) / len(values)
            values = [sum(value) / mean_length for value in values]
        # Such as the pairs of which lm-eval computes a perplexity of the corpus.
        if strange := [value for value in values if not isinstance(value, SupportsFloat)]:
            raise UserError(f"{name} is {NO_MEAN}: a question has {strange[0]!r:.60}; {ANOTHER}")
        parts.append([float(value) for value in values])
    return (
        parts[0]
        if len(parts) == 1
        else [statistics.fmean(each) for each in zip(*parts, strict=True)]
    )


def normalize(
    points: Mapping[str, Sequence[float]], num_choices: NumChoices | None
) -> dict[str, list[float]]:
    """Return points by subtask whose mean over all questions is the column's score.

    points: of the metric, by subtask. num_choices: None: the score is not normalized.
    """
    if num_choices is None:
        return {name: [*each] for name, each in points.items()}
    weights = dict.fromkeys(points, 1.0)
    if isinstance(num_choices, dict):
        weights = subtask_weights(Counter({name: len(each) for name, each in points.items()}))
    num = {
        name: num_choices[name] if isinstance(num_choices, dict) else num_choices for name in points
    }
    return {
        name: [weights[name] * above_random(p, num[name]) for p in points[name]] for name in points
    }


def above_random(accuracy: float, num_choices: NumChoices) -> float:
    """Return the normalized score of an accuracy in [0, 1], which all subtasks have."""
    numbers = num_choices.values() if isinstance(num_choices, dict) else [num_choices]
    return statistics.fmean((accuracy - 1 / n) / (1 - 1 / n) for n in numbers)


def subtask_weights(sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the weight of a question of each subtask with which the mean over questions is that
    over subtasks.

    sizes: the number of questions of each subtask.
    """
    mean_size = sum(sizes.values()) / len(sizes)
    return {name: mean_size / size for name, size in sizes.items()}
