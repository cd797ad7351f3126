"""One model, one suite, through lm-eval.

What makes scores comparable is held fixed here: the suite's own dtype, batch size, seeds and template, and every
prompt's hash is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from jinja2 import TemplateError
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from ..errors import UserError
from ..silence import silence
from .backends import Setup, folder_of, generation_of, load_tokenizer, refuse_absent
from .cache import Journal, identity
from .requests import Answering
from .sandbox import rendering
from .scores import average, score_column
from .suites import Suite
from .tasks import Tasks, leaves, load_tasks, scores_of
from .workers import Here, Several

PACKAGES = ("soren-align", "lm-eval", "transformers", "torch", "datasets")


@dataclass
class Answers:
    """What one model answered, by column, in the order of the questions."""

    settings: dict[str, Any]
    """What another person needs to repeat it; rows of a table have the same."""
    ends: Any = None
    """Token ids with which the model ends an answer, by its generation config."""
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """See `score_column`, and "average"."""
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """lm-eval's record of every question."""
    points: dict[str, list[float]] = field(default_factory=dict)
    """What each question scored; a score is 100 times their mean."""
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

    model: a folder (an adapter's too), a name on the hub, or a loaded model with its `tokenizer`, whose answers are
    not kept. tasks: from `load_tasks`; None loads them. device: torch's word; None is the GPU where there is one.
    dtype, batch_size: None is the suite's. limit: so many questions of each task. strict: no prompt may be cut.
    cache: the folder of all journals; None keeps no answers.
    Raises UserError where the model cannot be loaded, a prompt does not fit (if strict), or an answer is not a number;
    OutOfMemory where a batch does not fit the device.
    """
    refuse_absent(backend)
    live = not isinstance(model, str | Path)
    name = "the given model" if live else str(model)
    if live:
        if num_processes > 1:
            raise UserError("a loaded model answers in its own process only; give a folder to use several")
        device, dtype = model.device.type, str(model.dtype).removeprefix("torch.")
    else:
        assert tokenizer is None, "a folder has its own tokenizer"
        with silence():
            model = folder_of(model)
            tokenizer = load_tokenizer(model)
    if suite.apply_chat_template and not tokenizer.chat_template:
        raise UserError(f"{name}: the tokenizer has no chat template; suite {suite.name} needs one")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and num_processes > torch.cuda.device_count():
        raise UserError(f"{num_processes} processes need as many GPUs, and {torch.cuda.device_count()} can be seen")
    full_name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    setup = Setup(cast(Any, backend), dtype or suite.dtype, device, batch_size or suite.batch_size)
    tasks = tasks or load_tasks(suite, cache)
    journal = Journal(None, {}) if live or cache is None else Journal(cache, identity(model, setup, full_name))
    what = model, tokenizer, setup
    workers = Here(*what) if num_processes == 1 else Several(num_processes, *what)
    lm = Answering(workers, tokenizer, setup, journal, strict=strict)
    generation, ends = generation_of(model)
    answers = Answers(_settings(suite, setup, full_name, limit) | {"generation": generation}, ends)
    was_training = live and model.training
    try:
        for task in suite.tasks:
            loaded = tasks[task.column]
            lm.begin(
                f"{name}: {task.column}",
                (lambda done, of, column=task.column: on_progress(column, done, of)) if on_progress else None,
            )
            found = _ask(lm, suite, loaded, limit)
            score, points, samples = score_column(task, loaded, found, name)
            asked = [s for s in samples if s["filter"] == task.filter]
            answers.scores[task.column], answers.points[task.column] = score, points
            answers.samples[task.column] = samples
            answers.prompts[task.column] = [(s["doc_hash"], s["prompt_hash"]) for s in asked]
            answers.settings["task_versions"][task.column] = found["versions"][task.task]
            answers.settings["num_fewshot"][task.column] = found["n-shot"][leaves(loaded)[0].task_name]
            if lm.num_cut:
                answers.cut[task.column] = lm.num_cut
            if on_score:
                on_score(task.column, score)
    finally:
        workers.close()
        if was_training:
            model.train()  # lm-eval leaves it in eval mode
    first = tokenizer(next(iter(answers.samples.values()))[0]["arguments"][0][0])["input_ids"]
    answers.settings["bos"] = bool(first) and first[0] == tokenizer.bos_token_id
    if suite.average:
        answers.scores["average"] = average(list(answers.scores.values()))
    answers.asked = {"now": lm.num_asked, "before": lm.num_kept}
    return answers


def _ask(lm: Answering, suite: Suite, task: Any, limit: int | None) -> dict[str, Any]:
    """lm-eval's results of one column."""
    seeds = {f"{name}_random_seed": seed for name, seed in suite.seeds.model_dump().items() if name != "random"}
    # These two start git and other programs to describe the machine, slowly and not silently.
    hushed = mock.patch.multiple("lm_eval.evaluator", get_git_commit_hash=mock.DEFAULT, add_env_info=mock.DEFAULT)
    try:
        with silence(), hushed, rendering():
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
    except TemplateError as error:
        raise UserError(f"{lm.asking}: a template of the task cannot be rendered: {error}") from None
    assert found is not None  # only other ranks get nothing
    return found


def _settings(suite: Suite, setup: Setup, device: str, limit: int | None) -> dict[str, Any]:
    return {
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "task_versions": {},
        "num_fewshot": {},
        "metrics": {task.column: scores_of(task)[0] for task in suite.tasks},
        "seeds": suite.seeds.model_dump(),
        "limit": limit,
        "batch_size": setup.batch_size,
        "chat_template": suite.apply_chat_template,
        "dtype": setup.dtype,
        "device": device,
        "backend": setup.backend,
    }
