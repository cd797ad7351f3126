"""Evaluate one model on one suite with lm-eval, and show the progress.

All that makes scores comparable is fixed here: the suite's dtype, batch size, seeds and chat
template. The hash of every prompt is recorded.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jinja2 import TemplateError
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ...core.errors import UserError
from ...core.patches import patched
from ...core.silence import silence
from ..stats.intervals import average
from ..stats.paired import ModelAnswers
from ..stats.points import CLIPPED
from ..stats.scores import cluster_labels, score_column
from ..suite.sandbox import rendering, scoring
from ..suite.suites import Suite, SuiteTask
from ..suite.tasks import Tasks, load_tasks, score_keys, subtasks
from .backends import BackendSettings, generation_settings, require_backend
from .models import load_tokenizer, model_folder
from .requests import RequestDispatcher, ResponseCache, cache_key
from .workers import InProcess, WorkerPool

EQUAL_QUESTIONS = "questions of equal prompt and choices"
"""The name, in the settings, of the cluster of a column whose questions are repeated."""
PACKAGES = ("soren-align", "lm-eval", "transformers", "torch", "datasets")


class ProgressDisplay(Progress):
    """Shows one model's progress; a context manager, while which the bar is visible."""

    def __init__(self, name: str, console: Console):
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.name = name
        self.bar = self.add_task(f"{name}: reading model files", total=None)
        self.column_start = time.monotonic()
        self.is_cached = True
        """Whether all responses of the current column came from the cache."""

    def on_progress(self, column: str, done: int, total: int) -> None:
        """Update the bar: `done` of a column's requests have responses."""
        self.is_cached = self.is_cached and done == total
        self.update(self.bar, description=f"{self.name} {column}", completed=done, total=total)

    def on_score(self, column: str, score: dict[str, Any]) -> None:
        """Print a column's score and the seconds it took."""
        seconds, self.column_start = time.monotonic() - self.column_start, time.monotonic()
        value = f"{score['value']:.1f} ± {score['stderr']:.1f}"
        duration = "cached" if self.is_cached else f"{seconds:.1f} s"
        self.is_cached = True
        line = f"{self.name:<20} {column:<16} {value:>12}   {score['n']:,} questions, {duration}"
        self.console.print(line, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is evaluated."""

    backend: Literal["hf", "vllm"] = "hf"
    device: str | None = None
    """The device, as in torch.device. None: the GPU if there is one."""
    limit: int | None = None
    """Only the first questions of each task."""
    strict: bool = False
    """A truncated prompt is an error."""
    num_processes: int = 1
    chat_template: str | None = None
    """Renders the prompts, if the suite applies a chat template; "": they are plain text. None: the
    tokenizer's."""
    cache: Path | None = None
    """The cache folder; None caches nothing."""


@dataclass
class ModelResults(ModelAnswers):
    """The results of one model, by column, in the order of the questions."""

    eos_token_id: Any = None
    """The tokens of the model's generation config that end a generated text."""
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """See `score_column`, and "average"."""
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """lm-eval's samples."""
    num_requests: dict[str, int] = field(default_factory=dict)
    """{"computed": by the model, "cached": responses from the cache}"""

    def add(self, task: SuiteTask, loaded: Any, output: dict[str, Any], model: str) -> None:
        """Add one column.
        loaded: lm-eval's task or group. output: of lm-eval's simple_evaluate. model: its name.
        """
        # Clusters come before scores: errors and intervals of the scores depend on them.
        answers = [
            (subtask, sample)
            for subtask in subtasks(loaded)
            for sample in output["samples"][subtask.task_name]
        ]
        labels = cluster_labels(
            task, [(s, sample["doc"]) for s, sample in answers if sample["filter"] == task.filter]
        )
        score, points, samples = score_column(task, loaded, output, model, labels)
        questions = [sample for sample in samples if sample["filter"] == task.filter]
        self.scores[task.column], self.points[task.column] = score, points
        self.samples[task.column] = samples
        self.prompt_hashes[task.column] = [(q["doc_hash"], q["prompt_hash"]) for q in questions]
        if labels:
            self.clusters[task.column] = labels
            self.settings["clusters"][task.column] = task.cluster or EQUAL_QUESTIONS
        # lm-eval's word for a file without metadata.version
        if (version := output["versions"][task.task]) != "Yaml":
            self.settings["task_versions"][task.column] = version
        self.settings["num_fewshot"][task.column] = output["n-shot"][subtasks(loaded)[0].task_name]


def evaluate_model(
    model: str | Path,
    suite: Suite,
    options: Options | None = None,
    *,
    tasks: Tasks | None = None,
    display: ProgressDisplay | None = None,
) -> ModelResults:
    """Return the results of a model on all questions of a suite.

    model: a folder (an adapter's too), or a name on the hub. tasks: from `load_tasks`; None loads
    them. Raises UserError if the model cannot be loaded, a prompt does not fit (if strict), or a
    score is not a number; OutOfMemory if a batch does not fit the device's memory.
    """
    options = options or Options()
    require_backend(options.backend)
    name = str(model)
    # Template and device are known before the weights are read.
    with silence():
        folder = model_folder(model)
        tokenizer = load_tokenizer(folder)
    if options.chat_template == "":
        suite = suite.model_copy(update={"apply_chat_template": False})
    if suite.apply_chat_template and options.chat_template is not None:
        tokenizer.chat_template = options.chat_template
    if suite.apply_chat_template and not tokenizer.chat_template:
        raise UserError(
            f"{name}: has no chat template, but suite {suite.name} applies one; choose a suite with"
            " apply_chat_template: false"
        )
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and options.num_processes > torch.cuda.device_count():
        raise UserError(
            f"{options.num_processes} processes need {options.num_processes} GPUs, but "
            f"{torch.cuda.device_count()} are visible; write a smaller --processes"
        )
    # Everything that can change a response is in the key of the cache: weights, configs, template,
    # dtype, batch size, device and versions (tests/evaluate/test_answering.py).
    settings = BackendSettings(options.backend, suite.dtype, device, suite.batch_size)
    device_name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    tasks = tasks or load_tasks(suite)
    key = cache_key(folder, settings, device_name) if options.cache else {}
    cache = ResponseCache(options.cache, key, folder)
    source = folder, tokenizer, settings
    workers = (
        InProcess(*source)
        if options.num_processes == 1
        else WorkerPool(options.num_processes, *source)
    )
    lm = RequestDispatcher(workers, tokenizer, settings, cache, strict=options.strict)
    # What must be equal in all rows of a table, and what a reader needs to make it again.
    generation, eos_token_id = generation_settings(folder)
    reported = {
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "task_versions": {},
        "num_fewshot": {},
        "metrics": {task.column: score_keys(task)[0] for task in suite.tasks},
        "clusters": {},
        "seeds": suite.seeds.model_dump(),
        "limit": options.limit,
        "batch_size": settings.batch_size,
        "chat_template": suite.apply_chat_template,
        "dtype": settings.dtype,
        "device": device_name,
        "backend": settings.backend,
        "generation_config": generation,
    }
    if normalized := {task.column: task.num_choices for task in suite.tasks if task.num_choices}:
        reported["num_choices"] = {
            c: n if isinstance(n, int) else "by subtask" for c, n in normalized.items()
        }
    results = ModelResults(reported, eos_token_id=eos_token_id)
    # Ask column by column, so that a failure names its column. lm-eval formats and scores the
    # questions; `lm` answers them from the cache or by the workers.
    try:
        for task in suite.tasks:
            lm.label, lm.num_truncated = f"{name}: {task.column}", 0
            if display:
                lm.on_progress = partial(display.on_progress, task.column)
            output = run_lm_eval(lm, suite, [tasks[task.column]], limit=options.limit)
            results.add(task, tasks[task.column], output, name)
            if lm.num_truncated:
                results.truncated[task.column] = lm.num_truncated
            if display:
                display.on_score(task.column, results.scores[task.column])
    finally:
        lm.workers.close()
    # Whether prompts begin with a BOS token: two models that differ here answer other prompts.
    prompt = next(iter(results.samples.values()))[0]["arguments"][0][0]
    tokens = tokenizer(prompt)["input_ids"]
    results.settings["bos"] = bool(tokens) and tokens[0] == tokenizer.bos_token_id
    if suite.average:
        columns = list(results.scores.values())
        results.scores["average"] = average(columns)
        if normalized:
            clipped = statistics.fmean(
                score.get("also", {}).get(CLIPPED, score)["value"] for score in columns
            )
            results.scores["average"]["also"] = {CLIPPED: {"value": clipped}}
    results.num_requests = {"computed": lm.num_computed, "cached": lm.num_cached}
    return results


def run_lm_eval(
    lm: RequestDispatcher, suite: Suite, tasks: list[Any], *, limit: int | None = None
) -> dict[str, Any]:
    """Return lm-eval's output for the tasks of one column.

    limit: only the first questions of each task. lm-eval seeds the generators of random, numpy and
    torch.
    """
    # lm-eval draws few-shot examples by these seeds. Its own data parallelism would draw others on
    # each rank: our workers get requests, and know nothing of questions.
    seeds = {
        f"{name}_random_seed": seed
        for name, seed in suite.seeds.model_dump().items()
        if name != "random"
    }
    without_git = patched("lm_eval.evaluator.get_git_commit_hash", lambda: None)
    without_machine = patched("lm_eval.evaluator.add_env_info", lambda results: None)
    try:
        with silence(), without_git, without_machine, scoring(suite.seeds), rendering():
            output = cast(Callable[..., Any], simple_evaluate)(  # its decorator hides the signature
                model=lm,
                tasks=tasks,
                task_manager=TaskManager(include_defaults=False),
                # few-shot examples are then turns of the conversation
                apply_chat_template=suite.apply_chat_template,
                # Errors are computed from the points; with 0 lm-eval 0.4.13 reports each as "N/A".
                bootstrap_iters=0,
                limit=limit,
                random_seed=suite.seeds.random,
                **seeds,
            )
    except TemplateError as error:
        raise UserError(
            f"{lm.label}: a template of the task cannot be rendered: {error}; correct the task file"
        ) from None
    assert output is not None
    return output
