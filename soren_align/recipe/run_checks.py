"""Checks of keys inside `run` against other keys, and of the metric that runs are compared by."""

from collections.abc import Iterator
from typing import Any

from .. import shipped
from ..errors import UserError, did_you_mean
from ..files import local_path
from ..yaml_reader import Key
from .parallel import parallel

METRICS = {"sft": ["loss", "mean_token_accuracy", "entropy"]}
METRICS["pretrain"] = ["loss"]
METRICS["dpo"] = [*METRICS["sft"], "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"]
METRICS["dpo"] += ["logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected"]
"""By task: the values of an evaluation during training. tests/trainers/test_early_stopping.py compares."""
PROMPT_FILES = (".txt", ".jsonl")


def evaluation_needed(evaluation: Any, strategy: Any) -> str | None:
    """The problem of a key that is for evaluations during training. evaluation: data.eval. strategy: eval_strategy."""
    if evaluation is None:
        return "needs evaluations during training; add data.eval"
    if strategy in ("no", False):
        return "needs evaluations during training; write trainer.eval_strategy: steps or epoch"
    return None


def metric_problems(task: Any, metric: Any) -> Iterator[str]:
    """The problems of trainer.metric_for_best_model."""
    known = METRICS.get(task) if isinstance(task, str) else None
    if known and isinstance(metric, str) and metric.removeprefix("eval_") not in known:
        yield f"found {metric!r}; write one of {', '.join(known)}{did_you_mean(metric.removeprefix('eval_'), known)}"


def sample_problems(prompts: str | None, parallel_name: str | None) -> Iterator[tuple[Key, str]]:
    """(key in run.samples, message) for each problem. prompts: a file; None for a list."""
    if prompts is not None:
        file = shipped.resolve(prompts)
        if file.suffix not in PROMPT_FILES:
            yield ("prompts",), f"found {prompts!r}; write a list of texts, or a file ({' or '.join(PROMPT_FILES)})"
        elif not local_path(file).is_file():
            yield ("prompts",), f"there is no file {prompts!r}"
    try:
        config = parallel(parallel_name or "ddp")
    except UserError:  # reported at run.parallel
        return
    if config.kind == "fsdp2" or (config.kind == "zero" and config.stage == 3):
        yield (), f"run.parallel {parallel_name} shards the weights, and no process could answer; leave samples out"
