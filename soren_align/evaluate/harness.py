"""One model, one suite, through lm-eval in this process.

What makes scores comparable is held fixed here: float32, the suite's own batch size, seeds and template, no cache
(lm-eval's is not keyed by the model: a second model would get the first one's answers), and every prompt's hash kept.
"""

import statistics
import tempfile
from dataclasses import dataclass
from importlib import metadata
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..recipe import UserError
from .quiet import quiet
from .suites import Suite, SuiteTask
from .tasks import task_manager

PACKAGES = ("lm-eval", "transformers", "torch", "datasets")


@dataclass(frozen=True)
class Answers:
    """What one model answered, by column, in the order of the questions."""

    scores: dict[str, dict[str, Any]]
    """{"value": percent, "stderr": percent, "n": questions asked}"""
    samples: dict[str, list[dict[str, Any]]]
    """lm-eval's record of every question."""
    points: dict[str, list[float]]
    """What each question scored; `value` is 100 times their mean."""
    prompts: dict[str, list[tuple[str, str]]]
    """Each question's and prompt's hash: two models are compared only where these are equal."""
    settings: dict[str, Any]
    """What another person needs to repeat it."""


def evaluate_model(
    model_path: str | Path, suite: Suite, *, device: str | None = None, batch_size: int | None = None
) -> Answers:
    """Ask the model in a folder (or on the hub) every question of the suite.

    device: torch's word; None is the GPU where there is one. batch_size: None is the suite's.
    Raises UserError where the model cannot be loaded, a prompt does not fit, or an answer is not a number.
    """
    batch_size = batch_size or suite.batch_size
    seeds = {f"{name}_random_seed": seed for name, seed in suite.seeds.model_dump().items() if name != "random"}
    with quiet() as warned, tempfile.TemporaryDirectory() as folder:
        lm = _load(str(model_path), suite, device or ("cuda" if torch.cuda.is_available() else "cpu"), batch_size)
        # These two start git and other programs to describe the machine, slowly and not silently.
        with mock.patch.multiple("lm_eval.evaluator", get_git_commit_hash=mock.DEFAULT, add_env_info=mock.DEFAULT):
            found = cast(Any, simple_evaluate)(  # its decorator hides the signature
                model=lm,
                tasks=[task.task for task in suite.tasks],
                task_manager=task_manager(suite, Path(folder)),
                apply_chat_template=suite.apply_chat_template,
                bootstrap_iters=0,
                random_seed=suite.seeds.random,
                **seeds,
            )
    cut = [message for message in warned if "runcat" in message]
    if cut:
        raise UserError(f"{model_path}: a prompt of suite {suite.name} does not fit the model: {cut[0]}")
    assert found is not None  # only other ranks get nothing
    samples, scores, points, prompts = {}, {}, {}, {}
    for task in suite.tasks:
        asked = [s for s in found["samples"][task.task] if s["filter"] == task.filter]
        samples[task.column] = asked
        points[task.column] = _points(asked, task, model_path, found["results"][task.task])
        prompts[task.column] = [(s["doc_hash"], s["prompt_hash"]) for s in asked]
        scores[task.column] = _score(points[task.column])
    return Answers(scores, samples, points, prompts, _settings(suite, found, lm, batch_size))


def _load(model_path: str, suite: Suite, device: str, batch_size: int) -> Any:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{model_path}: not a model that can be loaded: {str(error).strip().splitlines()[0]}"
        ) from error
    model, info = loaded
    absent = sorted(info["missing_keys"])
    if absent:  # transformers would draw them at random and go on
        raise UserError(f"{model_path}: weights are missing: {', '.join(absent[:3])} ({len(absent)} in all)")
    if suite.apply_chat_template and not tokenizer.chat_template:
        raise UserError(f"{model_path}: the tokenizer has no chat template; suite {suite.name} needs one")
    return cast(Any, HFLM)(pretrained=model.to(device), tokenizer=tokenizer, batch_size=batch_size)


def _points(asked: list[dict], task: SuiteTask, model_path: str | Path, found: dict[str, Any]) -> list[float]:
    """What each question scored."""
    answers = [answer for s in asked for answer in s["filtered_resps"]]
    numbers = [answer[0] for answer in answers if isinstance(answer, tuple | list)]
    broken = sum(not isfinite(number) for number in numbers)
    if broken:  # argmax of NaNs is the first choice: a broken model could score 100%
        raise UserError(
            f"{model_path}: {broken} of {len(numbers)} log-likelihoods of {task.column} are not numbers;"
            " its weights are broken, as after a training that diverged"
        )
    points = [float(s[task.metric]) for s in asked]
    if abs(statistics.fmean(points) - found[f"{task.metric},{task.filter}"]) > 1e-9:
        raise UserError(f"{task.column}: {task.metric} is no mean over questions; only such metrics can be compared")
    return points


def _score(points: list[float]) -> dict[str, Any]:
    """In percent. The standard error is that of a mean of independent questions."""
    stderr = statistics.stdev(points) / sqrt(len(points)) if len(points) > 1 else 0.0
    return {"value": 100 * statistics.fmean(points), "stderr": 100 * stderr, "n": len(points)}


def _settings(suite: Suite, found: Any, lm: Any, batch_size: int) -> dict[str, Any]:
    first = lm.tokenizer("x")["input_ids"][0]
    return {
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "task_versions": {task.column: found["versions"][task.task] for task in suite.tasks},
        "num_fewshot": {task.column: found["n-shot"][task.task] for task in suite.tasks},
        "metrics": {task.column: f"{task.metric},{task.filter}" for task in suite.tasks},
        "seeds": suite.seeds.model_dump(),
        "batch_size": batch_size,
        "chat_template": suite.apply_chat_template,
        "bos": first == lm.tokenizer.bos_token_id,
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "device": lm.device.type,
    }
