"""Time and memory of a step for each value of `run.parallel`, from counted FLOPs and bytes.

The rates are assumptions, for a ranking: what strategies send differs by a factor of ten, and
whether it hides behind the passes by another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..core.errors import UserError
from ..optim import Route
from ..recipe import Recipe, accumulation, compute_dtype, load_text, parallel, to_yaml
from ..recipe.parallel import NAMES
from .flops import PEAKS, UTILIZATION, Compute
from .memory import ITEMSIZE, Rank
from .step import GPUS_PER_NODE, gradient_bytes, map_precision, model_sizes, peak_memory, step_cost

GPU, GPU_BYTES = "H100", 80e9
"""The GPU that plans assume where this machine has none."""
NVLINK, NETWORK, PCIE = 250e9, 50e9, 20e9
"""Bytes/s that a GPU sends within a node (of NVLink's 450e9), to another node (400 Gbit/s for each
GPU), and to pageable memory of the CPU."""
OFFLOADED_BYTES = 20
"""That an offloaded step moves for each number: gradient, momentum and master weight, and back."""
INTERFERENCE = 0.2
"""Seconds of the passes that each hidden second of sending costs: it takes memory bandwidth and
multiprocessors."""
RESERVED_BYTES = 2e9
"""Of CUDA and NCCL."""
FRAGMENTATION = 1.05


@dataclass(frozen=True)
class Strategy:
    """One value of `run.parallel` on a number of processes; bytes and seconds are of a rank."""

    name: str
    memory_bytes: int | None
    """On the device, at the peak; None: the activations are unknown."""
    bytes_sent: float
    """In a step: gradients, gathered weights, exchanged matrices."""
    sending_seconds: float
    exposed_seconds: float
    """Of the sending, not hidden behind the passes or the maps; with offload, the transfers too."""
    step_seconds: float
    hours: float
    fits: bool
    is_rounded: bool
    """Whether gradients are added in bfloat16, whose rounding the maps amplify: ZeRO 1 with bf16.
    """


def strategies(
    recipe: Recipe,
    routes: Sequence[Route],
    frozen: tuple[int, int],
    costs: Compute,
    num_ranks: int,
    num_steps: int,
    gpu_bytes: float = GPU_BYTES,
) -> list[Strategy]:
    """Every supported value, the fastest first of those that fit; empty where FLOPs are not known.

    frozen: numbers and bytes of the parameters that are not trained. gpu_bytes: of a GPU's memory.
    """
    if not costs.flops_per_step or recipe.trainer.get("use_cpu"):
        return []
    model, precision = model_sizes(recipe, routes, frozen), map_precision(recipe, routes, True)
    choices = []
    for name in supported(recipe, num_ranks):
        rank = Rank(model, parallel(name), num_ranks, recipe.optimizer, compute_dtype(recipe))
        choices.append(_strategy(name, recipe, rank, costs, precision, num_steps, gpu_bytes))
    return sorted(choices, key=lambda each: (not each.fits, each.step_seconds))


def supported(recipe: Recipe, num_ranks: int) -> Iterator[str]:
    """The values of `run.parallel` that the recipe's checks allow; one process needs no sharding,
    but may offload.
    """
    content = recipe.model_dump()
    for name in NAMES:
        if num_ranks == 1 and name != "ddp" and "offload" not in name:
            continue
        try:
            load_text(
                to_yaml(content | {"run": content["run"] | {"parallel": name}}),
                on_missing=lambda problem: None,
            )
        except UserError:
            continue
        yield name


def _strategy(
    name: str,
    recipe: Recipe,
    rank: Rank,
    costs: Compute,
    precision: str,
    num_steps: int,
    gpu_bytes: float,
) -> Strategy:
    mode, num_ranks, num_micro = rank.parallel, rank.num_ranks, accumulation(recipe, rank.num_ranks)
    cost = step_cost(rank)
    peaks = PEAKS[GPU]
    passes = (costs.flops_per_step or 0) / num_ranks / (UTILIZATION * peaks[rank.compute_dtype])
    maps = (cost.flops_busiest_rank or 0) / (UTILIZATION * peaks[precision])

    # What a rank sends, and behind what it hides. Two thirds of the passes are backward.
    others = (num_ranks - 1) / num_ranks
    gradients, weight_bytes = gradient_bytes(recipe, rank)[0], ITEMSIZE[rank.compute_dtype]
    is_gathered = mode.kind == "fsdp2" or mode.stage == 3
    whole = 0.0
    if is_gathered:  # before each forward and each backward pass, and the reference's
        num_times = num_micro * (2 + rank.model.has_reference)
        whole = num_times * (rank.whole.total + rank.model.num_frozen) * weight_bytes
    elif mode.kind == "zero":  # the updated weights, after the step
        whole = rank.whole.total * weight_bytes
    gathered = whole * others
    rate = NVLINK if num_ranks <= GPUS_PER_NODE else NETWORK
    if is_gathered:
        exposed = max(0.0, (gradients + gathered) / rate - passes)
    else:
        # DDP and ZeRO 1 average once, during the last backward pass.
        window = passes * 2 / 3 / (1 if mode.stage == 2 else num_micro)
        exposed = max(0.0, gradients / rate - window) + gathered / rate
    exposed += max(0.0, cost.bytes_sent_max / rate - maps)
    if mode.offloads:
        exposed += rank.shard.total * OFFLOADED_BYTES / PCIE
        if mode.stage == 3:  # the weights too
            exposed += whole / num_ranks / PCIE
    sent = gradients + gathered + cost.bytes_sent_max
    hidden = max(0.0, sent / rate - exposed)
    seconds = passes + maps + exposed + INTERFERENCE * hidden
    memory = peak_memory(cost, costs)
    fits = memory is not None and memory * FRAGMENTATION + RESERVED_BYTES <= gpu_bytes
    is_rounded = mode.stage == 1 and rank.compute_dtype != "float32"
    hours = seconds * num_steps / 3600
    return Strategy(name, memory, sent, sent / rate, exposed, seconds, hours, fits, is_rounded)


def fastest(choices: Sequence[Strategy]) -> str | None:
    """The fastest that fits and adds gradients in float32; None if nothing fits."""
    return next((each.name for each in choices if each.fits and not each.is_rounded), None)
