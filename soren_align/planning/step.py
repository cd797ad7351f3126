"""The cost of an optimizer step on one of several processes, from shapes alone: the plan for
`--processes N`.

FLOPs of the spectral maps, bytes sent, memory. No tensor is allocated and no other rank is needed,
so that a 7B model on 1,024 ranks takes a laptop a second. Owner ranks and buckets are computed by
the functions that training uses.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..optim import Route
from ..optim.exchange import default_workspace_mb, num_batch_numbers
from ..recipe import OPTIMIZER_SECTIONS, Recipe, compute_dtype, trains_adapter
from ..recipe.parallel import accumulation, global_batch, parallel, trainer_value
from ..sharding.layout import flat_partitions, parameter_slices, replicas, row_blocks, split_weights
from ..sharding.plan import (
    BUCKET_MB,
    ExchangePlan,
    elements_exchanged,
    elements_sent,
    make_exchange_plan,
    map_flops,
    schedule_flops,
)
from ..tasks import TASKS
from .flops import Compute
from .memory import FLOAT32, ITEMSIZE, Component, Location, ModelSizes, Phase, Rank, components

NOT_INCLUDED = (
    "temporarily gathered weights (up to 2 GB under ZeRO 3), padding, fragmentation of the"
    " allocator; on GPUs about 0.5 GB of CUDA and 0.5 to 1.5 GB of NCCL"
)
NOT_INCLUDED_ON_CPU = (
    "padding, the process itself, about 0.7 GB (Python, torch, TRL), the pages of weight files"
    " while they load"
)
"""Measured: the peak of the quickstart, whose model has 100,000 parameters, is 0.68 GB (Linux,
torch 2.13)."""
GPUS_PER_NODE = 8
LOCATIONS: tuple[Location, ...] = ("device", "cpu")
PHASES: tuple[Phase, ...] = ("forward_backward", "optimizer_step")


@dataclass(frozen=True)
class StepCost:
    """The cost of one optimizer step.

    num_matrices: with a spectral map. num_exchanged: those that their owner rank gathers, or sends
        to other ranks.
    max_over_mean_flops: map FLOPs of the busiest rank in each bucket, summed, over the mean of all
        ranks; None without matrices. See `sharding.plan.schedule_flops`.
    flops_busiest_rank, flops_all_ranks: of the maps; None where the map is a decomposition, or
        where there is none.
    bytes_sent_max, bytes_sent_mean: over the ranks, by the exchange of matrices. The communication
        of gradients and gathered weights belongs to DDP, ZeRO or FSDP2 and is the same with any
        optimizer.
    memory: of the rank that has most.
    """

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
        parts = (
            part
            for part in self.memory
            if part.location == location and part.phase in ("always", phase)
        )
        return sum(part.num_bytes for part in parts)


def step_cost(rank: Rank, bucket_mb: float = BUCKET_MB) -> StepCost:
    """The cost of an optimizer step on each of the ranks.
    bucket_mb: of a bucket of the exchange of matrices.
    """
    matrices, num_ranks, spectral_map = (
        rank.model.matrices,
        rank.num_ranks,
        rank.optimizer.spectral_map,
    )
    # One layout per set of matrices that are updated together: all ranks wait for the busiest one
    # in each.
    if not spectral_map:
        layouts = []
    elif rank.parallel.kind == "ddp":
        layouts = [replicas(matrices, num_ranks)]
    elif rank.parallel.kind == "fsdp2":
        layouts = [row_blocks(matrices, num_ranks)]
    elif rank.parallel.stage == 3:
        layouts = [parameter_slices(group, num_ranks) for group in rank.sub_groups()]
    else:
        numel = rank.partition_numel(rank.whole.matrices)
        layouts = [flat_partitions(matrices, num_ranks, partition_numel=numel)]
    plans = [
        make_exchange_plan(split_weights(layout, rank.model.weight_layouts), bucket_mb, FLOAT32)
        for layout in layouts
    ]

    # FLOPs of the busiest rank in each bucket: the others wait for it there.
    counts = [_map_flops(plan, rank) for plan in plans]
    flops = [of_weights for of_weights, _ in counts]
    busiest, total = sum(map(schedule_flops, plans, flops)), sum(map(sum, flops))
    has_elements = getattr(rank.optimizer, "second_moment", None) == "elements"
    # Replicas get their owner's second moments too. (A number per row is not counted.)
    itemsize = FLOAT32 * (2 if has_elements and rank.parallel.kind == "ddp" else 1)
    sent = [
        sum(numels) * itemsize
        for numels in zip(*(elements_sent(p.layout, p.owners) for p in plans), strict=True)
    ]
    is_counted = bool(counts) and all(are_counted for _, are_counted in counts)

    # Memory at the peak of the step. AdamW's buffers and the maps' workspace are never there at
    # the same time, since the groups are updated one after the other.
    *memory, adamw = components(rank)
    workspace = max((_map_workspace(plan, rank) for plan in plans), default=0)
    if plans and adamw.location == "device":  # its step comes after the maps
        workspace, adamw = max(workspace, adamw.num_bytes), adamw._replace(num_bytes=0)
    exchanged = max((_exchange_bytes(plan, has_elements) for plan in plans), default=0)
    memory += [
        adamw,
        Component("exchange buffers", exchanged, "float32, 3 buckets", phase="optimizer_step"),
    ]
    memory.append(Component("map workspace", workspace, "float32", phase="optimizer_step"))
    return StepCost(
        num_matrices=sum(weight.num_matrices for plan in plans for weight in plan.layout.weights),
        num_exchanged=sum(
            plan.layout.weights[i].num_matrices
            for plan in plans
            for part in plan.buckets
            for i in part
        ),
        max_over_mean_flops=busiest * num_ranks / total if total else None,
        flops_busiest_rank=busiest if is_counted else None,
        flops_all_ranks=total if is_counted else None,
        bytes_sent_max=max(sent, default=0),
        bytes_sent_mean=sum(sent) / num_ranks,
        memory=tuple(part for part in memory if part.num_bytes),
    )


def _map_flops(plan: ExchangePlan, rank: Rank) -> tuple[Sequence[int], bool]:
    """Return the FLOPs of each weight's map, and whether no map is a decomposition: then they are
    the default map's, by which owner ranks are assigned.
    """
    spectral_map, settings = rank.optimizer.spectral_map, rank.optimizer.map_settings
    flops = []
    for weight in plan.layout.weights:
        precision = rank.optimizer.map_precision(min(weight.map_shape), not rank.on_cpu)
        of_one = spectral_map and spectral_map.num_flops(*weight.map_shape, precision, **settings)
        if of_one is None:
            return [map_flops(weight) for weight in plan.layout.weights], False
        flops.append(weight.num_matrices * of_one)
    return flops, True


def _exchange_bytes(plan: ExchangePlan, has_elements: bool) -> int:
    """Peak bytes of the buffers of an Exchange, of three consecutive buckets, on the rank that has
    most.

    has_elements: the outputs for its shards, divided by second moments of elements, wait for the
    sums of their squares.
    """
    if plan.layout.replicated:  # the weights themselves are the buffers
        return 0
    # Three buckets may be there at once: one is gathered, one mapped, one sent back.
    peak, before_last, last = 0, Counter(), Counter()
    for indices in plan.buckets:
        numel = Counter()
        for weight, owner in (
            (plan.layout.weights[index], plan.owners[index]) for index in indices
        ):
            numel.update(elements_exchanged(weight, owner))
            for shard in weight.shards if has_elements else ():
                numel[shard.rank] += shard.numel
        peak = max([peak, *(numel + last + before_last).values()])
        before_last, last = last, numel
    return peak * FLOAT32


def _map_workspace(plan: ExchangePlan, rank: Rank) -> int:
    """Bytes of the largest batch of maps, its input included, as `optim.exchange.matrix_batches`
    makes them.
    """
    peak, device_type, spectral_map = (
        0,
        "cpu" if rank.on_cpu else "cuda",
        rank.optimizer.spectral_map,
    )
    limit = getattr(rank.optimizer, "workspace_mb", 0)  # 0: one matrix at a time
    limit = default_workspace_mb(device_type) if limit is None else limit
    assert spectral_map
    for indices in (plan.local, *plan.buckets):
        parts = [(plan.owners[i], plan.layout.weights[i]) for i in indices]
        batches = Counter((owner, (w.shape[0], w.shape[1]), w.layout) for owner, w in parts)
        for (_, weight_shape, layout), number in batches.items():
            shape, num_together = layout.map_shape(weight_shape), layout.num_matrices
            upper_bound = num_batch_numbers(weight_shape, layout) * FLOAT32
            batch_size = max(1, min(number, int(limit * 2**20 / upper_bound)))
            precision = rank.optimizer.map_precision(min(shape), not rank.on_cpu)
            usual = spectral_map.num_workspace_numbers(*shape, precision) + shape[0] * shape[1]
            peak = max(peak, usual * FLOAT32 * batch_size * (num_together if batch_size > 1 else 1))
    return peak


def model_sizes(recipe: Recipe, routes: Sequence[Route], frozen: tuple[int, int]) -> ModelSizes:
    """The sizes of the recipe's model.
    frozen: numbers and bytes of the parameters that are not trained.
    """
    has_adapter, precomputes = (
        trains_adapter(recipe.model),
        bool(recipe.trainer.get("precompute_ref_log_probs")),
    )
    matrices = {route.name: route for route in routes if route.rule == "spectral"}
    others = [math.prod(route.shape) for route in routes if route.rule != "spectral"]
    return ModelSizes(
        {name: route.shape for name, route in matrices.items()},
        num_others=sum(others),
        num_frozen=frozen[0],
        frozen_bytes=frozen[1],
        weight_layouts={
            name: route.layout for name, route in matrices.items() if route.is_stored_otherwise
        },
        weight_bytes=2 if recipe.model.dtype == "bfloat16" and not has_adapter else FLOAT32,
        # With an adapter the reference is the model without it, or with a copy of it.
        has_reference=TASKS[recipe.task].has_reference and not precomputes and not has_adapter,
        quantize=recipe.model.quantize,
    )


def map_precision(recipe: Recipe, routes: Sequence[Route], on_gpu: bool) -> str:
    """The precision of the factors of the largest matrices' maps."""
    shapes = (m for route in routes if route.rule == "spectral" for m in route.matrix_shapes)
    return recipe.optimizer.map_precision(max(map(min, shapes), default=0), on_gpu)


def gradient_bytes(recipe: Recipe, rank: Rank) -> tuple[int, str]:
    """The bytes that a rank sends in a step for averaging gradients, in a ring, and their dtype."""
    # By DDP and stage 1 once a step, by the others after each micro-batch; an all-reduce is a
    # reduce-scatter and a gather.
    mode, num_ranks = rank.parallel, rank.num_ranks
    num_times = 1 if mode.kind == "ddp" or mode.stage == 1 else accumulation(recipe, num_ranks)
    num_passes = 1 if mode.kind == "fsdp2" or mode.stage == 3 else 2
    dtype = {2: "bfloat16", FLOAT32: "float32"}[rank.model.weight_bytes]
    if mode.kind != "ddp":
        dtype = mode.gradient_dtype(rank.compute_dtype)
    numel = num_times * num_passes * rank.whole.total
    return numel * ITEMSIZE[dtype] * (num_ranks - 1) // num_ranks, dtype


def peak_memory(cost: StepCost, costs: Compute) -> int | None:
    """The bytes on the device of the rank that has most; None if the activations are unknown."""
    if costs.activation_bytes is None:
        return None
    of_passes = cost.memory_bytes("device", "forward_backward") + costs.activation_bytes
    return max(of_passes, cost.memory_bytes("device", "optimizer_step"))


def processes(
    recipe: Recipe, routes: Sequence[Route], frozen: tuple[int, int], num_ranks: int, costs: Compute
) -> dict[str, Any]:
    """The plan's section "processes".
    frozen: numbers and bytes of the parameters that are not trained.
    """
    trainer, strategy, has_adapter = (
        recipe.trainer,
        parallel(recipe.run.parallel),
        trains_adapter(recipe.model),
    )
    on_cpu, precomputes = (
        bool(trainer.get("use_cpu")),
        bool(trainer.get("precompute_ref_log_probs")),
    )
    model = model_sizes(recipe, routes, frozen)
    rank = Rank(model, strategy, num_ranks, recipe.optimizer, compute_dtype(recipe), on_cpu)
    # With AdamW in the place of the optimizer; keys that AdamW does not have are left out.
    adamw = OPTIMIZER_SECTIONS["adamw"]
    shared = recipe.optimizer.model_dump(include=set(adamw.model_fields) - {"name"})
    cost, with_adamw = (
        step_cost(rank),
        step_cost(replace(rank, optimizer=adamw(name="adamw", **shared))),
    )
    # What the plan can recommend: the memory of the passes with and without the setting, where both
    # are known.
    saved = {}
    if costs.activation_bytes is not None:
        detail = (
            f"{trainer_value(recipe, 'per_device_train_batch_size')} x {costs.max_tokens} tokens"
        )
        activations = Component(
            "activations", costs.activation_bytes, detail, phase="forward_backward"
        )
        cost, with_adamw = (replace(c, memory=(*c.memory, activations)) for c in (cost, with_adamw))
        if trainer_value(recipe, "gradient_checkpointing"):
            without = costs.activation_bytes_without_checkpointing or 0
            saved["trainer.gradient_checkpointing"] = without - costs.activation_bytes
    if precomputes and not has_adapter:  # an adapter needs no reference model
        saved["trainer.precompute_ref_log_probs"] = next(
            p.num_bytes for p in cost.memory if p.name == "weights"
        )
    # Totals by location and phase; None for the passes of a device whose activations are unknown.
    totals = []
    for each in (cost, with_adamw):
        sums: dict[str, dict[str, int | None]] = {
            location: {phase: each.memory_bytes(location, phase) for phase in PHASES}
            for location in LOCATIONS
        }
        if costs.activation_bytes is None:
            sums["device"]["forward_backward"] = None
        totals.append(sums)
    # A map by decomposition has no count of operations, and then no FLOPs are shown.
    flops = {"busiest_rank": cost.flops_busiest_rank, "all_ranks": cost.flops_all_ranks}
    global_batch_size, factors = global_batch(recipe, num_ranks)
    sent, gradient_dtype = gradient_bytes(recipe, rank)
    # Each rank loads all weights into the CPU's memory, but under ZeRO 3; a reference too.
    of_rank = 0
    if strategy.stage < 3:
        numel = rank.whole.total + model.num_frozen
        of_rank = numel * ITEMSIZE[recipe.model.dtype] * (1 + model.has_reference)
    name = {"ddp": "DDP", "zero": f"ZeRO {strategy.stage}", "fsdp2": "FSDP2"}[strategy.kind]
    return {
        "num_processes": num_ranks,
        "parallel": name + (" with offload" if strategy.offloads else ""),
        "global_batch_size": global_batch_size,
        "global_batch_size_factors": factors,
        "global_batch_size_is_set": recipe.run.global_batch_size is not None,
        "num_matrices": cost.num_matrices,
        "num_frozen_parameters": model.num_frozen,
        "num_exchanged_matrices": cost.num_exchanged,
        "max_over_mean_flops": cost.max_over_mean_flops and round(cost.max_over_mean_flops, 4),
        "map_flops": flops if cost.flops_all_ranks else None,
        "map_precision": map_precision(recipe, routes, not on_cpu),
        "bytes_sent": {"max": cost.bytes_sent_max, "mean": round(cost.bytes_sent_mean)},
        "gradient_bytes_sent": {"per_step": sent, "dtype": gradient_dtype},
        "host_bytes_while_loading": of_rank * min(num_ranks, GPUS_PER_NODE),
        "memory": [part._asdict() for part in cost.memory],
        "memory_total": totals[0],
        "memory_total_adamw": totals[1],
        "memory_saved": saved,
        "memory_not_included": NOT_INCLUDED_ON_CPU if on_cpu else NOT_INCLUDED,
        "is_on_cpu": on_cpu,
    }
