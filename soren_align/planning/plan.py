"""The plan of a recipe as plain data: examples, steps, learning rates, parameter groups, memory, FLOPs, requests.

The model is built from its config alone, without weights; examples are tokenized where they are available. Neither a
GPU nor, for the shipped recipes, the hub is needed: what is unknown without them is left out, with a notice.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..data import Account
from ..errors import UserError, as_user_error
from ..evaluate.suites import suite_of
from ..files import default_cache_folder
from ..optim import build_optimizer, route, routing_table, share_notices
from ..recipe import Recipe, few_steps, trains_adapter
from ..run_folder import RunFolder
from ..sharding.ranks import Ranks
from ..trainers import adapters, build
from ..trainers.freezing import refuse_unmatched
from ..trainers.training_setup import check_attention
from ..trainers.trl_arguments import trl_arguments
from . import offline
from .blocks import build_model, kinds_of_blocks
from .compute import UNBOUNDED_LENGTH, compute, joined_sequences
from .disk import disk
from .inputs import Inputs, count_frozen, load_inputs, on_this_machine
from .processes import processes
from .schedule import Schedule, schedule
from .update_sizes import TYPICAL_WEIGHT, update_dtype, update_sizes

LONG_SEQUENCE = 8192
"""Tokens of a joined micro-batch from which a notice is given: there attention is 30% of the FLOPs of Qwen2.5-3B's
blocks, 67 of 221 MFLOP per token."""
NO_GPU = "no GPU here: training on this machine needs trainer.use_cpu: true"


def plan_training(
    recipe: Recipe,
    on_examples: Callable[[int], object] | None = None,
    num_ranks: int = 1,
    on_compared: Callable[[int], object] | None = None,
) -> tuple[dict[str, Any], Account | None]:
    """The plan, and the account of the data if its examples can be read.

    on_examples, on_compared: called with the number of examples just tokenized, or compared with the evaluation's
    questions, for a progress bar. num_ranks: processes.
    """
    local = on_this_machine(recipe)
    with tempfile.TemporaryDirectory() as scratch:  # the run folder stays as it is
        inputs = load_inputs(local, RunFolder(scratch), on_examples)
        args: Any = trl_arguments(local, Path(scratch), Ranks())

    def build_outline(blocks: Sequence[int] | None = None, dtype: torch.dtype = torch.float32) -> Any:
        frozen = () if recipe.model.lora else recipe.model.freeze
        outline = build_model(inputs.config, blocks, dtype, frozen, recipe.model.attn_implementation)
        if blocks is None:
            refuse_unmatched(outline, recipe.model.freeze)
        return adapters.add_empty_adapter(outline, recipe, inputs.start)

    with torch.device("meta"), as_user_error(f"model {recipe.model.name_or_path}"):
        table = routing_table(routes := _routes(recipe, model := build_outline()))
    steps = schedule(recipe, args, inputs.num_sequences, num_ranks)
    kinds = kinds_of_blocks(model)
    costs = compute(recipe, build_outline, kinds, inputs.account, steps.global_batch_size, args.max_length)
    ranks = processes(recipe, routes, count_frozen(recipe, model), num_ranks, costs)
    questions, more_notices, problems = _checked_evaluation(recipe, inputs, on_compared)
    notices = _notices(recipe, inputs, args, few_steps(recipe, steps.total, num_ranks), costs.failure)
    plan = {
        "task": recipe.task,
        "model": _model(recipe, model),
        "data": _data(recipe, inputs, steps),
        "steps": steps.as_json(args),
        "learning_rates": steps.shown_rates(args),
        "optimizer": recipe.optimizer.model_dump(exclude_none=True),
        "optimizer_description": recipe.optimizer.description,
        "routing": table,
        **_update_sizes(recipe, inputs, routes, steps),
        "processes": ranks,
        "compute": costs.as_json(recipe, ranks, steps.total),
        "evaluation": _evaluation(recipe, questions),
        "files": _files(recipe, args),
        "disk": disk(recipe, args, model, ranks, steps.total),
        "notices": [*notices, *share_notices(recipe.optimizer.name, table), *more_notices],
        "problems": problems,
    }
    return plan, inputs.account


def _routes(recipe: Recipe, model: Any) -> Any:
    """Return `optim.route` of a model. Raises UserError if the optimizer cannot be built for it."""
    with as_user_error("optimizer", ValueError):
        routes = route(model, recipe.optimizer.aux, recipe.optimizer.matrices)
        build_optimizer(model, **build.optimizer_settings(recipe))
    return routes


def _model(recipe: Recipe, model: Any) -> dict[str, Any]:
    return {
        "name_or_path": recipe.model.name_or_path,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def _data(recipe: Recipe, inputs: Inputs, steps: Schedule) -> dict[str, Any]:
    account = inputs.account
    streamed = offline.streamed(recipe.data, steps.total * steps.global_batch_size) if recipe.data.streaming else None
    if inputs.ready is None or account is None:
        weights = [f"(weight {s.weight:g})" if s.weight != 1 else None for s in recipe.data.sources]
        parts = zip(recipe.data.sources, weights, strict=True)
        names = [" ".join(filter(None, (s.path, s.name, s.split, weight))) for s, weight in parts]
        source = {"path": " + ".join(names)}
        return {"source": source, "num_examples": inputs.num_examples, "is_tokenized": False, "streamed": streamed}
    split = inputs.ready.splits["train"]
    return {
        "streamed": streamed,
        "source": split.source,
        "is_tokenized": True,
        "is_streamed": inputs.ready.stream is not None,
        "layout": split.layout,
        "num_examples": split.num_examples,
        "num_kept": account.num_kept,
        "num_kept_by_source": list(account.num_kept_by_source),
        "dropped": split.dropped | account.dropped,
        "eval": inputs.ready.held_out,
        "num_tokens": account.num_tokens,
        "num_truncated": account.num_truncated,
        "num_truncated_tokens": account.num_truncated_tokens,
        "num_unknown_tokens": account.num_unknown_tokens,
        "packing": inputs.ready.packing.as_json() if inputs.ready.packing else None,
        "token_length_percentiles": account.lengths,
        "trained_token_share": account.trained_share,
        "stop_token_trained": account.stop_token_trained,
        "example": [{"text": text, "trained": trained} for text, trained in account.example],
    }


def _update_sizes(recipe: Recipe, inputs: Inputs, routes: Any, steps: Schedule) -> dict[str, Any]:
    has_adapter = trains_adapter(recipe.model)
    weight = None if has_adapter else getattr(inputs.config, "initializer_range", None) or TYPICAL_WEIGHT
    return {
        "update_sizes": update_sizes(recipe, routes, steps.rates, weight),
        "update_dtype": update_dtype(recipe),
        "typical_weight": weight,
    }


def _evaluation(recipe: Recipe, questions: dict[str, Any]) -> dict[str, Any] | None:
    """Requests per model; evaluated are the trained model and its starting models, of which there is one at least."""
    if recipe.eval is None:
        return None
    tasks = suite_of(recipe.eval).tasks
    limit = recipe.eval.limit
    requests = None if limit or any(t.requests is None for t in tasks) else sum(t.requests or 0 for t in tasks)
    return {
        "suite": recipe.eval.suite,
        "num_tasks": len(tasks),
        "limit": limit,
        "columns": [task.column for task in tasks],
        "has_average": suite_of(recipe.eval).average,
        "num_models": 2,
        "num_requests_per_model": requests,
        **questions,
    }


def _checked_evaluation(
    recipe: Recipe, inputs: Inputs, on_compared: Callable[[int], object] | None
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return (`num_questions` and `contamination`, notices and problems of the check before training).

    The models are not checked.
    """
    result: dict[str, Any] = {"num_questions": None, "contamination": None}
    if recipe.eval is None or inputs.ready is None:
        return result, [], []
    from ..evaluate import stage  # imports lm-eval, which takes seconds
    from ..evaluate.question_texts import overlaps_with, question_texts
    from ..evaluate.tasks import num_questions

    try:
        tasks, notices = stage.preflight_of_training(recipe.eval, recipe.model, inputs.start, inputs.ready.tokenizer)
    except UserError as error:
        return result, [], [f"training would not start, because of its evaluation: {each}" for each in error.problems]
    sizes = (size for task in tasks.values() for size in num_questions(task).values())
    result["num_questions"] = sum(min(size, recipe.eval.limit or size) for size in sizes)
    if not recipe.eval.contamination:
        return result, notices, []
    if recipe.data.streaming:
        reason = "contamination is not checked: the training examples are a stream (data.streaming)"
        return result, [*notices, reason], []
    texts = question_texts(tasks, recipe.eval.limit)
    overlaps = overlaps_with(inputs.ready.splits["train"].dataset, texts, default_cache_folder(), on_compared)
    return result | {"contamination": overlaps.by_column()}, notices, []


def _files(recipe: Recipe, args: Any) -> list[str]:
    folder = RunFolder(recipe.run.output_dir)
    limit = f", the last {args.save_total_limit} kept" if args.save_total_limit else ""
    steps = f"{args.save_steps:g} steps" if args.save_steps >= 1 else f"{args.save_steps:.3g} of all steps"
    strategies = {"steps": f"every {steps}", "epoch": "every epoch", "best": "at the best so far"}
    saved = strategies.get(str(args.save_strategy.value), "none during training") + limit
    files = [str(folder.recipe), str(folder.path / "run.json"), str(folder.metrics)]
    files += [f"{folder.start} (random starting weights)"] if recipe.model.init_seed is not None else []
    files += [str(folder.samples)] if recipe.run.samples else []
    files += [f"{folder.checkpoints} ({saved})", str(folder.model)]
    files += [str(folder.evaluation(recipe.eval.name))] if recipe.eval else []
    return files


def _notices(recipe: Recipe, inputs: Inputs, args: Any, few: str | None, failure: str | None) -> list[str]:
    notices = [*inputs.notices, *([few] if few else [])]
    if recipe.trainer.get("packing") and not inputs.account:
        notices.append("trainer.packing makes fewer and longer sequences: the number of steps is an upper bound")
    elif args.max_length is None and not inputs.account:
        notices.append(
            f"trainer.max_length is null: activations and FLOPs are for examples of {UNBOUNDED_LENGTH:,} tokens, "
            "a guess"
        )
    num_joined = joined_sequences(recipe)
    if num_joined > 1 and args.max_length and num_joined * args.max_length >= LONG_SEQUENCE:
        notices.append(
            f"without flash attention, the {num_joined} sequences of a micro-batch are one of "
            f"{num_joined * args.max_length:,} tokens, whose attention is computed between all of them: lower "
            "per_device_train_batch_size, or write model.attn_implementation: flash_attention_2"
        )
    try:
        check_attention(recipe, inputs.config)
    except UserError as error:
        notices.append(f"training would not start here: {error}")
    if recipe.run.early_stopping:
        notices.append("run.early_stopping may end training earlier: the steps are at most these")
    if failure:
        notices.append(f"activations and FLOPs are unknown for this architecture: {failure}")
    if on_this_machine(recipe).trainer.get("use_cpu") != recipe.trainer.get("use_cpu"):
        notices.append(NO_GPU)
    return notices
