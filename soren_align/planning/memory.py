"""The memory of one rank by kind of tensor, under DDP, ZeRO and FSDP2.

These are the rules of DeepSpeed 0.19.8 (stage_1_and_2.py, stage3.py, bf16_optimizer.py), torch's DDP and FSDP2 and
accelerate's settings of them; tests/planning/test_forecast.py compares DeepSpeed's own tensors with them. Not included:
activations, temporarily gathered weights, single matrices, padding, fragmentation of the allocator.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..core.optimizer_settings import FactorPrecision, States
from ..optim import OPTIMIZERS
from ..optim.adamw import workspace
from ..optim.eight_bits import BLOCK, SMALL
from ..optim.layout import WeightLayouts, map_state_sizes
from ..recipe import Parallel
from ..sharding.layout import Shapes
from ..sharding.plan import BUCKET_MB
from ..spectral import MAPS, SpectralMap

# ---
# Numbers of parameters: of a model, and of one rank's shard of it under DDP, ZeRO and FSDP2.
#
# The shards are those of DeepSpeed 0.19.8 and of torch's FSDP2; all ranks have the same size, padding included.

SUB_GROUP_SIZE = 10**9  # DeepSpeed's default: numbers per rank that ZeRO 3 updates at a time


class Numel(NamedTuple):
    """Numbers of the matrices, and of all other trained parameters."""

    matrices: int
    others: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.matrices + self.others


@dataclass(frozen=True)
class ModelSizes:
    """A model's parameters.

    matrices: the parameters that the spectral optimizer updates. weight_layouts: how some of them store matrices.
    num_others: numbers of all other trained parameters, which AdamW updates.
    num_frozen, frozen_bytes: numbers and bytes of the parameters that are not trained.
    num_small_others: numbers of the others whose 8-bit states have a scale each.
    """

    matrices: Shapes
    num_others: int
    num_frozen: int = 0
    frozen_bytes: int = 0
    num_small_others: int = 0
    weight_layouts: WeightLayouts = field(default_factory=dict)

    @property
    def small(self) -> Numel:
        """Numbers of all parameters whose 8-bit states have a scale each."""
        return Numel(sum(n for n in map(math.prod, self.matrices.values()) if n < SMALL), self.num_small_others)


@dataclass(frozen=True)
class RankSizes:
    """The trained numbers of one of `num_ranks` ranks."""

    model: ModelSizes
    num_ranks: int

    @property
    def whole(self) -> Numel:
        """Of all parameters."""
        return Numel(numel_of(self.model.matrices), self.model.num_others)

    @property
    def flat_partitions(self) -> Numel:
        """Of a rank's partitions under ZeRO 1 and 2."""
        return Numel(*(partition_numel(numel, self.num_ranks) for numel in self.whole))

    @property
    def parameter_slices(self) -> Numel:
        """Of a rank's slices of each parameter under ZeRO 3."""
        slices = (_ceil(math.prod(shape), self.num_ranks) for shape in self.model.matrices.values())
        return Numel(sum(slices), _ceil(self.model.num_others, self.num_ranks))

    @property
    def row_blocks(self) -> Numel:
        """Of a rank's rows (or experts) of each parameter under FSDP2, with every block as large as the first."""
        shapes = self.model.matrices.values()
        blocks = (_ceil(shape[0], self.num_ranks) * math.prod(shape[1:]) for shape in shapes)
        return Numel(sum(blocks), _ceil(self.model.num_others, self.num_ranks))

    def shard(self, parallel: Parallel) -> Numel:
        """Of a rank's optimizer states under `parallel`."""
        if parallel.kind == "ddp":
            return self.whole
        if parallel.kind == "fsdp2":
            return self.row_blocks
        return self.parameter_slices if parallel.stage == 3 else self.flat_partitions


def sub_groups(matrices: Shapes, num_ranks: int, zero: dict[str, Any]) -> list[Shapes]:
    """The sub-groups that ZeRO 3 updates one after another; each ends with the parameter that fills it."""
    limit, numel = zero.get("sub_group_size", SUB_GROUP_SIZE), 0
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in matrices.items():
        if numel >= limit:
            groups.append({})
            numel = 0
        groups[-1][name] = shape
        numel += _ceil(math.prod(shape), num_ranks)
    return [*groups]


def largest_sub_group(sizes: RankSizes, zero: dict[str, Any]) -> int:
    """A rank's numbers of the largest sub-group of matrices."""
    groups = sub_groups(sizes.model.matrices, sizes.num_ranks, zero)
    return max(sum(_ceil(math.prod(shape), sizes.num_ranks) for shape in group.values()) for group in groups)


def partition_numel(numel: int, num_ranks: int) -> int:
    """A rank's part of a flat group of ZeRO 1 and 2, which DeepSpeed pads to twice the number of ranks."""
    return _ceil(numel, 2 * num_ranks) * 2


def numel_of(matrices: Shapes) -> int:
    """Numbers of all matrices."""
    return sum(map(math.prod, matrices.values()))


def _ceil(numel: int, num_parts: int) -> int:
    return -(-numel // num_parts)


FLOAT32 = 4  # bytes: of momentum, master weights and the matrices that ranks exchange
ITEMSIZE = {"fp32": FLOAT32, "float32": FLOAT32, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
BUCKET_SIZE = 5 * 10**8  # DeepSpeed's default: numbers

Location = Literal["device", "cpu"]
Phase = Literal["always", "forward_backward", "optimizer_step"]


class Component(NamedTuple):
    """One kind of tensors on a rank. `detail`: dtype and share of the whole, as "float32, 1/8"."""

    name: str
    num_bytes: int
    detail: str
    location: Location = "device"
    phase: Phase = "always"


@dataclass(frozen=True)
class StepSettings:
    """The settings of a run that the cost and memory of its steps depend on.

    optimizer: "adamw" updates the matrices too, and no spectral map is computed.
    spectral_map: whose FLOPs are counted, with its ns_steps or resolution; None: a decomposition, not counted.
    map_precision: of the map's factors for a matrix of so many rows.
    compute_dtype: "bfloat16" or "float16": under ZeRO the dtype of the weights, elsewhere autocast over their own.
    has_reference_model: DPO's starting model, stored as the trained one.
    workspace_mb: of maps in a batch, as in the optimizer. bucket_mb: of a bucket of the exchange of matrices.
    weight_bytes: of a trained number, and of its gradient; ZeRO chooses its own. compensation_bytes: beside each.
    states: "float32" or "8bit".
    quantize: "4bit" or "8bit": of the frozen linear layers.
    on_cpu: the ranks' device is a CPU.
    """

    optimizer: str = "soren"
    spectral_map: SpectralMap | None = MAPS["minimax"]
    map_settings: dict[str, Any] = field(default_factory=dict)
    map_precision: Callable[[int], FactorPrecision] = lambda num_rows: "float32"
    compute_dtype: str = "bfloat16"
    has_reference_model: bool = False
    workspace_mb: float = 2048
    bucket_mb: float = BUCKET_MB
    weight_bytes: int = FLOAT32
    compensation_bytes: int = 0
    states: States = "float32"
    on_cpu: bool = False
    quantize: str | None = None

    def optimizer_states(self, sizes: RankSizes, parallel: Parallel, part: str, location: Location) -> Component:
        """The moments of a rank: AdamW has two, a spectral optimizer one. part: of the detail, as ", 1/8".

        In 8 bits a number is one byte and its part of a block's scale; small parameters have a scale per number.
        """
        shard, whole, small = sizes.shard(parallel), sizes.whole, sizes.model.small
        num_bytes = 0.0
        for numel, total, num_small, num_moments in (
            (shard.matrices, whole.matrices, small.matrices, 2 if self.optimizer == "adamw" else 1),
            (shard.others, whole.others, small.others, 2),
        ):
            share = num_small / total if total else 0
            itemsize = (1 + FLOAT32 / BLOCK) * (1 - share) + (1 + FLOAT32) * share
            num_bytes += numel * num_moments * (itemsize if self.states == "8bit" else FLOAT32)
        model, cls = sizes.model, OPTIMIZERS.get(self.optimizer)
        for name, shape in model.matrices.items() if cls and cls.map_state else ():
            layout = model.weight_layouts.get(name, "linear")
            numbers = sum(map_state_sizes(shape[-2:], layout, cls.map_state).values()) * math.prod(shape[:-2])
            num_bytes += numbers * FLOAT32 * shard.matrices / whole.matrices
        detail = "8 bits" if self.states == "8bit" else "float32"
        return Component("optimizer states", round(num_bytes), detail + part, location)


def components(sizes: RankSizes, parallel: Parallel, settings: StepSettings) -> Iterator[Component]:
    """Everything but what the optimizer's exchange and maps need; some components have no bytes."""
    if parallel.kind == "zero":
        yield from _zero_weights(sizes, parallel, settings)
        yield from _zero_gradients(sizes, parallel, settings)
        return
    is_sharded = parallel.kind == "fsdp2"
    shard = sizes.shard(parallel)
    detail = f"float32, 1/{sizes.num_ranks}" if is_sharded else "float32"
    location: Location = "cpu" if is_sharded and parallel.config.get("offload_params") else "device"
    itemsize = FLOAT32 if is_sharded else settings.weight_bytes
    num_bytes, weight_detail = shard.total * itemsize, detail if itemsize == FLOAT32 else "bfloat16"
    has_buckets = sizes.num_ranks > 1 and not is_sharded
    yield Component("weights", num_bytes, weight_detail, location)
    frozen_detail = f"{settings.quantize}, not trained" if settings.quantize else "not trained"
    yield Component("frozen weights", sizes.model.frozen_bytes, frozen_detail, location)
    reference = (num_bytes + sizes.model.frozen_bytes) * settings.has_reference_model
    yield Component("reference model", reference, weight_detail, location)
    yield settings.optimizer_states(sizes, parallel, detail.removeprefix("float32"), location)
    compensation = shard.total * settings.compensation_bytes
    yield Component("Kahan compensation", compensation, "16 bits per weight", location)
    yield Component("gradients", num_bytes, weight_detail, location)
    # accelerate leaves DDP's gradient_as_bucket_view off, so that its buckets are a copy of all gradients.
    yield Component("gradient buckets", num_bytes * has_buckets, f"{weight_detail}, copied by DDP")


def _zero_weights(sizes: RankSizes, parallel: Parallel, settings: StepSettings) -> Iterator[Component]:
    zero, dtype = parallel.config["zero_optimization"], settings.compute_dtype
    shard, part = sizes.shard(parallel), _part(sizes.num_ranks)
    state_location: Location = "cpu" if parallel.offloads else "device"
    offloads_weights = parallel.stage == 3 and (zero.get("offload_param") or {}).get("device") == "cpu"
    location: Location = "cpu" if offloads_weights else "device"
    numel, detail = (shard.total, dtype + part) if parallel.stage == 3 else (sizes.whole.total, dtype)
    num_bytes = numel * ITEMSIZE[dtype]
    yield Component("weights", num_bytes, detail, location)
    yield Component("frozen weights", sizes.model.num_frozen * ITEMSIZE[dtype], dtype, location)
    reference = (num_bytes + sizes.model.num_frozen * ITEMSIZE[dtype]) * settings.has_reference_model
    yield Component("reference model", reference, detail, location)
    # Also for float32 weights: stage 3 means to update those in place, but compares a device with its name.
    yield Component("float32 master weights", shard.total * FLOAT32, f"float32{part}", state_location)
    yield settings.optimizer_states(sizes, parallel, part, state_location)


def _zero_gradients(sizes: RankSizes, parallel: Parallel, settings: StepSettings) -> Iterator[Component]:
    zero, stage, dtype = parallel.config["zero_optimization"], parallel.stage, settings.compute_dtype
    shard, whole, part = sizes.shard(parallel), sizes.whole.total, _part(sizes.num_ranks)
    numel, weight = shard.total, ITEMSIZE[dtype]
    setting = (parallel.config.get("data_types") or {}).get("grad_accum_dtype")
    gradient = ITEMSIZE.get(str(setting), weight)  # bytes of an accumulated number
    gradient_dtype = {2: dtype, FLOAT32: "float32"}[gradient]
    largest = max(largest_sub_group(sizes, zero) if stage == 3 else shard.matrices, shard.others)
    to_update = Component("gradients for the step", largest * FLOAT32, f"float32{part}, copied", phase="optimizer_step")
    # An accumulation buffer of its own is flat already: stages 1 and 2 then use it as it is.
    has_buffer = gradient != weight
    if parallel.offloads:
        yield Component("gradients for the step", numel * FLOAT32, f"float32{part}", "cpu")
        location: Location = "device" if stage < 3 and has_buffer else "cpu"
        yield Component("accumulated gradients", numel * gradient, gradient_dtype + part, location)
        yield Component("updated weights, copied", numel * weight * (stage < 3), dtype + part, "cpu")
    elif stage == 3:
        yield Component("gradients", numel * gradient, gradient_dtype + part)
        yield to_update
    elif has_buffer:  # with stage 1 this is BF16_Optimizer
        size, detail = (whole, gradient_dtype) if stage == 1 else (numel, gradient_dtype + part)
        yield Component("gradients", size * gradient, detail)
        yield Component("micro-batch gradients", whole * weight * (stage == 1), dtype)
    else:
        size, detail = (whole, gradient_dtype) if stage == 1 else (numel, gradient_dtype + part)
        yield Component("gradients", size * gradient, detail, phase="forward_backward")
        yield Component("gradients", numel * gradient, gradient_dtype + part, phase="optimizer_step")
        yield to_update
    if parallel.offloads or stage > 1 or not has_buffer:  # else BF16_Optimizer reduces its flat gradients in place
        yield from _zero_buckets(sizes, zero, stage, dtype, parallel.gradient_dtype(dtype))


def _zero_buckets(
    sizes: RankSizes, zero: dict[str, Any], stage: int, dtype: str, sum_dtype: str
) -> Iterator[Component]:
    """The buckets, and the copies of one that is being averaged: flattened under stages 1 and 2, and in `sum_dtype`."""
    numel = zero.get("reduce_bucket_size", BUCKET_SIZE)
    if numel == "auto":  # transformers: the square of the hidden size, the shorter side of a model's largest matrices
        numel = max((min(shape[-2:]) for shape in sizes.model.matrices.values()), default=0) ** 2
    number = 2 if stage < 3 and zero.get("overlap_comm") else 1
    num_bytes, detail = int(numel) * number * ITEMSIZE[dtype], f"{dtype}, {number} x {int(numel):,}"
    yield Component("reduce buckets", num_bytes, detail, phase="always" if stage == 3 else "forward_backward")
    copies = [dtype] * (stage < 3) + [sum_dtype] * (sum_dtype != dtype)
    num_bytes = min(int(numel), sizes.whole.total) * sum(ITEMSIZE[copied] for copied in copies)
    yield Component("copies of a bucket", num_bytes, " and ".join(copies), phase="forward_backward")


def adamw_workspace(sizes: RankSizes, parallel: Parallel, settings: StepSettings) -> Component:
    """Temporary tensors of AdamW's step, which updates the other parameters, or all if it is the only optimizer."""
    offloads = parallel.offloads or bool(parallel.kind == "fsdp2" and parallel.config.get("offload_params"))
    shard = sizes.shard(parallel)
    numel = shard.total if settings.optimizer == "adamw" else shard.others
    weight, compensation = FLOAT32, 0
    if parallel.kind == "ddp":
        weight, compensation = settings.weight_bytes, settings.compensation_bytes
    num_bytes = workspace(numel, weight, compensation > 0, settings.states == "8bit")
    return Component("AdamW workspace", num_bytes, "float32", "cpu" if offloads else "device", "optimizer_step")


def _part(num_ranks: int) -> str:
    return f", 1/{num_ranks}" if num_ranks > 1 else ""
