"""The cost and memory of one of several processes, computed without starting any: the plan for `--processes N`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..optim import Route
from ..optim.eight_bits import SMALL
from ..optim.map_batches import default_workspace_mb
from ..optim.storage import Storages
from ..recipe import (
    Parallel,
    Recipe,
    accumulation,
    as_adamw,
    compute_dtype,
    global_batch,
    parallel,
    trainer_value,
    trains_adapter,
)
from .compute import Compute
from .memory import ITEMSIZE, Component, Location, Phase, StepSettings
from .sizes import ModelSizes
from .step_cost import StepCost, step_cost

NOT_INCLUDED = (
    "temporarily gathered weights (up to 2 GB under ZeRO 3), padding, fragmentation of the allocator; on GPUs about "
    "0.5 GB of CUDA and 0.5 to 1.5 GB of NCCL"
)
NOT_INCLUDED_ON_CPU = (
    "padding, the process itself, about 0.7 GB (Python, torch, TRL), the pages of weight files while they load"
)
"""Measured: the peak of the quickstart, whose model has 100,000 parameters, is 0.68 GB (Linux, torch 2.13)."""
LOCATIONS: tuple[Location, ...] = ("device", "cpu")
PHASES: tuple[Phase, ...] = ("forward_backward", "optimizer_step")


@dataclass(frozen=True)
class Frozen:
    """Parameters that are not trained: how many numbers, and their bytes."""

    numel: int
    num_bytes: int


def processes(
    recipe: Recipe, routes: Sequence[Route], frozen: Frozen, num_ranks: int, costs: Compute
) -> dict[str, Any]:
    """The plan's section "processes"."""
    strategy = parallel(recipe.run.parallel)
    cost = _step_cost(recipe, routes, frozen, num_ranks, costs)
    with_adamw = _step_cost(_with_adamw(recipe), routes, frozen, num_ranks, costs)
    num_rows = max((min(r.matrix) for r in routes if r.rule == "spectral"), default=0)
    flops = {"busiest_rank": cost.flops_busiest_rank, "all_ranks": cost.flops_all_ranks}
    global_batch_size, factors = global_batch(recipe, num_ranks)
    is_on_cpu = bool(recipe.trainer.get("use_cpu"))
    return {
        "num_processes": num_ranks,
        "parallel": _parallel_name(strategy),
        "global_batch_size": global_batch_size,
        "global_batch_size_factors": factors,
        "global_batch_size_is_set": recipe.run.global_batch_size is not None,
        "num_matrices": cost.num_matrices,
        "num_frozen_parameters": frozen.numel,
        "num_exchanged_matrices": cost.num_exchanged,
        "max_over_mean_flops": cost.max_over_mean_flops and round(cost.max_over_mean_flops, 4),
        "map_flops": flops if cost.flops_all_ranks else None,
        "map_precision": recipe.optimizer.map_precision(num_rows, not recipe.trainer.get("use_cpu")),
        "bytes_sent": {"max": cost.bytes_sent_max, "mean": round(cost.bytes_sent_mean)},
        "gradient_bytes_sent": _gradient_bytes_sent(recipe, strategy, routes, num_ranks),
        "memory": [part._asdict() for part in cost.memory],
        "memory_total": _totals(cost, costs),
        "memory_total_adamw": _totals(with_adamw, costs),
        "memory_saved": _saved(recipe, cost, costs, has_adapter=trains_adapter(recipe.model)),
        "memory_not_included": NOT_INCLUDED_ON_CPU if is_on_cpu else NOT_INCLUDED,
        "is_on_cpu": is_on_cpu,
    }


def _gradient_bytes_sent(recipe: Recipe, strategy: Parallel, routes: Sequence[Route], num_ranks: int) -> dict[str, Any]:
    """Bytes that each rank sends per optimizer step to average the gradients, in a ring, and their dtype."""
    settings = _settings(recipe, trains_adapter(recipe.model))
    dtype = {2: "bfloat16", 4: "float32"}[settings.weight_bytes]
    if strategy.kind != "ddp":
        dtype = strategy.gradient_dtype(settings.compute_dtype)
    # DDP and stage 1 once a step, the others after each micro-batch; an all-reduce is a reduce-scatter and a gather.
    num_times = 1 if strategy.kind == "ddp" or strategy.stage == 1 else accumulation(recipe, num_ranks)
    num_passes = 1 if strategy.kind == "fsdp2" or strategy.stage == 3 else 2
    numel = sum(math.prod(route.shape) for route in routes)
    sent = num_times * num_passes * numel * ITEMSIZE[dtype] * (num_ranks - 1) // num_ranks
    return {"per_step": sent, "dtype": dtype}


def steps_per_epoch(num_examples: int, per_device: int, accumulation: int, num_ranks: int) -> int:
    """Optimizer steps, as transformers counts them: the last, smaller batches of an epoch still make a step.

    accelerate assigns whole micro-batches to the ranks, and completes the last round with the first examples.
    """
    batches = math.ceil(math.ceil(num_examples / per_device) / num_ranks)
    return math.ceil(batches / accumulation)


def _totals(cost: StepCost, costs: Compute) -> dict[str, dict[str, int | None]]:
    """Bytes by location and phase; None for the passes of a device whose activations are unknown."""
    totals: dict[str, dict[str, int | None]] = {
        location: {phase: cost.memory_bytes(location, phase) for phase in PHASES} for location in LOCATIONS
    }
    if costs.activation_bytes is None:
        totals["device"]["forward_backward"] = None
    return totals


def _with_adamw(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"optimizer": as_adamw(recipe.optimizer)})


def _saved(recipe: Recipe, cost: StepCost, costs: Compute, has_adapter: bool) -> dict[str, int]:
    """Bytes per process that settings of the recipe save, by setting."""
    saved = {}
    if trainer_value(recipe, "gradient_checkpointing") and costs.activation_bytes is not None:
        without = costs.activation_bytes_without_checkpointing or 0
        saved["trainer.gradient_checkpointing"] = without - costs.activation_bytes
    if recipe.trainer.get("precompute_ref_log_probs") and not has_adapter:  # an adapter needs no reference model
        saved["trainer.precompute_ref_log_probs"] = next(p.num_bytes for p in cost.memory if p.name == "weights")
    return saved


def _step_cost(recipe: Recipe, routes: Sequence[Route], frozen: Frozen, num_ranks: int, costs: Compute) -> StepCost:
    matrices = {r.name: r.shape for r in routes if r.rule == "spectral"}
    storages: Storages = {r.name: r.storage for r in routes if r.is_stored_otherwise}
    others = [math.prod(r.shape) for r in routes if r.rule != "spectral"]
    small = sum(numel for numel in others if numel < SMALL)
    model = ModelSizes(matrices, sum(others), frozen.numel, frozen.num_bytes, small, storages)
    cost = step_cost(model, parallel(recipe.run.parallel), num_ranks, _settings(recipe, trains_adapter(recipe.model)))
    if costs.activation_bytes is None:
        return cost
    detail = f"{trainer_value(recipe, 'per_device_train_batch_size')} x {costs.max_tokens} tokens"
    activations = Component("activations", costs.activation_bytes, detail, phase="forward_backward")
    return replace(cost, memory=(*cost.memory, activations))


def _settings(recipe: Recipe, has_adapter: bool) -> StepSettings:
    optimizer, trainer = recipe.optimizer, recipe.trainer
    on_cpu = bool(trainer.get("use_cpu"))
    workspace = getattr(optimizer, "workspace_mb", 0)  # 0: one matrix at a time
    if workspace is None:
        workspace = default_workspace_mb("cpu" if on_cpu else "cuda")
    return StepSettings(
        optimizer=optimizer.name,
        spectral_map=optimizer.cost_map,
        ns_steps=optimizer.map_steps,
        resolution=optimizer.map_resolution,
        compute_dtype=compute_dtype(recipe),
        # With an adapter the reference is the model without it, or with a copy of it.
        has_reference_model=recipe.task == "dpo" and not trainer.get("precompute_ref_log_probs") and not has_adapter,
        workspace_mb=workspace,
        weight_bytes=2 if recipe.model.dtype == "bfloat16" and not has_adapter else 4,
        compensation_bytes=2 if optimizer.compensation == "kahan" else 0,
        states=optimizer.states or "float32",
        on_cpu=on_cpu,
        quantize=recipe.model.quantize,
        map_precision=partial(optimizer.map_precision, on_gpu=not on_cpu),
    )


def _parallel_name(strategy: Parallel) -> str:
    """DDP, ZeRO 3 with offload, ..."""
    names = {"ddp": "DDP", "zero": f"ZeRO {strategy.stage}", "fsdp2": "FSDP2"}
    return names[strategy.kind] + (" with offload" if strategy.offloads else "")
