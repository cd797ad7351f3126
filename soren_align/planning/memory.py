"""The memory of one rank by kind of tensor, under DDP, ZeRO and FSDP2.

These are the rules of DeepSpeed 0.19.8 (stage_1_and_2.py, stage3.py, bf16_optimizer.py), torch's
DDP and FSDP2 and accelerate's settings of them; tests/planning/test_forecast.py compares
DeepSpeed's own tensors with them. All ranks have shards of the same size, padding included. Not
included: activations, temporarily gathered weights, single matrices, fragmentation of the
allocator.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ..optim import OPTIMIZERS
from ..optim.adamw import workspace
from ..optim.layout import LINEAR, WeightLayouts, map_state_sizes, weights_in
from ..optim.second_moment import row_moments
from ..recipe import OptimizerSection, Parallel
from ..sharding.layout import Shapes

FLOAT32 = 4  # bytes: of momentum, master weights and the matrices that ranks exchange
ITEMSIZE = {"fp32": FLOAT32, "float32": FLOAT32, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
BUCKET_SIZE = 5 * 10**8  # DeepSpeed's default: numbers
SUB_GROUP_SIZE = 10**9  # DeepSpeed's default: numbers per rank that ZeRO 3 updates at a time

Location = Literal["device", "cpu"]
Phase = Literal["always", "forward_backward", "optimizer_step"]


class Component(NamedTuple):
    """One kind of tensors on a rank. `detail`: dtype and share of the whole, as "float32, 1/8"."""

    name: str
    num_bytes: int
    detail: str
    location: Location = "device"
    phase: Phase = "always"


class Numel(NamedTuple):
    """The numbers of elements of the matrices, and of all other trained parameters."""

    matrices: int
    others: int

    @property
    def total(self) -> int:
        """The number of all trained parameters."""
        return self.matrices + self.others


@dataclass(frozen=True)
class ModelSizes:
    """A model's parameters.

    matrices: the parameters that the spectral optimizer updates. weight_layouts: how some of them
        store matrices.
    num_others: numbers of all other trained parameters, which AdamW updates.
    num_frozen, frozen_bytes: numbers and bytes of the parameters that are not trained. quantize:
        "4bit" or "8bit", of their linear layers.
    weight_bytes: of a trained number, and of its gradient; ZeRO and FSDP2 choose their own.
    has_reference: a second model is stored as the trained one, DPO's starting model.
    """

    matrices: Shapes
    num_others: int
    num_frozen: int = 0
    frozen_bytes: int = 0
    weight_layouts: WeightLayouts = field(default_factory=dict)
    weight_bytes: int = FLOAT32
    has_reference: bool = False
    quantize: str | None = None


@dataclass(frozen=True)
class Rank:
    """One of `num_ranks` ranks that train a model, and the numbers that it has.

    compute_dtype: "bfloat16" or "float16": under ZeRO the dtype of the weights, elsewhere autocast
    over their own.
    on_cpu: the ranks' device is a CPU.
    """

    model: ModelSizes
    parallel: Parallel
    num_ranks: int
    optimizer: OptimizerSection
    compute_dtype: str = "bfloat16"
    on_cpu: bool = False

    @cached_property
    def whole(self) -> Numel:
        """Numbers of all parameters of the model."""
        return Numel(sum(map(math.prod, self.model.matrices.values())), self.model.num_others)

    @cached_property
    def shard(self) -> Numel:
        """Numbers of the parameters whose optimizer states this rank has."""
        matrices, num_others = self.model.matrices.values(), self.model.num_others
        if self.parallel.kind == "ddp":
            return self.whole
        # Rows, or experts, of each parameter: every rank's block counts as large as the first.
        if self.parallel.kind == "fsdp2":
            blocks = (-(-shape[0] // self.num_ranks) * math.prod(shape[1:]) for shape in matrices)
            return Numel(sum(blocks), -(-num_others // self.num_ranks))
        if self.parallel.stage == 3:  # slices of each parameter
            return Numel(sum(map(self.slice_numel, matrices)), -(-num_others // self.num_ranks))
        return Numel(*map(self.partition_numel, self.whole))

    def slice_numel(self, shape: tuple[int, ...]) -> int:
        """Numbers of a parameter that a rank has under ZeRO 3."""
        return -(-math.prod(shape) // self.num_ranks)

    def partition_numel(self, numel: int) -> int:
        """Numbers of a flat group that a rank has under ZeRO 1 and 2, which DeepSpeed pads to twice
        the number of ranks.
        """
        return -(-numel // (2 * self.num_ranks)) * 2

    def sub_groups(self) -> list[Shapes]:
        """The sub-groups that ZeRO 3 updates one after another; each ends with the parameter that
        fills it.
        """
        limit, numel = (
            self.parallel.config["zero_optimization"].get("sub_group_size", SUB_GROUP_SIZE),
            0,
        )
        groups: list[dict[str, tuple[int, ...]]] = [{}]
        for name, shape in self.model.matrices.items():
            if numel >= limit:
                groups.append({})
                numel = 0
            groups[-1][name] = shape
            numel += self.slice_numel(shape)
        return [*groups]

    @property
    def part(self) -> str:
        """This rank's share, as a detail ends with it."""
        return f", 1/{self.num_ranks}" if self.num_ranks > 1 else ""

    def optimizer_states(self, part: str, location: Location) -> Component:
        """The moments: AdamW has two, and so has a spectral optimizer with second moments of
        elements, else one.

        part: of the detail.
        """
        second_moment = getattr(self.optimizer, "second_moment", None)
        momentum_dtype = getattr(self.optimizer, "momentum_dtype", None) or "float32"
        of_matrix = ITEMSIZE[momentum_dtype]  # bytes per number of a matrix
        if second_moment == "elements" or not self.optimizer.spectral_map:
            of_matrix += FLOAT32
        # The other parameters are AdamW's, with two float32 moments, whatever the matrices have.
        num_bytes = self.shard.matrices * of_matrix + self.shard.others * 2 * FLOAT32
        # Copies of the weights before the first step, which lie as the weights do.
        if self.optimizer.weight_decay_to == "start":
            itemsize = self.model.weight_bytes if self.parallel.kind == "ddp" else FLOAT32
            decays = self.optimizer.weight_decay > 0, self.optimizer.aux_weight_decay > 0
            num_bytes += itemsize * (
                self.shard.matrices * decays[0] + self.shard.others * decays[1]
            )
        map_state = {**OPTIMIZERS[self.optimizer.name].map_state, **row_moments(second_moment)}
        for name, shape in self.model.matrices.items() if map_state else ():
            layout = self.model.weight_layouts.get(name, LINEAR)
            weights = weights_in(name, shape, layout)
            numbers = sum(
                sum(map_state_sizes(w.shape, w.layout, map_state).values()) for w in weights
            )
            num_bytes += numbers * FLOAT32 * self.shard.matrices / self.whole.matrices
        return Component(
            "optimizer states",
            round(num_bytes),
            ("float32" if momentum_dtype == "float32" else "bfloat16 momentum") + part,
            location,
        )


def components(rank: Rank) -> Iterator[Component]:
    """Everything but the exchange and the maps of the optimizer's step; some components have no
    bytes.

    The last one is of the temporary tensors of AdamW's step, which updates the other parameters, or
    all if it is the only optimizer.
    """
    model, parallel, optimizer = rank.model, rank.parallel, rank.optimizer
    is_sharded = parallel.kind == "fsdp2"
    offloads = parallel.offloads or bool(is_sharded and parallel.config.get("offload_params"))
    location: Location = "cpu" if offloads else "device"
    compensation = 2 if optimizer.compensation == "kahan" else 0  # bytes beside each trained number
    # Under ZeRO the dtypes and copies follow from DeepSpeed's options, elsewhere from the
    # parameters.
    if parallel.kind == "zero":
        yield from _zero_components(rank)
    else:
        part = f", 1/{rank.num_ranks}" if is_sharded else ""
        itemsize = FLOAT32 if is_sharded else model.weight_bytes
        num_bytes, detail = (
            rank.shard.total * itemsize,
            f"float32{part}" if itemsize == FLOAT32 else "bfloat16",
        )
        yield Component("weights", num_bytes, detail, location)
        frozen_detail = f"{model.quantize}, not trained" if model.quantize else "not trained"
        yield Component("frozen weights", model.frozen_bytes, frozen_detail, location)
        yield Component(
            "reference model",
            (num_bytes + model.frozen_bytes) * model.has_reference,
            detail,
            location,
        )
        yield rank.optimizer_states(part, location)
        yield Component(
            "Kahan compensation", rank.shard.total * compensation, "16 bits per weight", location
        )
        yield Component("gradients", num_bytes, detail, location)
    numel = rank.shard.others if optimizer.spectral_map else rank.shard.total
    weight, is_compensated = (
        (model.weight_bytes, compensation > 0) if parallel.kind == "ddp" else (FLOAT32, False)
    )
    num_bytes = workspace(numel, weight, is_compensated)
    yield Component("AdamW workspace", num_bytes, "float32", location, "optimizer_step")


def _zero_components(rank: Rank) -> Iterator[Component]:
    config, stage, dtype, part = (
        rank.parallel.config,
        rank.parallel.stage,
        rank.compute_dtype,
        rank.part,
    )
    zero: dict[str, Any] = config["zero_optimization"]
    numel, whole, weight = rank.shard.total, rank.whole.total, ITEMSIZE[dtype]
    offloads_weights = stage == 3 and (zero.get("offload_param") or {}).get("device") == "cpu"
    location: Location = "cpu" if offloads_weights else "device"
    num_bytes, detail = (numel * weight, dtype + part) if stage == 3 else (whole * weight, dtype)
    # DeepSpeed converts the whole model to its dtype, frozen weights too.
    frozen_bytes = rank.model.num_frozen * weight
    yield Component("weights", num_bytes, detail, location)
    yield Component("frozen weights", frozen_bytes, dtype, location)
    yield Component(
        "reference model", (num_bytes + frozen_bytes) * rank.model.has_reference, detail, location
    )
    state_location: Location = "cpu" if rank.parallel.offloads else "device"
    # Also for float32 weights: stage 3 means to update those in place, but compares a device with
    # its name.
    yield Component("float32 master weights", numel * FLOAT32, f"float32{part}", state_location)
    yield rank.optimizer_states(part, state_location)

    setting = (config.get("data_types") or {}).get("grad_accum_dtype")
    gradient = ITEMSIZE.get(str(setting), weight)  # bytes of an accumulated number
    gradient_dtype = {2: dtype, FLOAT32: "float32"}[gradient]
    # The copy of the gradients for the step is of what steps at a time: a parameter group under
    # stages 1 and 2, a sub-group under stage 3.
    largest = rank.shard.matrices
    if stage == 3:
        largest = max(sum(map(rank.slice_numel, group.values())) for group in rank.sub_groups())
    num_bytes = max(largest, rank.shard.others) * FLOAT32
    to_update = Component(
        "gradients for the step", num_bytes, f"float32{part}, copied", phase="optimizer_step"
    )
    # An accumulation buffer of its own is flat already: stages 1 and 2 then use it as it is.
    has_buffer = gradient != weight
    size, detail = (whole, gradient_dtype) if stage == 1 else (numel, gradient_dtype + part)
    if rank.parallel.offloads:
        yield Component("gradients for the step", numel * FLOAT32, f"float32{part}", "cpu")
        location = "device" if stage < 3 and has_buffer else "cpu"
        yield Component("accumulated gradients", numel * gradient, gradient_dtype + part, location)
        yield Component(
            "updated weights, copied", numel * weight * (stage < 3), dtype + part, "cpu"
        )
    elif stage == 3:
        yield Component("gradients", numel * gradient, gradient_dtype + part)
        yield to_update
    elif has_buffer:  # with stage 1 this is BF16_Optimizer
        yield Component("gradients", size * gradient, detail)
        yield Component("micro-batch gradients", whole * weight * (stage == 1), dtype)
        if stage == 1:
            return  # BF16_Optimizer reduces its flat gradients in place
    else:
        yield Component("gradients", size * gradient, detail, phase="forward_backward")
        yield Component(
            "gradients", numel * gradient, gradient_dtype + part, phase="optimizer_step"
        )
        yield to_update
    # The buckets, and the copies of one that is being averaged: flattened under stages 1 and 2, and
    # in the dtype of the sum.
    bucket = zero.get("reduce_bucket_size", BUCKET_SIZE)
    # transformers: the square of the hidden size, the shorter side of a model's largest matrices
    if bucket == "auto":
        bucket = max((min(shape[-2:]) for shape in rank.model.matrices.values()), default=0) ** 2
    number = 2 if stage < 3 and zero.get("overlap_comm") else 1
    num_bytes, detail = int(bucket) * number * weight, f"{dtype}, {number} x {int(bucket):,}"
    yield Component(
        "reduce buckets", num_bytes, detail, phase="always" if stage == 3 else "forward_backward"
    )
    sum_dtype = rank.parallel.gradient_dtype(dtype)
    copies = [dtype] * (stage < 3) + [sum_dtype] * (sum_dtype != dtype)
    num_bytes = min(int(bucket), whole) * sum(ITEMSIZE[copied] for copied in copies)
    yield Component("copies of a bucket", num_bytes, " and ".join(copies), phase="forward_backward")
