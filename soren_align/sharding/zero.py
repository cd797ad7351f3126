"""Read the layouts of DeepSpeed's flat tensors, and verify them by the contents.

The attributes exist in every release from 0.7.0 (2022) to 0.19.8, for which this was tested; if one
changes, the verification fails before the first step.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim import SpectralOptimizer
from ..optim.layout import Named, map_state_sizes, share_of_state, whole_shape
from ..optim.second_moment import ROWS, row_moments
from .collectives import all_reduce
from .gather import RankStrategy
from .layout import Layout, flat_partitions, parameter_slices
from .plan import BUCKET_MB


class ZeroStrategy(RankStrategy):
    """ZeRO: each of the optimizer's tensors is one rank's flat shard of many matrices, with a
    layout of its own.
    """

    def __init__(
        self,
        layouts: Mapping[Tensor, Layout],
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        bucket_mb: float = BUCKET_MB,
    ):
        """device: for communication and maps; None is that of the tensors, which is right without
        CPU offload.
        """
        super().__init__(bucket_mb)
        self._layouts, self._group = dict(layouts), process_group
        # ZeRO 3 may have thousands of sub-groups
        self.max_plans = max(self.max_plans, len(layouts))
        self._device = device or next((tensor.device for tensor in layouts), torch.device("cpu"))

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The flat shards of matrices on this rank."""
        return list(self._layouts)

    def has_layout(self, parameter: Tensor) -> bool:
        """Whether a layout of this flat tensor was read."""
        return parameter in self._layouts

    def layout(self, named: Named) -> Layout:
        """The layout of the one tensor: ZeRO steps group by group, sub-group by sub-group."""
        if len(named) != 1:
            raise ValueError(
                "a step under ZeRO updates one flat tensor, but this parameter group has "
                f"{len(named)}"
            )
        return self._layouts[named[0][1]]

    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """The data-parallel ranks, and the device of this one."""
        return self._group or dist.group.WORLD, self._device  # type: ignore[return-value]


class _FlatTensor(NamedTuple):
    """One rank's shard of `parameters`, of the optimizer's group number `group`."""

    flat: Tensor
    group: int
    rule: str
    parameters: Sequence[Any]
    process_group: dist.ProcessGroup
    layout: Layout


def set_zero_strategy(zero: Any, bucket_mb: float = BUCKET_MB) -> list[list[Tensor]]:
    """Set the strategy of the optimizer in `zero`, DeepSpeed's own for stage 1, 2 or 3 or
    BF16_Optimizer. Collective.

    Returns the flat tensors that this rank updates, for each of the optimizer's groups. Call it on
    every rank, after deepspeed.initialize and before a checkpoint is loaded or a step is taken.
    Raises ValueError, on every rank, for an optimizer that is not ours, an unsupported option
    (round-robin gradients, optimizer states on NVMe or partly offloaded, ZenFlow, several
    data-parallel groups), and if the contents of a tensor do not match its layout.
    """
    optimizer = getattr(zero, "optimizer", None)
    if not isinstance(optimizer, SpectralOptimizer):
        raise ValueError(
            f"DeepSpeed would use {type(optimizer).__name__} instead of the optimizer of "
            "soren_align; remove `optimizer` from DeepSpeed's config, and set "
            "zero_force_ds_cpu_optimizer to false"
        )
    # Refuse what would be silently wrong: each option below moves or hides the flat tensors.
    unsupported = {
        "round_robin_gradients": "with this option DeepSpeed writes wrong universal checkpoints",
        "zenflow": "this option updates parameters outside of the optimizer",
        "swap_optimizer": (
            "with optimizer states on NVMe the flat tensors are empty (offload to cpu instead)"
        ),
    }
    for option, reason in unsupported.items():
        if getattr(zero, option, False):
            raise ValueError(
                f"DeepSpeed's {option} is not supported, because {reason}; switch this option off"
            )
    if getattr(zero, "partial_offload", 1.0) not in (0, 1, 1.0):
        raise ValueError(
            f"offload_optimizer.ratio is {zero.partial_offload}, but only 1 is supported; write 1"
        )
    # Read where the parameters are, from attributes of DeepSpeed that no interface promises.
    tensors = list(_flat_tensors(zero))
    spectral = [tensor for tensor in tensors if tensor.rule == "spectral"]
    groups = {tensor.process_group for tensor in tensors}
    if len(groups) != 1:
        raise ValueError(
            f"DeepSpeed has {len(groups)} data-parallel groups, but only one is supported; use no "
            "expert parallelism"
        )
    (group,) = groups
    from deepspeed.accelerator import get_accelerator  # pyright: ignore[reportMissingImports]

    # The device of this rank, on which the maps run; with CPU offload the flat tensors are on the
    # CPU.
    accelerator: Any = get_accelerator()
    device, rank = torch.device(accelerator.current_device_name()), dist.get_rank(group)
    # Verify by contents: the layout is read from private attributes, and a wrong one would map
    # matrices of other numbers without a word. Names whose shard differs from the parameter here:
    wrong = []
    pairs = (
        (t, *pair) for t in spectral for pair in zip(t.layout.weights, t.parameters, strict=True)
    )
    for tensor, matrix, parameter in pairs:
        for shard in (shard for shard in matrix.shards if shard.rank == rank):
            actual = tensor.flat.detach()[shard.start : shard.start + shard.numel]
            start, there = (
                (0, parameter.ds_tensor)
                if hasattr(parameter, "ds_tensor")
                else (shard.offset, parameter)
            )
            expected = there.detach().view(-1)[start : start + shard.numel]
            if not torch.equal(actual.to(expected.dtype), expected.to(actual.device)):
                wrong.append(matrix.name)
    num_wrong = torch.tensor(len(wrong), device=device)
    all_reduce(num_wrong, group, dist.ReduceOp.MAX)
    if num_wrong.item():
        here = f"on this rank {', '.join(wrong[:5])}" if wrong else "none on this rank"
        raise ValueError(
            f"{type(zero).__name__} stores up to {num_wrong.item()} matrices per rank in an "
            f"unexpected place ({here}), because of an unknown version or option of DeepSpeed; "
            "install deepspeed>=0.19.8,<0.20"
        )
    names = {matrix.name for tensor in spectral for matrix in tensor.layout.weights}
    unknown = [
        n
        for group in optimizer.param_groups
        for n in group.get("weight_layouts", {})
        if n not in names
    ]
    if unknown:
        raise ValueError(
            f"DeepSpeed has no parameter {unknown[0]}; build the optimizer from the module that it "
            "wraps"
        )
    matrices = {tensor.flat: tensor.layout for tensor in spectral}
    # From here on the optimizer steps by these layouts. The groups of AdamW need none: it is
    # elementwise, and steps on any flat shard.
    optimizer.strategy = ZeroStrategy(matrices, group, device, bucket_mb)
    optimizer.register_state_dict_post_hook(with_second_moments)
    by_group: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    for tensor in tensors:
        by_group[tensor.group].append(tensor.flat)
    return by_group


def _flat_tensors(zero: Any) -> Iterator[_FlatTensor]:
    """The optimizer's flat tensors, in the order in which they step.
    Raises ValueError for an unknown kind of ZeRO.
    """
    rules = [group["rule"] for group in zero.optimizer.param_groups]
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        for i, flat in enumerate(zero.fp32_partitioned_groups_flat):
            number = zero.sub_group_to_group_id[i]
            parameters, rule = zero.fp16_groups[i], rules[number]
            by_group = getattr(zero, "_get_sub_group_process_group", None)  # since 2026-06
            group = by_group(i) if by_group else zero.dp_process_group
            layout = parameter_slices(_shapes(zero, parameters, rule), dist.get_world_size(group))
            yield _FlatTensor(flat, number, rule, parameters, group, layout)
        return
    if hasattr(zero, "single_partition_of_fp32_groups"):  # stages 1 and 2
        # The float32 master weights: the tensors that DeepSpeed gives to the optimizer to step.
        # Their groups are in the order in which they were flattened, which `round_robin_gradients`
        # would change.
        flats, groups = zero.single_partition_of_fp32_groups, zero.round_robin_bit16_groups
        all_starts = getattr(zero, "round_robin_bit16_offsets", None)  # since 0.19.7
    elif hasattr(zero, "fp32_groups_flat_partition"):  # BF16_Optimizer
        flats, groups, all_starts = zero.fp32_groups_flat_partition, zero.bf16_groups, None
    else:
        raise ValueError(
            f"{type(zero).__name__} is an unknown ZeRO optimizer; use DeepSpeed's ZeRO stage 1, 2 "
            "or 3"
        )
    for i, flat in enumerate(flats):
        shapes, group = _shapes(zero, groups[i], rules[i]), zero.real_dp_process_group[i]
        # DeepSpeed may align parameters within the flat group, with padding between them that
        # belongs to no matrix (test_padding_between_parameters_belongs_to_no_matrix).
        starts, num_ranks = all_starts[i] if all_starts else None, dist.get_world_size(group)
        layout = flat_partitions(shapes, num_ranks, partition_numel=flat.numel(), starts=starts)
        yield _FlatTensor(flat, i, rules[i], groups[i], group, layout)


def _shapes(zero: Any, parameters: Sequence[Any], rule: str) -> dict[str, tuple[int, ...]]:
    # An attribute that no interface promises: without it, matrices are numbered in messages.
    names = getattr(zero, "param_names", {})
    shapes = [whole_shape(parameter) for parameter in parameters]
    if rule != "spectral":  # AdamW is elementwise: each parameter is one row
        shapes = [(1, math.prod(shape)) for shape in shapes]
    return {
        names.get(p, f"matrix {i}"): shape
        for i, (p, shape) in enumerate(zip(parameters, shapes, strict=True))
    }


def with_second_moments(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state_dict hook that adds `exp_avg_sq`, which DeepSpeed's universal checkpoints need.
    It adds no bytes.

    Moments of the rows, which such checkpoints lack, are in it at their places (`row_places`), as a
    sparse tensor. They stand beside it as well, so that the same ranks resume without a conversion.
    """
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for number, saved in state_dict["state"].items():
        # One zero, expanded: DeepSpeed's converter reads both of Adam's moments by name, and zeros
        # of the full size would add as many bytes to a checkpoint as the momentum has.
        zeros = saved["exp_avg"].new_zeros(1).expand(saved["exp_avg"].shape)
        if ROWS in saved:
            places = row_places(optimizer, tensors[number]).to(saved[ROWS].device)
            zeros = torch.sparse_coo_tensor(places[None], saved[ROWS], zeros.shape).cpu()
        state[number] = {"exp_avg_sq": zeros, **saved}
    return {**state_dict, "state": state}


def row_places(optimizer: SpectralOptimizer, tensor: Tensor) -> Tensor:
    """Return where the second moment of each row is in a moment of the flat tensor's shape: at the
    row's first element.
    """
    layouts = {
        name: layout
        for group in optimizer.param_groups
        for name, layout in group.get("weight_layouts", {}).items()
    }
    # DeepSpeed's universal checkpoints have tensors of the parameters' shape alone: a number per
    # row is saved at the place of the row's first element.
    places = [torch.zeros(0, dtype=torch.int64)]
    for shard in optimizer.strategy.shards([("", tensor)], layouts):
        size, numel = (
            map_state_sizes(shard.shape, shard.layout, row_moments("rows"))[ROWS],
            math.prod(shard.shape),
        )
        first, last = share_of_state(shard.shape, shard.offset, shard.numel, size)
        places.append(torch.arange(first, last) * numel // size - shard.offset + shard.start)
    return torch.cat(places)
