"""One model, one suite, through lm-eval.

What makes scores comparable is held fixed here: the suite's own dtype, batch size, seeds and template, and every
prompt's hash is kept.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from lm_eval import simple_evaluate
from lm_eval.api.group import Group
from lm_eval.api.metrics import pooled_sample_stderr
from lm_eval.tasks import TaskManager
from scipy.stats import binomtest

from ..recipe import UserError
from .answering import Answering
from .backends import Setup, folder_of, generation_of, load_tokenizer, refuse_absent
from .journal import Journal, identity
from .quiet import quiet
from .suites import Suite, SuiteTask
from .tasks import Tasks, leaves, load_tasks, scores_of

Z95 = statistics.NormalDist().inv_cdf(0.975)
PACKAGES = ("lm-eval", "transformers", "torch", "datasets")


@dataclass
class Answers:
    """What one model answered, by column, in the order of the questions."""

    settings: dict[str, Any]
    """What another person needs to repeat it."""
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{"value", "stderr", and of a 95% interval "low" and "high", in percent, "n": questions asked}; "also": other
    scores; "subjects": those of a group."""
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """lm-eval's record of every question."""
    points: dict[str, list[float]] = field(default_factory=dict)
    """What each question scored; `value` is 100 times their mean."""
    prompts: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Each question's and prompt's hash: two models are compared only where these are equal."""
    cut: dict[str, int] = field(default_factory=dict)
    """Prompts that were longer than the model's context and lost their beginning."""
    asked: dict[str, int] = field(default_factory=dict)
    """{"now": requests that the model answered, "before": those that a journal had answers to}"""


def evaluate_model(
    model: Any,
    suite: Suite,
    *,
    tokenizer: Any = None,
    tasks: Tasks | None = None,
    backend: str = "hf",
    dtype: str | None = None,
    device: str | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    strict: bool = False,
    num_processes: int = 1,
    cache: Path | None = None,
    on_progress: Callable[[str, int, int], object] | None = None,
    on_score: Callable[[str, dict[str, Any]], object] | None = None,
) -> Answers:
    """Ask a model every question of the suite.

    model: a folder (an adapter's too), a name on the hub, or a loaded model with its `tokenizer`.
    tasks: from `load_tasks`; None loads them. device: torch's word; None is the GPU where there is one.
    dtype, batch_size: None is the suite's. limit: so many questions of each task. strict: no prompt may be cut.
    cache: the folder of all journals; None keeps no answers.
    Raises UserError where the model cannot be loaded, a prompt does not fit (if strict), or an answer is not a number;
    OutOfMemory where a batch does not fit the device.
    """
    refuse_absent(backend)
    name = model if isinstance(model, str | Path) else "the given model"
    if isinstance(model, str | Path):
        model = folder_of(model)
        with quiet():
            tokenizer = tokenizer or load_tokenizer(model)
    elif num_processes > 1:
        raise UserError("a loaded model answers in its own process only; give a folder to use several")
    else:
        device, dtype = model.device.type, str(model.dtype).removeprefix("torch.")
    if suite.apply_chat_template and not tokenizer.chat_template:
        raise UserError(f"{name}: the tokenizer has no chat template; suite {suite.name} needs one")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    setup = Setup(cast(Any, backend), dtype or suite.dtype, device, batch_size or suite.batch_size)
    tasks = tasks or load_tasks(suite)
    known = identity(model, tokenizer, setup)
    lm = Answering(model, tokenizer, setup, Journal(cache, known), num_processes=num_processes, strict=strict)
    answers = Answers(_settings(suite, setup, known, tokenizer, limit) | {"generation": generation_of(model)})
    try:
        for task in suite.tasks:
            lm.num_cut = 0
            lm.on_progress = (
                (lambda done, of, column=task.column: on_progress(column, done, of)) if on_progress else None
            )
            found = _ask(lm, suite, tasks[task.column], limit)
            _take(answers, task, tasks[task.column], found, name)
            if lm.num_cut:
                answers.cut[task.column] = lm.num_cut
            if on_score:
                on_score(task.column, answers.scores[task.column])
    finally:
        lm.close()
    if suite.average:
        answers.scores["average"] = _average(list(answers.scores.values()))
    answers.asked = {"now": lm.num_asked, "before": lm.num_kept}
    return answers


def _ask(lm: Answering, suite: Suite, task: Any, limit: int | None) -> dict[str, Any]:
    """lm-eval's results of one column."""
    seeds = {f"{name}_random_seed": seed for name, seed in suite.seeds.model_dump().items() if name != "random"}
    # These two start git and other programs to describe the machine, slowly and not silently.
    hushed = mock.patch.multiple("lm_eval.evaluator", get_git_commit_hash=mock.DEFAULT, add_env_info=mock.DEFAULT)
    with quiet(), hushed:
        found = cast(Any, simple_evaluate)(  # its decorator hides the signature
            model=lm,
            tasks=[task],
            task_manager=TaskManager(include_defaults=False),
            apply_chat_template=suite.apply_chat_template,
            bootstrap_iters=0,
            limit=limit,
            random_seed=suite.seeds.random,
            **seeds,
        )
    assert found is not None  # only other ranks get nothing
    return found


def _take(answers: Answers, task: SuiteTask, loaded: Any, found: dict[str, Any], model: Any) -> None:
    """Put one column's results where they belong."""
    names = [leaf.task_name for leaf in leaves(loaded)]
    samples = {name: found["samples"][name] for name in names}
    headline, *others = scores_of(task)
    points = {name: _points(samples[name], headline, model, found["results"][name]) for name in names}
    score = _score(list(points.values()))
    if isinstance(loaded, Group):
        each = {name: _score([p]) for name, p in points.items()}
        plain = [s["value"] for s in each.values()]
        stderr = sqrt(sum(s["stderr"] ** 2 for s in each.values())) / len(each)
        score["also"] = {"mean over subjects": {"value": statistics.fmean(plain), "stderr": stderr}}
        score["subjects"] = each
    for other in others:
        also = _score([_points(samples[name], other, model, found["results"][name]) for name in names])
        score.setdefault("also", {})[other.removesuffix(",none")] = {k: also[k] for k in ("value", "stderr")}
    asked = [s for name in names for s in samples[name] if s["filter"] == headline.split(",")[1]]
    answers.samples[task.column] = [{"task": name} | s for name in names for s in samples[name]]
    answers.points[task.column] = [p for each in points.values() for p in each]
    answers.prompts[task.column] = [(s["doc_hash"], s["prompt_hash"]) for s in asked]
    answers.scores[task.column] = score
    answers.settings["task_versions"][task.column] = found["versions"][
        loaded.name if isinstance(loaded, Group) else names[0]
    ]
    answers.settings["num_fewshot"][task.column] = found["n-shot"][names[0]]


def _points(samples: list[dict], score: str, model: Any, found: dict[str, Any]) -> list[float]:
    """What each question scored."""
    metric, filter_name = score.split(",")
    asked = [s for s in samples if s["filter"] == filter_name]
    numbers = [answer[0] for s in asked for answer in s["filtered_resps"] if isinstance(answer, tuple | list)]
    broken = sum(not isfinite(number) for number in numbers)
    if broken:  # argmax of NaNs is the first choice: a broken model could score 100%
        raise UserError(
            f"{model}: {broken} of {len(numbers)} log-likelihoods of {found['alias'].strip(' -')} are not numbers;"
            " its weights are broken, as after a training that diverged"
        )
    points = [float(s[metric]) for s in asked]
    if abs(statistics.fmean(points) - found[score]) > 1e-9:
        raise UserError(f"{found['alias']}: {metric} is no mean over questions; only such metrics can be compared")
    return points


def _score(points: list[list[float]]) -> dict[str, Any]:
    """In percent, over all questions of a column's tasks. The standard error is lm-eval's: of independent questions.

    The 95% interval is Wilson's where answers are right or wrong: four wrong answers of four do not prove 0.0 ± 0.0.
    """
    errors = [statistics.stdev(p) / sqrt(len(p)) if len(p) > 1 else 0.0 for p in points]
    sizes = [len(p) for p in points]
    stderr = errors[0] if len(points) == 1 else float(pooled_sample_stderr(errors, sizes))
    every = [value for p in points for value in p]
    value, n = statistics.fmean(every), len(every)
    if {0.0, 1.0}.issuperset(every):
        low, high = binomtest(int(sum(every)), n).proportion_ci(method="wilson")
    else:
        low, high = max(value - Z95 * stderr, 0.0), min(value + Z95 * stderr, 1.0)
    return {"value": 100 * value, "stderr": 100 * stderr, "low": 100 * low, "high": 100 * high, "n": n}


def _average(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain mean of the columns."""
    value, stderr = (
        statistics.fmean(s["value"] for s in scores),
        sqrt(sum(s["stderr"] ** 2 for s in scores)) / len(scores),
    )
    return {"value": value, "stderr": stderr, "low": value - Z95 * stderr, "high": value + Z95 * stderr}


def _settings(suite: Suite, setup: Setup, known: dict[str, Any], tokenizer: Any, limit: int | None) -> dict[str, Any]:
    first = (tokenizer("x")["input_ids"] or [None])[0]
    return {
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "task_versions": {},
        "num_fewshot": {},
        "metrics": {task.column: scores_of(task)[0] for task in suite.tasks},
        "seeds": suite.seeds.model_dump(),
        "limit": limit,
        "batch_size": setup.batch_size,
        "chat_template": suite.apply_chat_template,
        "bos": first is not None and first == tokenizer.bos_token_id,
        "dtype": setup.dtype,
        "device": known["device"],
        "backend": setup.backend,
    }
