"""The plan of a recipe as plain data: examples, steps, learning rates, parameter groups, memory, FLOPs, requests.

The model is built from its config alone, without weights; examples are tokenized where they are available. Neither a
GPU nor, for the shipped recipes, the hub is needed: what is unknown without them is left out, with a notice.
"""

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import get_scheduler

from ..core.errors import UserError, as_user_error
from ..core.files import default_cache_folder
from ..data import DatasetStats
from ..evaluate.suite.suites import suite_of
from ..optim import ADAMW_RMS, OPTIMIZERS, Route, build_optimizer, route, routing_table, share_notices, ulp
from ..recipe import Recipe, accumulation, compute_dtype, few_steps, global_batch, parallel, trains_adapter
from ..run.folder import RunFolder
from ..sharding.ranks import Ranks
from ..training import adapters, build
from ..training.adapters import refuse_unmatched
from ..training.setup import check_attention, trl_arguments
from . import offline
from .flops import UNBOUNDED_LENGTH, build_model, compute, joined_sequences, kinds_of_blocks
from .inputs import Inputs, count_frozen, load_inputs, on_this_machine
from .memory import FLOAT32, ITEMSIZE
from .step import processes

# The disk space of a run folder: the model, the checkpoints and random starting weights, without tokenizers.

_OF_THE_OPTIMIZER = ("optimizer states", "float32 master weights", "Kahan compensation")
"""Components of a rank's memory that a checkpoint contains beside the weights."""


def disk(recipe: Recipe, args: Any, model: Any, ranks: dict[str, Any], num_steps: int) -> dict[str, int]:
    """Return the bytes of the model, of one checkpoint and of the start, and how many checkpoints are left at the end.

    args: TRL's config. model: the outline. ranks: the plan's section "processes".
    """
    has_adapter = trains_adapter(recipe.model)
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad or not has_adapter)
    own_dtype = str(getattr(model.config, "dtype", None) or "float32").removeprefix("torch.")
    saved = FLOAT32 if has_adapter else ITEMSIZE[recipe.run.save_dtype or own_dtype]
    weights = numel * (FLOAT32 if has_adapter else ITEMSIZE[recipe.model.dtype])
    kind, stage = parallel(recipe.run.parallel).kind, parallel(recipe.run.parallel).stage
    if kind == "zero":  # DeepSpeed saves the weights that it computes with, twice unless they are sharded
        weights = numel * ITEMSIZE[compute_dtype(recipe)] * (1 if stage == 3 else 2)
    elif kind == "fsdp2":
        weights = numel * FLOAT32
    num_shards = 1 if kind == "ddp" else ranks["num_processes"]
    states = sum(part["num_bytes"] for part in ranks["memory"] if part["name"] in _OF_THE_OPTIMIZER)
    return {
        "model_bytes": numel * saved,
        "checkpoint_bytes": weights + num_shards * states,
        "num_checkpoints": _num_checkpoints(args, num_steps),
        "start_bytes": numel * FLOAT32 if recipe.model.init_seed is not None else 0,
    }


def _num_checkpoints(args: Any, num_steps: int) -> int:
    """Return the number of checkpoints that are left at the end; transformers saves the last step too."""
    strategy = str(args.save_strategy.value)
    if strategy == "no":
        return 0
    every = args.save_steps if args.save_steps >= 1 else max(1, math.ceil(args.save_steps * num_steps))
    number = math.ceil(num_steps / every) if strategy == "steps" else math.ceil(args.num_train_epochs)
    return min(number, args.save_total_limit or number)


# The size of the updates of a schedule, compared with the spacing of the weights' dtype, before any training.
#
# With `adjust_lr_fn: match_rms_measured` the update of a matrix has a root mean square (RMS) of 0.2 lr. With the other
# scales it is at most about lr x scale x level / sqrt(max(m, n)), since a map sends ordinary singular values to one
# level, and less where the momentum has singular values below the map's reach. The measured values of a run are in its
# metrics.jsonl.

TYPICAL_WEIGHT = 0.02
"""Where a config has no initializer_range."""


def update_dtype(recipe: Recipe) -> str:
    """The dtype that weights are updated in; Kahan compensation is as good as float32, and adapters are float32."""
    is_sharded = parallel(recipe.run.parallel).kind != "ddp"
    is_wide = is_sharded or trains_adapter(recipe.model) or recipe.optimizer.compensation == "kahan"
    return "float32" if is_wide else recipe.model.dtype


def update_sizes(
    recipe: Recipe, routes: Sequence[Route], rates: Sequence[dict[str, float]], weight: float | None
) -> list[dict[str, Any]]:
    """One dict per shape of the matrices, and one for all other parameters (AdamW).

    rates: both learning rates of each step. weight: a typical one; None for an adapter, whose factors have none: one
    starts at 0. Without it the last three are None.
    "update_rms": of a step at the peak learning rate. "update_sum": the sum of update_rms over all steps, an upper
    bound of the change. "ulps": update_rms over the spacing of update_dtype at `weight`; below 1/2, rounding loses most
    of it. "relative_update": update_sum over `weight`. "bfloat16_ulps": update_sum over the spacing of bfloat16, the
    dtype of saved models.
    """
    dtype = getattr(torch, update_dtype(recipe))
    num_tensors = defaultdict(int)
    for r in routes:
        is_spectral = r.rule == "spectral" and recipe.optimizer.name != "adamw"
        if is_spectral:
            num_tensors["spectral", r.matrix] += r.num_matrices
        else:
            num_tensors["adamw", None] += 1
    sizes = []
    for (rule, shape), number in sorted(num_tensors.items(), key=lambda item: item[0][0] == "adamw"):
        key = "lr" if rule == "spectral" or recipe.optimizer.name == "adamw" else "aux_lr"
        factor = _rms(recipe, shape) if shape else ADAMW_RMS
        peak, total = (factor * reduce(rate[key] for rate in rates) for reduce in (max, sum))
        sizes.append(
            {
                "rule": rule,
                "shape": shape,
                "tensors": number,
                "update_rms": peak,
                "update_sum": total,
                "ulps": peak / ulp(weight, dtype) if weight else None,
                "relative_update": total / weight if weight else None,
                "bfloat16_ulps": total / ulp(weight, torch.bfloat16) if weight else None,
            }
        )
    return sizes


def _rms(recipe: Recipe, shape: tuple[int, ...]) -> float:
    """Of the update of a matrix at learning rate 1."""
    name: Any = recipe.optimizer.name
    optimizer = OPTIMIZERS[name]
    adjust_lr_fn = getattr(recipe.optimizer, "adjust_lr_fn", "none")
    scale = optimizer.lr_scale(adjust_lr_fn, *shape)
    return scale if adjust_lr_fn == "match_rms_measured" else scale * _map_level(recipe, shape) / math.sqrt(max(shape))


def _map_level(recipe: Recipe, shape: tuple[int, ...]) -> float:
    """The map's value for an ordinary singular value; for the released map its largest mean, on a flat spectrum."""
    spectral_map = recipe.optimizer.spectral_map
    if spectral_map and spectral_map.level:
        return spectral_map.level(shape[0], shape[1], **recipe.optimizer.map_settings)
    return OPTIMIZERS[recipe.optimizer.name].map_level


# Optimizer steps and learning rates of a recipe, as transformers computes them.


@dataclass(frozen=True)
class Schedule:
    """The steps of a training run."""

    global_batch_size: int
    per_epoch: int | None
    """None for a stream, whose examples are not counted."""
    total: int
    rates: list[dict[str, float]]
    """{"step", "lr", "aux_lr"} of every step, from 1."""

    def as_json(self, args: Any) -> dict[str, Any]:
        """The plan's section "steps". args: TRL's config."""
        return {
            "global_batch_size": self.global_batch_size,
            "per_epoch": self.per_epoch,
            "total": self.total,
            "num_epochs": self.per_epoch and round(self.total / self.per_epoch, 2),
            "lr_scheduler_type": str(args.lr_scheduler_type.value),
            "num_warmup_steps": args.get_warmup_steps(self.total),
        }

    def shown_rates(self, args: Any) -> list[dict[str, float]]:
        """Of the first step, the end of the warm-up, the middle and the last step."""
        shown = {1, args.get_warmup_steps(self.total) + 1, self.total // 2, self.total}
        return [rate for rate in self.rates if rate["step"] in shown]


def schedule(recipe: Recipe, args: Any, num_sequences: int, num_ranks: int) -> Schedule:
    """The schedule of a recipe on `num_ranks` processes. args: TRL's config. num_sequences: of an epoch."""
    batch_size, _ = global_batch(recipe, num_ranks)
    per_device, accumulated = args.per_device_train_batch_size, accumulation(recipe, num_ranks)
    if recipe.data.streaming:
        return Schedule(batch_size, None, args.max_steps, _rates(recipe, args, args.max_steps))
    per_epoch = steps_per_epoch(num_sequences, per_device, accumulated, num_ranks)
    total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return Schedule(batch_size, per_epoch, total, _rates(recipe, args, total))


def steps_per_epoch(num_examples: int, per_device: int, accumulation: int, num_ranks: int) -> int:
    """Optimizer steps, as transformers counts them: the last, smaller batches of an epoch still make a step.

    accelerate assigns whole micro-batches to the ranks, and completes the last round with the first examples.
    """
    batches = math.ceil(math.ceil(num_examples / per_device) / num_ranks)
    return math.ceil(batches / accumulation)


def _rates(recipe: Recipe, args: Any, num_steps: int) -> list[dict[str, float]]:
    peaks = [recipe.optimizer.lr, recipe.optimizer.aux_lr or recipe.optimizer.lr]
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in peaks], lr=peaks[0])
    with as_user_error("trainer.lr_scheduler_type", ValueError, TypeError, ArithmeticError):
        scheduler: Any = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            args.get_warmup_steps(num_steps),
            num_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs or {},
        )
    # One that follows the loss is planned without any decrease.
    follows_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    rates = []
    for step in range(1, num_steps + 1):
        lr, aux_lr = (group["lr"] for group in optimizer.param_groups)
        rates.append({"step": step, "lr": lr, "aux_lr": aux_lr})
        optimizer.step()
        if not follows_loss:
            scheduler.step()
    return rates


LONG_SEQUENCE = 8192
"""Tokens of a joined micro-batch from which a notice is given: there attention is 30% of the FLOPs of Qwen2.5-3B's
blocks, 67 of 221 MFLOP per token."""
NO_GPU = "no GPU here: training on this machine needs trainer.use_cpu: true"


def plan_training(
    recipe: Recipe,
    on_examples: Callable[[int], object] | None = None,
    num_ranks: int = 1,
    on_compared: Callable[[int], object] | None = None,
) -> tuple[dict[str, Any], DatasetStats | None]:
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
    from ..evaluate.run import stage  # imports lm-eval, which takes seconds
    from ..evaluate.stats.contamination import overlaps_with, question_texts
    from ..evaluate.suite.tasks import num_questions

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
