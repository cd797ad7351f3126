"""Whether two recipes train the same weights: the condition for resuming a run."""

import hashlib
import json
from typing import Any

from .sections import Recipe

# Keys of `trainer` that do not change the trained weights: logging, evaluation and saving may change at a resume. With
# run.early_stopping, evaluation does change them.
_EVALUATION = {"eval_strategy", "eval_steps", "eval_on_start", "eval_delay"}
_NO_EFFECT_ON_WEIGHTS = {
    "logging_steps",
    "logging_first_step",
    "logging_strategy",
    "save_steps",
    "save_strategy",
    "save_total_limit",
    "report_to",
    "run_name",
    "project",
    "trackio_space_id",
    "trackio_bucket_id",
    "trackio_static_space_id",
    "hub_private_repo",
}


def training_part(recipe: Recipe) -> dict[str, Any]:
    """The part of the recipe that determines the trained weights: a run resumes only with an equal one."""
    part = recipe.model_dump(include={"task", "model", "data", "optimizer", "trainer"})
    part["run"] = recipe.run.model_dump(include={"parallel", "global_batch_size", "early_stopping"})
    del part["data"]["cache"], part["data"]["retention"]
    evaluation = part["data"].pop("eval") or {}
    if "path" not in evaluation and evaluation:  # the other examples are trained on
        part["data"]["eval"] = evaluation
    if recipe.data.streaming:  # refused and dropped examples are equal up to the first one, which ends the run
        sources = part["data"]["train"]
        for source in sources if isinstance(sources, list) else [sources]:
            del source["bad_examples"]
    ignored = _NO_EFFECT_ON_WEIGHTS if recipe.run.early_stopping else _NO_EFFECT_ON_WEIGHTS | _EVALUATION
    part["trainer"] = {k: v for k, v in part["trainer"].items() if k not in ignored}
    return part


def recipe_hash(recipe: Recipe) -> str:
    """A hash of `training_part` without the optimizer: equal for runs that differ in the optimizer alone."""
    part = {key: value for key, value in training_part(recipe).items() if key != "optimizer"}
    return hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()[:16]


def differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> list[str]:
    """Where two nested dicts differ: ['optimizer.lr: 0.003 there, 0.001 here', ...]."""
    lines = []
    for key in sorted(there.keys() | here.keys()):
        a, b = there.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a!r} there, {b!r} here")
    return lines
