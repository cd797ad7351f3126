"""The plan of a recipe as plain data: examples, steps, memory, FLOPs and requests.

The model is built from its config alone, without weights; examples are tokenized where they are
available. Neither a GPU nor, for the shipped recipes, the hub is needed: what is unknown without
them is left out, with a notice.
"""

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import get_scheduler

from ..core.errors import UserError, as_user_error
from ..core.extras import is_installed
from ..core.optimizer_settings import MATCH_RMS
from ..data import DatasetStats
from ..evaluate.suite.suites import suite_of
from ..optim import OPTIMIZERS, build_optimizer, route, routing_table, share_notices, ulp
from ..recipe import (
    Recipe,
    accumulation,
    compute_dtype,
    drops_last,
    few_steps,
    global_batch,
    left_out,
    parallel,
    trains_adapter,
)
from ..recipe.model import missing_extras
from ..run.folder import RunFolder
from ..sharding.ranks import Ranks
from ..training import build
from ..training.setup import check_attention, trl_arguments
from . import offline
from .flops import UNBOUNDED_LENGTH, compute, joined_sequences, kinds_of_blocks
from .inputs import Inputs, count_frozen, load_inputs, on_this_machine, outline
from .memory import FLOAT32, ITEMSIZE
from .step import processes
from .strategies import GPU_BYTES, fastest, strategies

_OF_THE_OPTIMIZER = ("optimizer states", "float32 master weights", "Kahan compensation")
"""Components of a rank's memory that a checkpoint contains beside the weights."""
TYPICAL_WEIGHT = 0.02
"""The size of a weight where a config has no initializer_range."""
LONG_SEQUENCE = 8192
"""Tokens of a joined micro-batch from which a notice is given: there attention is 30% of the FLOPs
of Qwen2.5-3B's blocks, 67 of 221 MFLOP per token."""
NO_GPU = "this machine has no GPU; to train on this machine, write trainer.use_cpu: true"


def plan_training(
    recipe: Recipe,
    on_examples: Callable[[int, int], object] | None = None,
    num_ranks: int = 1,
    gpu_bytes: float | None = None,
) -> tuple[dict[str, Any], DatasetStats | None]:
    """The plan, and the account of the data if its examples can be read.

    on_examples: called with the number of examples just tokenized, for a progress bar. num_ranks:
    processes. gpu_bytes: of each GPU's memory; None: GPU_BYTES.
    """
    # Read the data as training reads them, into a scratch folder: a plan must not change a run.
    local = on_this_machine(recipe)
    with tempfile.TemporaryDirectory() as scratch:  # the run folder stays as it is
        inputs = load_inputs(local, RunFolder(scratch), on_examples)
        args: Any = trl_arguments(local, Path(scratch), Ranks())

    # The model and its optimizer without memory for weights or states. Building the optimizer
    # makes training's own checks of routing and settings.
    build_outline = partial(outline, recipe, inputs.config, inputs.start)
    with torch.device("meta"), as_user_error(f"model {recipe.model.name_or_path}"):
        model = build_outline()
        with as_user_error("optimizer", ValueError):
            routes = route(model, **recipe.optimizer.routing)
            # Built and dropped: it raises if the optimizer does not suit this model.
            build_optimizer(model, **build.optimizer_settings(recipe))
        table = routing_table(routes)
    # Steps, then what each costs: passes measured on small models of the architecture, the
    # optimizer's step computed from shapes.
    steps, rates = _schedule(recipe, args, inputs.num_sequences, num_ranks)
    total = steps["total"]
    shown_steps = {1, steps["num_warmup_steps"] + 1, total // 2, total}
    kinds = kinds_of_blocks(model)
    costs = compute(
        recipe, build_outline, kinds, inputs.account, steps["global_batch_size"], args.max_length
    )
    frozen = count_frozen(recipe, model)
    ranks = processes(recipe, routes, frozen, num_ranks, costs)
    gpu_bytes = gpu_bytes or GPU_BYTES
    choices = strategies(recipe, routes, frozen, costs, num_ranks, total, gpu_bytes)
    # Whether the evaluation after training could run: known now, not after hours.
    evaluation, more_notices, problems = _evaluation(recipe, inputs)
    about_steps = [
        few_steps(recipe, total, num_ranks),
        left_out(recipe, inputs.num_sequences, num_ranks),
    ]
    notices = _notices(recipe, inputs, args, about_steps, costs.failure)
    plan = {
        "task": recipe.task,
        "model": {
            "name_or_path": recipe.model.name_or_path,
            "num_parameters": sum(p.numel() for p in model.parameters()),
            "num_trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        },
        "data": _data(recipe, inputs, total * steps["global_batch_size"]),
        "steps": steps,
        "learning_rates": [rate for rate in rates if rate["step"] in shown_steps],
        "optimizer": recipe.optimizer.model_dump(exclude_none=True),
        "optimizer_description": recipe.optimizer.description,
        "routing": table,
        **_update_sizes(recipe, inputs, routes, rates),
        "processes": ranks,
        "compute": costs.as_json(recipe, ranks, total),
        "parallel": recipe.run.parallel,
        "strategies": [asdict(choice) for choice in choices],
        "fastest": fastest(choices) if choices else "ddp",
        "gpu_memory_bytes": round(gpu_bytes),
        "evaluation": evaluation,
        **_files(recipe, args, model, ranks, total),
        "notices": [*notices, *share_notices(recipe.optimizer.name, table), *more_notices],
        "problems": problems,
    }
    return plan, inputs.account


def _schedule(
    recipe: Recipe, args: Any, num_sequences: int, num_ranks: int
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Return the plan's section "steps", and {"step", "lr", "aux_lr"} of every step from 1, as
    transformers has them.

    args: TRL's config. num_sequences: of an epoch; those of a stream are not counted, and an epoch
    has no steps.
    """
    # A stream has no epochs: max_steps alone ends it (`recipe.checks`).
    batch_size, _ = global_batch(recipe, num_ranks)
    accumulated, per_epoch, total = accumulation(recipe, num_ranks), None, args.max_steps
    if not recipe.data.streaming:
        per_device = args.per_device_train_batch_size
        drops = drops_last(recipe, num_ranks)
        per_epoch = steps_per_epoch(num_sequences, per_device, accumulated, num_ranks, drops)
        total = total if total > 0 else math.ceil(args.num_train_epochs * per_epoch)
    num_warmup_steps = args.get_warmup_steps(total)

    # transformers' own scheduler steps a dummy optimizer, so that no formula of a schedule is ours.
    peaks = [recipe.optimizer.lr, recipe.optimizer.aux_lr or recipe.optimizer.lr]
    optimizer = torch.optim.SGD(
        [{"params": [torch.zeros(1)], "lr": lr} for lr in peaks], lr=peaks[0]
    )
    with as_user_error("trainer.lr_scheduler_type", ValueError, TypeError, ArithmeticError):
        settings = args.lr_scheduler_kwargs or {}
        scheduler: Any = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps,
            total,
            scheduler_specific_kwargs=settings,
        )
    # One that follows the loss is planned without any decrease.
    follows_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    rates = []
    for step in range(1, total + 1):
        lr, aux_lr = (group["lr"] for group in optimizer.param_groups)
        rates.append({"step": step, "lr": lr, "aux_lr": aux_lr})
        optimizer.step()
        if not follows_loss:
            scheduler.step()
    steps = {
        "global_batch_size": batch_size,
        "per_epoch": per_epoch,
        "total": total,
        "num_epochs": per_epoch and round(total / per_epoch, 2),
        "lr_scheduler_type": str(args.lr_scheduler_type.value),
        "num_warmup_steps": num_warmup_steps,
    }
    return steps, rates


def steps_per_epoch(
    num_examples: int, per_device: int, accumulation: int, num_ranks: int, drops_last: bool = False
) -> int:
    """Optimizer steps, as transformers counts them: the last, smaller batches of an epoch still
    make a step.

    accelerate assigns whole micro-batches to the ranks. Its last round is completed, or with
    drops_last left out.
    """
    # An incomplete micro-batch is one, and so is an incomplete round of the ranks.
    rounds = num_examples / (per_device * num_ranks)
    return math.ceil((math.floor(rounds) if drops_last else math.ceil(rounds)) / accumulation)


def _data(recipe: Recipe, inputs: Inputs, num_trained: int) -> dict[str, Any]:
    account = inputs.account
    streamed = offline.streamed(recipe.data, num_trained) if recipe.data.streaming else None
    if inputs.ready is None or account is None:
        weights = [f"(weight {s.weight:g})" if s.weight != 1 else None for s in recipe.data.sources]
        parts = zip(recipe.data.sources, weights, strict=True)
        names = [" ".join(filter(None, (s.path, s.name, s.split, weight))) for s, weight in parts]
        source = {"path": " + ".join(names)}
        return {
            "source": source,
            "num_examples": inputs.num_examples,
            "is_tokenized": False,
            "streamed": streamed,
        }
    split = inputs.ready.splits.train
    return {
        "streamed": streamed,
        "source": split.source,
        "is_tokenized": True,
        "is_streamed": inputs.ready.stream is not None,
        "prepared_seconds": round(inputs.seconds, 1),
        "layout": split.layout,
        "num_examples": split.num_examples,
        "num_kept": account.num_kept,
        "num_kept_by_source": list(account.num_kept_by_source),
        "dropped": split.dropped | account.dropped,
        "eval": asdict(inputs.ready.held_out) if inputs.ready.held_out else None,
        "num_tokens": account.num_tokens,
        "num_truncated": account.num_truncated,
        "num_truncated_tokens": account.num_truncated_tokens,
        "num_unknown_tokens": account.num_unknown_tokens,
        "pairs": asdict(account.pairs) if account.pairs else None,
        "labels": asdict(account.labels) if account.labels else None,
        "packing": asdict(inputs.ready.packing) if inputs.ready.packing else None,
        "token_length_percentiles": account.lengths,
        "trained_token_share": account.trained_share,
        "stop_token_trained": account.stop_token_trained,
        "example": [{"text": text, "trained": trained} for text, trained in account.example],
    }


def _update_sizes(
    recipe: Recipe, inputs: Inputs, routes: Any, rates: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """The size of the updates of a schedule, compared with the spacing of the weights' dtype,
    before any training.

    With `adjust_lr_fn: match_rms_measured` the update of a matrix has a root mean square (RMS) of
    0.2 lr. With the other scales it is at most about lr x scale x level / sqrt(max(m, n)), since a
    map sends ordinary singular values to one level, and less where the momentum has singular values
    below the map's reach. The measured values of a run are in its metrics.jsonl.

    rates: both learning rates of each step. Returns {"update_sizes", "update_dtype",
    "typical_weight"}: sizes per shape of the matrices, and of all other parameters (AdamW).
    "update_rms": of a step at the peak learning rate. "update_sum": the sum of update_rms over all
    steps, an upper bound of the change. "ulps":
    update_rms over the spacing of update_dtype at the typical weight; below 1/2, rounding loses
    most of it. "relative_update": update_sum over that weight. "bfloat16_ulps": update_sum over the
    spacing of bfloat16, the dtype of saved models. An adapter has no typical weight, since one of
    its factors starts at 0, and none of the last three.
    """
    section, has_adapter = recipe.optimizer, trains_adapter(recipe.model)
    name: Any = section.name
    optimizer, adjust_lr_fn = OPTIMIZERS[name], getattr(section, "adjust_lr_fn", "none")
    weight = (
        None if has_adapter else getattr(inputs.config, "initializer_range", None) or TYPICAL_WEIGHT
    )
    # Kahan compensation is as good as float32, and adapters and shards are float32.
    is_wide = (
        has_adapter
        or section.compensation == "kahan"
        or parallel(recipe.run.parallel).kind != "ddp"
    )
    update_dtype = "float32" if is_wide else recipe.model.dtype
    dtype = getattr(torch, update_dtype)
    num_tensors = defaultdict(int)
    for r in routes:
        if r.rule == "spectral" and name != "adamw":
            for shape, number in r.matrix_shapes.items():
                num_tensors["spectral", shape] += number
        else:
            num_tensors["adamw", None] += 1
    # One entry per shape: all matrices of a shape have updates of one size.
    sizes = []
    for (rule, shape), number in sorted(
        num_tensors.items(), key=lambda item: item[0][0] == "adamw"
    ):
        key = "lr" if rule == "spectral" or name == "adamw" else "aux_lr"
        # The update RMS at learning rate 1.
        match_rms = getattr(section, "rms", MATCH_RMS)
        factor = (
            optimizer.lr_scale(adjust_lr_fn, *shape, match_rms=match_rms) if shape else MATCH_RMS
        )
        if shape and adjust_lr_fn != "match_rms_measured":
            # An ordinary singular value's; for the released map its largest mean, on a flat
            # spectrum.
            level = optimizer.map_level
            if section.spectral_map and section.spectral_map.level:
                level = section.spectral_map.level(shape[0], shape[1], **section.map_settings)
            factor = factor * level / math.sqrt(max(shape))
        peak, total = (factor * reduce(rate[key] for rate in rates) for reduce in (max, sum))
        size: dict[str, Any] = {"rule": rule, "shape": shape, "tensors": number}
        size |= {"update_rms": peak, "update_sum": total}
        size["ulps"] = peak / ulp(weight, dtype) if weight else None
        size["relative_update"] = total / weight if weight else None
        size["bfloat16_ulps"] = total / ulp(weight, torch.bfloat16) if weight else None
        sizes.append(size)
    return {"update_sizes": sizes, "update_dtype": update_dtype, "typical_weight": weight}


def _evaluation(
    recipe: Recipe, inputs: Inputs
) -> tuple[dict[str, Any] | None, list[str], list[str]]:
    """Return the plan's section, and notices and problems of the check before training; the models
    are not checked.

    Requests are per model; evaluated are the trained model and its starting models, of which there
    is one at least.
    """
    if recipe.eval is None:
        return None, [], []
    suite, limit = suite_of(recipe.eval), recipe.eval.limit
    # A suite of ours states its numbers of requests; those of others are known once their data are
    # loaded.
    is_counted = not limit and all(task.requests is not None for task in suite.tasks)
    section: dict[str, Any] = {
        "suite": recipe.eval.suite,
        "num_tasks": len(suite.tasks),
        "limit": limit,
        "columns": [task.column for task in suite.tasks],
        "has_average": suite.average,
        "num_models": 2,
        "num_requests_per_model": (
            sum(task.requests or 0 for task in suite.tasks) if is_counted else None
        ),
        "num_questions": None,
    }
    # Without the hub there are no questions either. `_notices` has a missing lm-eval.
    if inputs.ready is None or not is_installed("lm_eval"):
        return section, [], []
    from ..evaluate.run import stage  # imports lm-eval, which takes seconds
    from ..evaluate.suite.tasks import num_questions

    try:
        tasks, notices = stage.preflight(
            recipe.eval, recipe.model, inputs.start, inputs.ready.tokenizer
        )
    except UserError as error:
        reason = "training would not start, because its evaluation cannot run"
        return section, [], [f"{reason}: {problem}" for problem in error.problems]
    sizes = (size for task in tasks.values() for size in num_questions(task).values())
    section["num_questions"] = sum(min(size, limit or size) for size in sizes)
    return section, notices, []


def _files(
    recipe: Recipe, args: Any, model: Any, ranks: dict[str, Any], num_steps: int
) -> dict[str, Any]:
    """Return {"files", "disk"}: what the run folder will hold, and the bytes of its weights,
    without tokenizers.

    The bytes are those of the model, of one checkpoint, of which "num_checkpoints" are left at the
    end, and of random starting weights. args: TRL's config. model: the outline. ranks: the plan's
    section "processes".
    """
    folder, has_start = RunFolder(recipe.run.output_dir), recipe.model.init_seed is not None
    strategy, every, limit = str(args.save_strategy.value), args.save_steps, args.save_total_limit
    steps = f"{every:g} steps" if every >= 1 else f"{every:.3g} of all steps"
    strategies = {"steps": f"every {steps}", "epoch": "every epoch", "best": "at the best so far"}
    saved = strategies.get(strategy, "none during training") + (
        f", the last {limit} kept" if limit else ""
    )
    files = [str(folder.recipe), str(folder.path / "run.json"), str(folder.metrics)]
    files += [f"{folder.start} (random starting weights)"] if has_start else []
    files += [str(folder.samples)] if recipe.run.samples else []
    files += (
        [str(folder.spectra)]
        if recipe.run.log_spectra.steps and recipe.optimizer.spectral_map
        else []
    )
    files += [f"{folder.checkpoints} ({saved})", str(folder.model)]
    files += [str(folder.evaluation(recipe.eval.name))] if recipe.eval else []

    # transformers counts checkpoints as it saves them: by steps, epochs, and the limit of those
    # kept.
    num_checkpoints = 0
    if strategy != "no":  # transformers saves the last step too
        every = every if every >= 1 else max(1, math.ceil(every * num_steps))
        number = (
            math.ceil(num_steps / every)
            if strategy == "steps"
            else math.ceil(args.num_train_epochs)
        )
        num_checkpoints = min(number, limit or number)
    has_adapter, mode = trains_adapter(recipe.model), parallel(recipe.run.parallel)
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad or not has_adapter)
    own_dtype = str(getattr(model.config, "dtype", None) or "float32").removeprefix("torch.")
    weights = numel * (
        FLOAT32 if has_adapter or mode.kind == "fsdp2" else ITEMSIZE[recipe.model.dtype]
    )
    # DeepSpeed saves the weights that it computes with unless they are sharded; transformers a copy
    if mode.kind == "zero":
        num_copies = (mode.stage < 3) + bool(has_adapter or recipe.run.benchmark)
        weights = numel * ITEMSIZE[compute_dtype(recipe)] * num_copies
    # Every rank writes its own shards of the states; replicas are written once.
    num_shards = 1 if mode.kind == "ddp" else ranks["num_processes"]
    states = sum(part["num_bytes"] for part in ranks["memory"] if part["name"] in _OF_THE_OPTIMIZER)
    disk = {
        "model_bytes": (
            numel * (FLOAT32 if has_adapter else ITEMSIZE[recipe.run.save_dtype or own_dtype])
        ),
        "checkpoint_bytes": weights + num_shards * states,
        "num_checkpoints": num_checkpoints,
        "start_bytes": numel * FLOAT32 if has_start else 0,
    }
    return {"files": files, "disk": disk}


def _notices(
    recipe: Recipe, inputs: Inputs, args: Any, about_steps: list[str | None], failure: str | None
) -> list[str]:
    notices = [*inputs.notices, *filter(None, about_steps)]
    if recipe.trainer.get("packing") and not inputs.account:
        notices.append(
            "trainer.packing makes fewer and longer sequences, so the number of steps is an upper"
            " bound"
        )
    elif args.max_length is None and not inputs.account:
        notices.append(
            "trainer.max_length is null: activations and FLOPs are those of examples with a"
            f" guessed length of {UNBOUNDED_LENGTH:,} tokens"
        )
    num_joined = joined_sequences(recipe)
    if num_joined > 1 and args.max_length and num_joined * args.max_length >= LONG_SEQUENCE:
        notices.append(
            f"without flash attention, the {num_joined} sequences of a micro-batch are one sequence"
            f" of {num_joined * args.max_length:,} tokens, and attention is computed between all"
            " tokens; lower trainer.per_device_train_batch_size, or write"
            " model.attn_implementation: flash_attention_2"
        )
    lacking = missing_extras(recipe)
    try:
        check_attention(recipe, inputs.config)
    except UserError as error:
        lacking.append(str(error))
    notices += [f"training would not start on this machine: {problem}" for problem in lacking]
    if recipe.run.early_stopping:
        notices.append(
            "run.early_stopping may end training earlier, so the number of steps is an upper bound"
        )
    if failure:
        notices.append(f"activations and FLOPs are unknown for this architecture: {failure}")
    if on_this_machine(recipe).trainer.get("use_cpu") != recipe.trainer.get("use_cpu"):
        notices.append(NO_GPU)
    return notices
