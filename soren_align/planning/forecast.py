"""What a step will cost each rank, from shapes alone: matrices mapped, bytes sent, memory held.

Nothing is allocated and no other rank is asked, so that a 7B model on 1,024 ranks takes a laptop a second. The plans
are those of the training itself, and so are their rounds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..recipe import Parallel
from ..sharding.exchange_plan import ROUND_MB, ExchangePlan, make_exchange_plan
from ..sharding.geometry import Shapes, flat_partitions, parameter_slices, replicas, row_blocks
from ..sharding.ownership import elements_sent, flops_per_rank
from ..spectral import num_flops, num_workspace_numbers, usual_workspace_numbers
from ..spectral.cost import SpectralMap
from .memory import FLOAT32, Component, Place, Sizes, When, adamw_workspace, components, numel_of, partition, sub_groups


@dataclass(frozen=True)
class Forecast:
    """One optimizer step on `num_ranks`. `flops` are None where the map is a decomposition, or where there is none.

    num_travelling: matrices that their owner has to gather from other ranks, or to send to them.
    load: floating-point operations of the busiest rank's maps over the mean of the ranks.
    bytes_sent: per rank, by the exchange of matrices; what gradients and gathered weights need is DDP's, ZeRO's or
        FSDP2's own and the same with any optimizer.
    memory: of the fullest rank.
    """

    num_ranks: int
    num_matrices: int
    num_travelling: int
    load: float | None
    flops_busiest: int | None
    flops_all: int | None
    bytes_sent_most: int
    bytes_sent_mean: float
    memory: tuple[Component, ...]

    def total(self, where: Place, when: When) -> int:
        """Bytes there at that time, what is always there among them."""
        return sum(part.num_bytes for part in self.memory if part.where == where and part.when in ("always", when))


def forecast(
    matrices: Shapes,
    num_others: int,
    parallel: Parallel,
    num_ranks: int,
    *,
    optimizer: str = "soren",
    spectral_map: SpectralMap | None = "minimax",
    ns_steps: int = 15,
    arithmetic: str = "bfloat16",
    reference: bool = False,
    workspace_mb: float = 256,
    weight_bytes: int = FLOAT32,
    compensation_bytes: int = 0,
    frozen: tuple[int, int] = (0, 0),
    round_mb: float = ROUND_MB,
    on_cpu: bool = False,
) -> Forecast:
    """What a step costs on each of `num_ranks`, for a model of `matrices` and `num_others` numbers beside them.

    optimizer: "adamw" steps the matrices too, and nothing is mapped; any other maps them.
    spectral_map: counts the operations, minimax in its default resolution; None: a decomposition, which is not counted.
    arithmetic, reference: see memory.components.
    workspace_mb: for maps in a batch, as the optimizer has it.
    weight_bytes, compensation_bytes, frozen: see memory.Sizes.
    on_cpu: the ranks' device is a CPU.
    """
    plans = _plans(matrices, parallel, num_ranks, round_mb) if optimizer != "adamw" else []
    # Sub-groups step one after another: the rank that is busiest in each makes the others wait.
    busiest, everyone = 0, 0
    for plan in plans:
        load = _loads(plan, spectral_map, ns_steps)
        busiest, everyone = busiest + max(load), everyone + sum(load)
    sent = [sum(numels) * FLOAT32 for numels in zip(*(elements_sent(p.layout, p.owners) for p in plans), strict=True)]
    moments = 2 if optimizer == "adamw" else 1
    sizes = Sizes(matrices, num_others, num_ranks, moments, weight_bytes, compensation_bytes, frozen)
    memory = [*components(sizes, parallel, arithmetic=arithmetic, reference=reference)]
    adamw = adamw_workspace(sizes, parallel, steps_all=not plans, on_cpu=on_cpu)
    if not plans or adamw.where == "cpu":
        memory.append(adamw)
    if plans:
        rounds, maps = max(map(_exchange, plans)), max(_workspace(p, workspace_mb, spectral_map) for p in plans)
        maps = max(maps, adamw.num_bytes * (adamw.where == "device"))  # one after the other
        memory.append(Component("matrices that travel", rounds, "float32, three rounds", when="step"))
        memory.append(Component("workspace of the map", maps, "float32", when="step"))
    counted = plans and spectral_map
    return Forecast(
        num_ranks=num_ranks,
        num_matrices=len(matrices) if plans else 0,
        num_travelling=sum(len(indices) for plan in plans for indices in plan.rounds),
        load=busiest * num_ranks / everyone if everyone else None,
        flops_busiest=busiest if counted else None,
        flops_all=everyone if counted else None,
        bytes_sent_most=max(sent, default=0),
        bytes_sent_mean=sum(sent) / num_ranks,
        memory=tuple(part for part in memory if part.num_bytes),
    )


def _plans(matrices: Shapes, parallel: Parallel, num_ranks: int, round_mb: float) -> list[ExchangePlan]:
    """One for all that the optimizer steps at a time."""
    if parallel.kind == "ddp":
        layouts = [replicas(matrices, num_ranks)]
    elif parallel.kind == "fsdp2":
        layouts = [row_blocks(matrices, num_ranks)]
    elif parallel.stage == 3:
        groups = sub_groups(matrices, num_ranks, parallel.config["zero_optimization"])
        layouts = [parameter_slices(group, num_ranks) for group in groups]
    else:
        numel = partition(numel_of(matrices), num_ranks)
        layouts = [flat_partitions(matrices, num_ranks, partition_numel=numel)]
    return [make_exchange_plan(layout, round_mb, FLOAT32) for layout in layouts]


def _loads(plan: ExchangePlan, spectral_map: SpectralMap | None, ns_steps: int) -> Sequence[int]:
    """Operations per rank; for a decomposition those of the default map, by which owners are chosen."""
    if spectral_map is None:
        return flops_per_rank(plan.layout, plan.owners)
    load = [0] * plan.layout.num_ranks
    for matrix, owner in zip(plan.layout.matrices, plan.owners, strict=True):
        load[owner] += num_flops(spectral_map, *matrix.shape, ns_steps)
    return load


def _exchange(plan: ExchangePlan) -> int:
    """Bytes of the buffers of an Exchange at its peak, on the rank that has most: those of three rounds in a row."""
    if plan.layout.replicated:  # the weights themselves are the buffers
        return 0
    most, before_last, last = 0, Counter(), Counter()
    for indices in plan.rounds:
        held = Counter()
        for index in indices:
            for fragment in plan.layout.matrices[index].fragments:
                if fragment.rank != plan.owners[index]:
                    held[fragment.rank] += fragment.numel
                    held[plan.owners[index]] += fragment.numel
        most = max([most, *(held + last + before_last).values()])
        before_last, last = last, held
    return most * FLOAT32


def _workspace(plan: ExchangePlan, workspace_mb: float, spectral_map: SpectralMap | None) -> int:
    """Bytes of the largest batch of maps, its input among them, as GroupUpdate.map_ makes them."""
    most = 0
    for indices in (plan.local, *plan.rounds):
        alike = Counter((plan.owners[i], plan.layout.matrices[i].shape) for i in indices)
        for (_, shape), number in alike.items():
            each = (num_workspace_numbers(*shape) + shape[0] * shape[1]) * FLOAT32
            together = max(1, min(number, int(workspace_mb * 2**20 / each)))
            usual = (usual_workspace_numbers(spectral_map, *shape) + shape[0] * shape[1]) * FLOAT32
            most = max(most, usual * together)
    return most
