"""The scores of a column and their standard errors, from lm-eval's samples."""

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from math import isfinite
from typing import Any

from lm_eval.api.group import Group

from ...core.errors import UserError
from ...core.figures import short
from ...core.files import digest
from ...core.silence import silence
from ..suite.sandbox import rendering
from ..suite.suites import SuiteTask
from ..suite.tasks import score_keys, subtasks
from .intervals import average, score_points
from .points import ANOTHER, CLIPPED, NO_MEAN, above_random, metric_points, normalize

ACCURACIES = ("acc", "acc_norm", "acc_bytes")
"""Metrics of multiple choice that are the share of right choices."""


def score_column(
    task: SuiteTask,
    loaded: Any,
    output: dict[str, Any],
    model: str,
    labels: Sequence[str] | None = None,
) -> tuple[dict[str, Any], list[float], list[dict[str, Any]]]:
    """Return (score, points, samples) of a column.

    score: {"value", "stderr", "low", "high": of the 95% interval, all in percent, "n": number of
    questions}; "chance": the score of answers at random; "also": other scores, {"value", "stderr"}
    each, which are shown and not compared; "subjects": those of a group.
    points: of each question, see `normalize`.
    output: of lm-eval's simple_evaluate. labels: the cluster of each question; None: they are
    independent. Raises UserError if log-likelihoods or points are not numbers, or if the metric is
    not a mean over questions.
    """
    names = [subtask.task_name for subtask in subtasks(loaded)]
    main, *others = score_keys(task)
    # Points come before scores: score, error and later comparisons are computed from one list, so
    # that none can contradict another.
    raw = {name: points_of(output, name, main, model) for name in names}
    points = normalize(raw, task.num_choices)
    score = score_points([*points.values()], labels)
    shares = _chances(task, loaded, output)
    if shares:
        score["chance"] = 100 * statistics.fmean(
            chain(*normalize(shares, task.num_choices).values())
        )
    if not isinstance(loaded, Group) and (rule := score_without_model(task, loaded, output)):
        score["without_model"] = rule
    if task.num_choices and (isinstance(task.num_choices, int) or score["stderr"] == 0):
        # Wilson's interval of the accuracy: points that are not 0 or 1 have none.
        accuracy = score_points([*raw.values()], labels)
        score |= {
            key: 100 * above_random(accuracy[key] / 100, task.num_choices)
            for key in ("low", "high")
        }
    also: dict[str, Any] = {}
    if isinstance(loaded, Group):
        own = {name: normalize({name: raw[name]}, task.num_choices)[name] for name in names}
        score["subjects"] = {name: score_points([own[name]]) for name in names}
        if not isinstance(task.num_choices, dict):  # else this is the score
            also["mean over subjects"] = average([*score["subjects"].values()])
    # Clipping is not linear, so that this is no mean over questions.
    if task.num_choices:
        parts = score["subjects"].values() if isinstance(task.num_choices, dict) else [score]
        also[CLIPPED] = {"value": statistics.fmean(max(part["value"], 0.0) for part in parts)}
    for other in others:
        each = [points_of(output, name, other, model) for name in names]
        also[other.removesuffix(",none")] = score_points(each, labels)
    if also:
        score["also"] = {
            label: {key: each[key] for key in ("value", "stderr") if key in each}
            for label, each in also.items()
        }
    samples = [{"task": name} | sample for name in names for sample in output["samples"][name]]
    return score, [*chain(*points.values())], samples


def _chances(task: SuiteTask, loaded: Any, output: dict[str, Any]) -> dict[str, list[float]]:
    """Return by subtask the share of right answers among each question's; {} where the metric is no
    such accuracy.

    A task's own code may score choices otherwise, as that of mc2 does.
    """
    shares: dict[str, list[float]] = {}
    for subtask in subtasks(loaded):
        # Only of a plain accuracy is the share of right choices the score of answers at random.
        is_accuracy = subtask.OUTPUT_TYPE == "multiple_choice" and task.metric in ACCURACIES
        if not is_accuracy or subtask.config.process_results is not None:
            return {}
        own = shares[subtask.task_name] = []
        for sample in output["samples"][subtask.task_name]:
            if "acc_mutual_info" in sample["metrics"]:  # its requests have each choice twice
                return {}
            num_right = len({*sample["target"]}) if subtask.multiple_target else 1
            own.append(num_right / len(sample["arguments"]))
    return shares


MIN_CONSTANT, MIN_GAIN = 0.2, 0.2
"""The share of questions that one answer is right for, and the gain over chance of the longest or
shortest choice, from which they are worth a word."""


def score_without_model(
    task: SuiteTask, loaded: Any, output: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the best rule that reads no question, and its score in percent; None if it has little.

    Labels of which one is frequent, and pairs in which the preferred answer is the longer one, are
    scored well by models that learned nothing else.
    """
    if loaded.config.process_results is not None or task.num_choices:
        return None
    samples = [s for s in output["samples"][loaded.task_name] if s["filter"] == task.filter]
    best = None
    if loaded.OUTPUT_TYPE == "generate_until" and task.metric in ("exact_match", "answer_match"):
        best = _constant_answer(samples)
    elif loaded.OUTPUT_TYPE == "multiple_choice" and task.metric in ACCURACIES:
        best = _choice_by_length(samples)
    return best and {"rule": f"always {best[0]}", "value": 100 * best[1] / len(samples)}


def _constant_answer(samples: Sequence[dict[str, Any]]) -> tuple[str, int] | None:
    """Return the most frequent right answer, and for how many questions it is right."""
    answers = Counter(each["target"] for each in samples if isinstance(each["target"], str))
    for answer, num in answers.most_common(1):
        if num > 1 and num >= MIN_CONSTANT * len(samples):
            return repr(short(answer, 30)), num
    return None


def _choice_by_length(samples: Sequence[dict[str, Any]]) -> tuple[str, int] | None:
    """Return the length that most right choices have, and how many have it."""
    rights, chance = Counter[str](), 0.0
    for each in samples:
        choices, right = [choice.strip() for _, choice in each["arguments"]], each["target"]
        if isinstance(right, int) and 0 <= right < len(choices):
            right = choices[right]
        if not isinstance(right, str):
            return None
        sizes = [*map(len, choices)]
        chance += 1 / len(sizes)
        for rule, size in (("longest", max(sizes)), ("shortest", min(sizes))):
            rights[rule] += len(right.strip()) == size and sizes.count(size) == 1
    for rule, num in rights.most_common(1):
        if num - chance >= MIN_GAIN * len(samples):
            return f"the {rule} answer", num
    return None


def cluster_labels(
    task: SuiteTask, questions: list[tuple[Any, dict[str, Any]]]
) -> list[str] | None:
    """Return the cluster of each question, (lm-eval's task, document); None if all are independent.

    The suite's cluster is a field of the questions, or "task". Where it names none, questions of
    one prompt with the same choices are one: a model answers all of them alike, so that repeating a
    question would make any difference significant. Raises UserError if a question has no such
    field.
    """
    labels = []
    # The suite's author knows which questions belong together: a text, a subject.
    if task.cluster:
        for each, doc in questions:
            question = doc | {"task": each.task_name}
            if task.cluster not in question:
                raise UserError(
                    f"{each.task_name}: the suite has cluster: {task.cluster}, but the questions"
                    f" have no field {task.cluster}; write one of {', '.join(map(str, doc))}, or"
                    " task"
                )
            labels.append(str(question[task.cluster]))
        return labels
    with silence(), rendering():
        # without few-shot examples, which may differ between equal questions
        for each, doc in questions:
            if each.OUTPUT_TYPE == "loglikelihood_rolling":
                content = [each.doc_to_target(doc)]
            elif each.OUTPUT_TYPE == "multiple_choice":
                # Of several inputs, as WinoGrande's, the target continues each of them.
                prompt = each.doc_to_target(doc) if each.multiple_input else each.doc_to_text(doc)
                content = [prompt, each.doc_to_choice(doc)]
            else:
                answer = each.doc_to_target(doc) if each.OUTPUT_TYPE == "loglikelihood" else None
                content = [each.doc_to_text(doc), answer]
            labels.append(digest(content))
    return labels if len({*labels}) < len(labels) else None


def points_of(output: dict[str, Any], name: str, key: str, model: str) -> list[float]:
    """Return the points of each question of a task.

    name: the task's. key: lm-eval's, of the metric. Raises UserError if the metric is not a mean
    over questions, or if log-likelihoods or points are no numbers.
    """
    metric, filter_name = key.split(",")
    samples = [sample for sample in output["samples"][name] if sample["filter"] == filter_name]
    responses = [
        resp[0]
        for sample in samples
        for resp in sample["filtered_resps"]
        if isinstance(resp, tuple | list)
    ]
    points = metric_points(samples, metric)
    # The argmax of NaNs is the first choice: a broken model could score 100%. A score may be no
    # number by itself, such as mc2's 0/0, if all log-likelihoods are below -745.
    for kind, numbers in (("log-likelihoods", responses), (f"scores ({metric})", points)):
        if broken := sum(not isfinite(number) for number in numbers):
            raise UserError(
                f"{model}: {broken} of {len(numbers)} {kind} of {name} are not numbers;"
                " check the model's weights, which a diverged training may have broken"
            )
    # Our mean must be lm-eval's own figure. A metric over the whole corpus is no mean over
    # questions, and every paired test below would be wrong for it.
    own = statistics.fmean(
        output["results"][name][f"{part},{filter_name}"] for part in metric.split("+")
    )
    if abs(statistics.fmean(points) - own) > 1e-9:
        raise UserError(f"{name}: {metric} is {NO_MEAN}; {ANOTHER}")
    return points
