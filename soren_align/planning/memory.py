"""What a rank holds, tensor kind by tensor kind, under DDP, ZeRO and FSDP2.

These are the rules of DeepSpeed 0.19.8 (stage_1_and_2.py, stage3.py, bf16_optimizer.py), torch's DDP and FSDP2 and
accelerate's settings of them; tests/planning/test_forecast.py holds DeepSpeed's own tensors against them. Not counted:
activations, weights gathered for a moment, single matrices in passing, padding, what an allocator wastes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..optim.adamw_step import workspace
from ..recipe import Parallel
from ..sharding.geometry import Shapes

FLOAT32 = 4  # bytes: of momentum and master weights, and of what travels to a map and back
ITEMSIZE = {"fp32": FLOAT32, "float32": FLOAT32, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}  # in its configs
SUB_GROUP_SIZE = 10**9  # DeepSpeed's default: numbers per rank that ZeRO 3 steps at a time
BUCKET_SIZE = 5 * 10**8  # DeepSpeed's default: numbers

Place = Literal["device", "cpu"]
When = Literal["always", "passes", "step"]


class Component(NamedTuple):
    """One kind of tensors on a rank. `of` says which: "float32, 1/8". when: passes are those forward and backward."""

    name: str
    num_bytes: int
    of: str
    where: Place = "device"
    when: When = "always"


@dataclass(frozen=True)
class Sizes:
    """A model's numbers: its matrices, and all the rest, which is cut as one. Parts are of one size on all ranks."""

    matrices: Shapes
    num_others: int
    num_ranks: int
    num_moments: int = 1  # of a matrix; of the rest AdamW keeps two
    weight: int = FLOAT32  # bytes of a trained number, and of its gradient, where ZeRO does not choose them
    compensation: int = 0  # bytes beside each
    frozen: tuple[int, int] = (0, FLOAT32)  # numbers that are held and not trained, and bytes of all of them

    @property
    def whole(self) -> tuple[int, int]:
        """Of the matrices, of the rest."""
        return numel_of(self.matrices), self.num_others

    @property
    def flat(self) -> tuple[int, int]:
        """A rank's parts under ZeRO 1 and 2."""
        return partition(numel_of(self.matrices), self.num_ranks), partition(self.num_others, self.num_ranks)

    @property
    def sliced(self) -> tuple[int, int]:
        """A rank's parts under ZeRO 3."""
        return sum(-(-m * n // self.num_ranks) for m, n in self.matrices.values()), -(
            -self.num_others // self.num_ranks
        )

    @property
    def rows(self) -> tuple[int, int]:
        """A rank's parts under FSDP2, which gives every rank the place of the first one's rows."""
        return sum(-(-m // self.num_ranks) * n for m, n in self.matrices.values()), -(
            -self.num_others // self.num_ranks
        )

    def states(self, parts: tuple[int, int]) -> int:
        """Bytes of the optimizer's moments of `parts`; they are float32 always."""
        return (parts[0] * self.num_moments + parts[1] * 2) * FLOAT32


def components(sizes: Sizes, parallel: Parallel, *, arithmetic: str, reference: bool) -> Iterator[Component]:
    """All but what the optimizer's exchange and maps need; some of no bytes.

    arithmetic: "bfloat16" (or "float16"): under ZeRO the weights are such; elsewhere it is autocast over float32 ones.
    reference: DPO's starting model, held as the trained one is.
    """
    if parallel.kind == "zero":
        yield from _of_zero(sizes, parallel, arithmetic, reference)
        return
    sharded, several = parallel.kind == "fsdp2", sizes.num_ranks > 1
    parts, of = (sizes.rows, f"float32, 1/{sizes.num_ranks}") if sharded else (sizes.whole, "float32")
    where: Place = "cpu" if sharded and parallel.config.get("offload_params") else "device"
    numel, narrow = sum(parts), sizes.weight if not sharded else FLOAT32
    held = of if narrow == FLOAT32 else "bfloat16"
    yield Component("weights", numel * narrow, held, where)
    yield Component("frozen weights", sizes.frozen[1], "not trained", where)
    yield Component("reference model", numel * narrow * reference, held, where)
    yield Component("optimizer states", sizes.states(parts), of, where)
    yield Component("compensation", numel * sizes.compensation, "16 bits a weight", where)
    yield Component("gradients", numel * narrow, held, where)
    # accelerate leaves DDP's gradient_as_bucket_view off, so that its buckets are a copy of all gradients.
    yield Component("gradients' buckets", numel * narrow * (several and not sharded), f"{held}, DDP's copy")


def _of_zero(sizes: Sizes, parallel: Parallel, arithmetic: str, reference: bool) -> Iterator[Component]:
    zero, stage, offloads = parallel.config["zero_optimization"], parallel.stage, parallel.offloads
    weight = FLOAT32 if arithmetic == "float32" else 2
    names = {2: arithmetic, FLOAT32: "float32"}
    asked = (parallel.config.get("data_types") or {}).get("grad_accum_dtype")
    gradient = ITEMSIZE.get(str(asked), weight)
    part, whole = f", 1/{sizes.num_ranks}" if sizes.num_ranks > 1 else "", sum(sizes.whole)
    parts = sizes.sliced if stage == 3 else sizes.flat
    numel = sum(parts)
    states: Place = "cpu" if offloads else "device"
    weights: Place = "cpu" if stage == 3 and (zero.get("offload_param") or {}).get("device") == "cpu" else "device"

    held, of = (numel, names[weight] + part) if stage == 3 else (whole, names[weight])
    yield Component("weights", held * weight, of, weights)
    yield Component("frozen weights", sizes.frozen[0] * weight, names[weight], weights)
    yield Component("reference model", held * weight * reference, of, weights)
    # Even of float32 weights: stage 3 means to step those where they are, but compares a device with its name.
    yield Component("float32 masters", numel * FLOAT32, f"float32{part}", states)
    yield Component("optimizer states", sizes.states(parts), f"float32{part}", states)

    largest = max(_sub_group(sizes, zero) if stage == 3 else parts[0], parts[1])
    to_step = Component("gradients that step", largest * FLOAT32, f"float32{part}, flat", when="step")
    separate = gradient != weight  # a buffer of their own, flat already: stages 1 and 2 then step it as it is
    if offloads:
        yield Component("gradients that step", numel * FLOAT32, f"float32{part}", "cpu")
        so_far: Place = "device" if stage < 3 and separate else "cpu"
        yield Component("gradients so far", numel * gradient, names[gradient] + part, so_far)
        yield Component("weights on their way", numel * weight * (stage < 3), names[weight] + part, "cpu")
    elif stage == 3:
        yield Component("gradients", numel * gradient, names[gradient] + part)
        yield to_step
    elif separate:  # with stage 1 this is BF16_Optimizer
        held, of = (whole, names[gradient]) if stage == 1 else (numel, names[gradient] + part)
        yield Component("gradients", held * gradient, of)
        yield Component("gradients of a pass", whole * weight * (stage == 1), names[weight])
    else:
        held, of = (whole, names[gradient]) if stage == 1 else (numel, names[gradient] + part)
        yield Component("gradients", held * gradient, of, when="passes")
        yield Component("gradients", numel * gradient, names[gradient] + part, when="step")
        yield to_step
    if stage == 1 and separate and not offloads:
        return  # BF16_Optimizer sums its flat gradients where they are
    bucket = zero.get("reduce_bucket_size", BUCKET_SIZE)
    if bucket == "auto":  # transformers: the square of the hidden size, the shorter side of a model's largest matrices
        bucket = max((min(shape) for shape in sizes.matrices.values()), default=0) ** 2
    number = 2 if stage < 3 and zero.get("overlap_comm") else 1
    of = f"{number} x {names[weight]}"
    yield Component("gradients' buckets", int(bucket) * number * weight, of, when="always" if stage == 3 else "passes")


def adamw_workspace(sizes: Sizes, parallel: Parallel, *, steps_all: bool, on_cpu: bool) -> Component:
    """What AdamW's step makes in passing; it steps the rest, and with `steps_all` the matrices too.

    on_cpu: the device is one.
    """
    offloads = parallel.offloads or bool(parallel.kind == "fsdp2" and parallel.config.get("offload_params"))
    sharded = {"ddp": sizes.whole, "fsdp2": sizes.rows}.get(parallel.kind)
    matrices, others = sharded or (sizes.sliced if parallel.stage == 3 else sizes.flat)
    weight, compensation = (sizes.weight, sizes.compensation) if parallel.kind == "ddp" else (FLOAT32, 0)
    numel = others + matrices * steps_all
    num_bytes = workspace(numel, weight, compensation > 0, on_cpu or offloads)
    return Component("workspace of AdamW", num_bytes, "float32", "cpu" if offloads else "device", "step")


def sub_groups(matrices: Shapes, num_ranks: int, zero: dict[str, Any]) -> list[Shapes]:
    """The sub-groups that ZeRO 3 steps one after another; each ends with the parameter that fills it."""
    most, numel = zero.get("sub_group_size", SUB_GROUP_SIZE), 0
    groups: list[dict[str, tuple[int, int]]] = [{}]
    for name, (m, n) in matrices.items():
        if numel >= most:
            groups.append({})
            numel = 0
        groups[-1][name] = (m, n)
        numel += -(-m * n // num_ranks)
    return [*groups]


def _sub_group(sizes: Sizes, zero: dict[str, Any]) -> int:
    """A rank's numbers of the largest sub-group of matrices."""
    groups = sub_groups(sizes.matrices, sizes.num_ranks, zero)
    return max(sum(-(-m * n // sizes.num_ranks) for m, n in group.values()) for group in groups)


def partition(numel: int, num_ranks: int) -> int:
    """A rank's part of a flat group of ZeRO 1 and 2, which DeepSpeed pads to twice the number of ranks."""
    return -(-numel // (2 * num_ranks)) * 2


def numel_of(matrices: Shapes) -> int:
    """How many numbers they have."""
    return sum(m * n for m, n in matrices.values())
