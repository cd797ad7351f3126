"""From lm-eval's record of every question to scores, with their errors."""

import statistics
from math import isfinite, sqrt
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.metrics import pooled_sample_stderr
from scipy.stats import binomtest, t

from ..errors import UserError
from .suites import SuiteTask
from .tasks import leaves, scores_of

Z95 = statistics.NormalDist().inv_cdf(0.975)


def t95(degrees: int) -> float:
    """Student's quantile for a two-sided 95% interval: 12.7 at one degree of freedom, 1.963 at 816 (Z95: 1.960)."""
    return float(t.ppf(0.975, degrees)) if degrees > 0 else Z95


def score_column(
    task: SuiteTask, loaded: Any, found: dict[str, Any], model: str
) -> tuple[dict[str, Any], list[float], list[dict[str, Any]]]:
    """(score, points, samples) of a column from lm-eval's results.

    score: {"value", "stderr", and of a 95% interval "low" and "high", in percent, "n": questions asked}; "also": other
    scores, {"value", "stderr"} each; "subjects": those of a group. points: what each question scored, in [0, 1].
    Raises UserError where log-likelihoods are not numbers, or the metric is no mean over questions.
    """
    names = [leaf.task_name for leaf in leaves(loaded)]
    headline, *others = scores_of(task)
    points = [_points(found, name, headline, model) for name in names]
    score = _score(points)
    also: dict[str, Any] = {}
    if isinstance(loaded, Group):
        subjects = {name: _score([p]) for name, p in zip(names, points, strict=True)}
        also["mean over subjects"] = average(list(subjects.values()))
        score["subjects"] = subjects
    for other in others:
        also[other.removesuffix(",none")] = _score([_points(found, name, other, model) for name in names])
    if also:
        score["also"] = {label: {key: each[key] for key in ("value", "stderr")} for label, each in also.items()}
    samples = [{"task": name} | sample for name in names for sample in found["samples"][name]]
    return score, [value for each in points for value in each], samples


def average(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain mean of independent scores."""
    value = statistics.fmean(s["value"] for s in scores)
    stderr = sqrt(sum(s["stderr"] ** 2 for s in scores)) / len(scores)
    return {"value": value, "stderr": stderr, "low": value - Z95 * stderr, "high": value + Z95 * stderr}


def _points(found: dict[str, Any], name: str, score: str, model: str) -> list[float]:
    """What each question of a task scored."""
    metric, filter_name = score.split(",")
    asked = [s for s in found["samples"][name] if s["filter"] == filter_name]
    numbers = [answer[0] for s in asked for answer in s["filtered_resps"] if isinstance(answer, tuple | list)]
    broken = sum(not isfinite(number) for number in numbers)
    if broken:  # argmax of NaNs is the first choice: a broken model could score 100%
        raise UserError(
            f"{model}: {broken} of {len(numbers)} log-likelihoods of {name} are not numbers;"
            " its weights are broken, as after a training that diverged"
        )
    points = [float(s[metric]) for s in asked]
    broken = sum(not isfinite(point) for point in points)
    if broken:  # such as mc2's 0/0, where all answers are less likely than exp(-745)
        raise UserError(
            f"{model}: {broken} of {len(points)} scores ({metric}) of {name} are not numbers;"
            " its weights are broken, as after a training that diverged"
        )
    if abs(statistics.fmean(points) - found["results"][name][score]) > 1e-9:
        raise UserError(f"{name}: {metric} is no mean over questions; only such metrics can be compared")
    return points


def _score(points: list[list[float]]) -> dict[str, Any]:
    """In percent, over all questions of a column's tasks. The standard error is lm-eval's: of independent questions.

    The 95% interval is Wilson's where answers are right or wrong: four wrong answers of four do not prove 0.0 ± 0.0.
    Elsewhere it is Student's t, which with few questions is wider than the normal one, and with hundreds equal to it.
    """
    errors = [statistics.stdev(p) / sqrt(len(p)) if len(p) > 1 else 0.0 for p in points]
    sizes = [len(p) for p in points]
    every = [value for p in points for value in p]
    value, n = statistics.fmean(every), len(every)
    stderr = errors[0]
    if len(points) > 1:
        stderr = float(pooled_sample_stderr(errors, sizes)) if n > len(points) else 0.0  # --limit 1
    if {0.0, 1.0}.issuperset(every):
        low, high = binomtest(int(sum(every)), n).proportion_ci(method="wilson")
    else:
        margin = t95(n - len(points)) * stderr
        low, high = max(value - margin, 0.0), min(value + margin, 1.0)
    return {"value": 100 * value, "stderr": 100 * stderr, "low": 100 * low, "high": 100 * high, "n": n}
