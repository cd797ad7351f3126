"""The cost of one optimizer step per rank, from shapes alone: FLOPs of the spectral maps, bytes sent, memory.

No tensor is allocated and no other rank is needed, so that a 7B model on 1,024 ranks takes a laptop a second. Owner
ranks and rounds are computed by the functions that training uses.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..recipe import Parallel
from ..sharding.exchange_plan import ExchangePlan, make_exchange_plan
from ..sharding.geometry import flat_partitions, parameter_slices, replicas, row_blocks, slabs
from ..sharding.ownership import elements_sent, flops_per_rank
from ..spectral import narrow_flops, num_flops, num_workspace_numbers, usual_workspace_numbers
from .memory import FLOAT32, Component, Location, Phase, StepSettings, adamw_workspace, components
from .sizes import ModelSizes, RankSizes, numel_of, partition_numel, sub_groups


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
    plans = _plans(model, parallel, num_ranks, settings.round_mb) if settings.optimizer != "adamw" else []
    # Sub-groups are updated one after another: in each, all ranks wait for the busiest one.
    flops = [_flops_per_rank(plan, settings) for plan in plans]
    busiest, total = sum(map(max, flops)), sum(map(sum, flops))
    sent = [sum(numels) * FLOAT32 for numels in zip(*(elements_sent(p.layout, p.owners) for p in plans), strict=True)]
    sizes = RankSizes(model, num_ranks)
    memory = [*components(sizes, parallel, settings), *_step_memory(plans, sizes, parallel, settings)]
    is_counted = plans and settings.spectral_map
    return StepCost(
        num_ranks=num_ranks,
        num_matrices=sum(slab.num_maps for plan in plans for slab in plan.layout.matrices),
        num_exchanged=sum(plan.layout.matrices[i].num_maps for plan in plans for part in plan.rounds for i in part),
        max_over_mean_flops=busiest * num_ranks / total if total else None,
        flops_busiest_rank=busiest if is_counted else None,
        flops_all_ranks=total if is_counted else None,
        bytes_sent_max=max(sent, default=0),
        bytes_sent_mean=sum(sent) / num_ranks,
        memory=tuple(part for part in memory if part.num_bytes),
    )


def _plans(model: ModelSizes, parallel: Parallel, num_ranks: int, round_mb: float) -> list[ExchangePlan]:
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
    return [make_exchange_plan(slabs(layout, model.storages), round_mb, FLOAT32) for layout in layouts]


def _flops_per_rank(plan: ExchangePlan, settings: StepSettings) -> Sequence[int]:
    """FLOPs of the maps; for a decomposition those of the default map, by which owner ranks are assigned."""
    if settings.spectral_map is None:
        return flops_per_rank(plan.layout, plan.owners)
    flops = [0] * plan.layout.num_ranks
    for matrix, owner in zip(plan.layout.matrices, plan.owners, strict=True):
        if settings.is_narrow(matrix.map_shape):
            of_map = narrow_flops(*matrix.map_shape, settings.resolution)
        else:
            of_map = num_flops(settings.spectral_map, *matrix.map_shape, settings.ns_steps, settings.resolution)
        flops[owner] += matrix.num_maps * of_map
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
        Component("exchange buffers", max(map(_exchange_bytes, plans)), "float32, 3 rounds", phase="optimizer_step"),
        Component("map workspace", maps, "float32", phase="optimizer_step"),
    ]


def _exchange_bytes(plan: ExchangePlan) -> int:
    """Peak bytes of the buffers of an Exchange, of three consecutive rounds, on the rank that has most."""
    if plan.layout.replicated:  # the weights themselves are the buffers
        return 0
    peak, before_last, last = 0, Counter(), Counter()
    for indices in plan.rounds:
        numel = Counter()
        for index in indices:
            for fragment in plan.layout.matrices[index].fragments:
                if fragment.rank != plan.owners[index]:
                    numel[fragment.rank] += fragment.numel
                    numel[plan.owners[index]] += fragment.numel
        peak = max([peak, *(numel + last + before_last).values()])
        before_last, last = last, numel
    return peak * FLOAT32


def _map_workspace(plan: ExchangePlan, settings: StepSettings) -> int:
    """Bytes of the largest batch of maps, its input included, as GroupUpdate.map_ makes them."""
    peak, device_type = 0, "cpu" if settings.on_cpu else "cuda"
    for indices in (plan.local, *plan.rounds):
        parts = [(plan.owners[i], plan.layout.matrices[i]) for i in indices]
        batches = Counter((owner, slab.map_shape, slab.num_maps) for owner, slab in parts)
        for (_, shape, num_maps), number in batches.items():
            upper_bound = num_maps * (num_workspace_numbers(*shape, device_type) + shape[0] * shape[1]) * FLOAT32
            batch_size = max(1, min(number, int(settings.workspace_mb * 2**20 / upper_bound)))
            usual = usual_workspace_numbers(settings.spectral_map, *shape, settings.is_narrow(shape))
            usual = (usual + shape[0] * shape[1]) * FLOAT32
            peak = max(peak, usual * batch_size * (num_maps if batch_size > 1 else 1))
    return peak
