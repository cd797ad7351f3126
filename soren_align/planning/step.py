"""The cost and memory of one of several processes, computed without starting any: the plan for `--processes N`."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..optim import Route
from ..optim.eight_bits import SMALL
from ..optim.layout import WeightLayouts, default_workspace_mb
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
from ..sharding.layout import flat_partitions, parameter_slices, replicas, row_blocks, split_experts
from ..sharding.plan import ExchangePlan, elements_sent, flops_per_rank, make_exchange_plan
from ..spectral import num_workspace_numbers
from ..tasks import TASKS
from .flops import Compute
from .memory import (
    FLOAT32,
    ITEMSIZE,
    Component,
    Location,
    ModelSizes,
    Phase,
    RankSizes,
    StepSettings,
    adamw_workspace,
    components,
    numel_of,
    partition_numel,
    sub_groups,
)

# ---
# The cost of one optimizer step per rank, from shapes alone: FLOPs of the spectral maps, bytes sent, memory.
#
# No tensor is allocated and no other rank is needed, so that a 7B model on 1,024 ranks takes a laptop a second. Owner
# ranks and buckets are computed by the functions that training uses.


@dataclass(frozen=True)
class StepCost:
    """The cost of one optimizer step on `num_ranks` ranks.

    num_matrices: with a spectral map. num_exchanged: those that their owner rank gathers, or sends to other ranks.
    max_over_mean_flops: map FLOPs of the busiest rank over the mean of all ranks; None without matrices.
    flops_busiest_rank, flops_all_ranks: of the maps; None where the map is a decomposition, or where there is none.
    bytes_sent_max, bytes_sent_mean: over the ranks, by the exchange of matrices. The communication of gradients and
        gathered weights belongs to DDP, ZeRO or FSDP2 and is the same with any optimizer.
    memory: of the rank that has most.
    """

    num_ranks: int
    num_matrices: int
    num_exchanged: int
    max_over_mean_flops: float | None
    flops_busiest_rank: int | None
    flops_all_ranks: int | None
    bytes_sent_max: int
    bytes_sent_mean: float
    memory: tuple[Component, ...]

    def memory_bytes(self, location: Location, phase: Phase) -> int:
        """Bytes there in that phase, permanent components included."""
        parts = (part for part in self.memory if part.location == location and part.phase in ("always", phase))
        return sum(part.num_bytes for part in parts)


def step_cost(
    model: ModelSizes,
    parallel: Parallel,
    num_ranks: int,
    settings: StepSettings = StepSettings(),  # noqa: B008 (frozen)
) -> StepCost:
    """The cost of an optimizer step on each of `num_ranks` ranks."""
    plans = _plans(model, parallel, num_ranks, settings.bucket_mb) if settings.optimizer != "adamw" else []
    # Sub-groups are updated one after another: in each, all ranks wait for the busiest one.
    flops = [_flops_per_rank(plan, settings) for plan in plans]
    busiest, total = sum(map(max, flops)), sum(map(sum, flops))
    sent = [sum(numels) * FLOAT32 for numels in zip(*(elements_sent(p.layout, p.owners) for p in plans), strict=True)]
    sizes = RankSizes(model, num_ranks)
    memory = [*components(sizes, parallel, settings), *_step_memory(plans, sizes, parallel, settings)]
    is_counted = plans and settings.spectral_map and settings.spectral_map.flops
    return StepCost(
        num_ranks=num_ranks,
        num_matrices=sum(weight.num_matrices for plan in plans for weight in plan.layout.weights),
        num_exchanged=sum(plan.layout.weights[i].num_matrices for plan in plans for part in plan.buckets for i in part),
        max_over_mean_flops=busiest * num_ranks / total if total else None,
        flops_busiest_rank=busiest if is_counted else None,
        flops_all_ranks=total if is_counted else None,
        bytes_sent_max=max(sent, default=0),
        bytes_sent_mean=sum(sent) / num_ranks,
        memory=tuple(part for part in memory if part.num_bytes),
    )


def _plans(model: ModelSizes, parallel: Parallel, num_ranks: int, bucket_mb: float) -> list[ExchangePlan]:
    """One per set of matrices that are updated together."""
    matrices = model.matrices
    if parallel.kind == "ddp":
        layouts = [replicas(matrices, num_ranks)]
    elif parallel.kind == "fsdp2":
        layouts = [row_blocks(matrices, num_ranks)]
    elif parallel.stage == 3:
        groups = sub_groups(matrices, num_ranks, parallel.config["zero_optimization"])
        layouts = [parameter_slices(group, num_ranks) for group in groups]
    else:
        numel = partition_numel(numel_of(matrices), num_ranks)
        layouts = [flat_partitions(matrices, num_ranks, partition_numel=numel)]
    return [make_exchange_plan(split_experts(layout, model.weight_layouts), bucket_mb, FLOAT32) for layout in layouts]


def _flops_per_rank(plan: ExchangePlan, settings: StepSettings) -> Sequence[int]:
    """FLOPs of the maps; for a decomposition those of the default map, by which owner ranks are assigned."""
    if not settings.spectral_map or not settings.spectral_map.flops:
        return flops_per_rank(plan.layout, plan.owners)
    flops = [0] * plan.layout.num_ranks
    for matrix, owner in zip(plan.layout.weights, plan.owners, strict=True):
        precision = settings.map_precision(min(matrix.map_shape))
        of_map = settings.spectral_map.num_flops(*matrix.map_shape, precision, **settings.map_settings)
        flops[owner] += matrix.num_matrices * (of_map or 0)
    return flops


def _step_memory(
    plans: list[ExchangePlan], sizes: RankSizes, parallel: Parallel, settings: StepSettings
) -> list[Component]:
    """Temporary tensors of the optimizer step."""
    adamw = adamw_workspace(sizes, parallel, settings)
    if not plans:
        return [adamw]
    maps = max(_map_workspace(plan, settings) for plan in plans)
    if adamw.location == "device":
        maps = max(maps, adamw.num_bytes)  # AdamW's step comes after the maps
    return [
        *([adamw] if adamw.location == "cpu" else []),
        Component("exchange buffers", max(map(_exchange_bytes, plans)), "float32, 3 buckets", phase="optimizer_step"),
        Component("map workspace", maps, "float32", phase="optimizer_step"),
    ]


def _exchange_bytes(plan: ExchangePlan) -> int:
    """Peak bytes of the buffers of an Exchange, of three consecutive buckets, on the rank that has most."""
    if plan.layout.replicated:  # the weights themselves are the buffers
        return 0
    peak, before_last, last = 0, Counter(), Counter()
    for indices in plan.buckets:
        numel = Counter()
        for index in indices:
            for shard in plan.layout.weights[index].shards:
                if shard.rank != plan.owners[index]:
                    numel[shard.rank] += shard.numel
                    numel[plan.owners[index]] += shard.numel
        peak = max([peak, *(numel + last + before_last).values()])
        before_last, last = last, numel
    return peak * FLOAT32


def _map_workspace(plan: ExchangePlan, settings: StepSettings) -> int:
    """Bytes of the largest batch of maps, its input included, as `optim.layout.matrix_batches` makes them."""
    peak, device_type = 0, "cpu" if settings.on_cpu else "cuda"
    for indices in (plan.local, *plan.buckets):
        parts = [(plan.owners[i], plan.layout.weights[i]) for i in indices]
        batches = Counter((owner, weight.map_shape, weight.num_matrices) for owner, weight in parts)
        for (_, shape, num_matrices), number in batches.items():
            upper_bound = num_matrices * (num_workspace_numbers(*shape, device_type) + shape[0] * shape[1]) * FLOAT32
            batch_size = max(1, min(number, int(settings.workspace_mb * 2**20 / upper_bound)))
            assert settings.spectral_map
            usual = settings.spectral_map.num_workspace_numbers(*shape, settings.map_precision(min(shape)))
            usual = (usual + shape[0] * shape[1]) * FLOAT32
            peak = max(peak, usual * batch_size * (num_matrices if batch_size > 1 else 1))
    return peak


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
    weight_layouts: WeightLayouts = {r.name: r.layout for r in routes if r.is_stored_otherwise}
    others = [math.prod(r.shape) for r in routes if r.rule != "spectral"]
    small = sum(numel for numel in others if numel < SMALL)
    model = ModelSizes(matrices, sum(others), frozen.numel, frozen.num_bytes, small, weight_layouts)
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
        spectral_map=optimizer.spectral_map,
        map_settings=optimizer.map_settings,
        compute_dtype=compute_dtype(recipe),
        # With an adapter the reference is the model without it, or with a copy of it.
        has_reference_model=TASKS[recipe.task].has_reference
        and not trainer.get("precompute_ref_log_probs")
        and not has_adapter,
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
