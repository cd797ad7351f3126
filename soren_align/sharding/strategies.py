"""The placements for DDP (Replicas), FSDP2 (RowBlocks) and ZeRO (FlatShards): set as `optimizer.placement`."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..optim import BLOCK, SMALL, Segment, SharedBlocks
from .exchange_plan import ROUND_MB
from .geometry import Layout, replicas, row_blocks
from .rank_placement import Named, RankPlacement


class Replicas(RankPlacement):
    """DDP: all ranks hold all matrices, and their gradients are averaged already."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, round_mb: float = ROUND_MB):
        super().__init__(round_mb)
        self._group = process_group
        self._device = torch.device("cpu")

    def has_layout(self, parameter: Tensor) -> bool:
        """Whether it is a whole matrix, or all experts of a layer."""
        return parameter.ndim in (2, 3) and not isinstance(parameter, DTensor)

    def check_gradients(self, named: Named, error: Exception | None, squares: Tensor) -> tuple[float, ...]:
        """As RankPlacement, on the device of the first parameter, whether it is a matrix or has a gradient.

        That is one device on all ranks, also on a rank with an error, and one that the group can reduce on.
        """
        self._device = named[0][1].device
        return super().check_gradients(named, error, squares / dist.get_world_size(self._group))  # the same on all

    def layout(self, named: Named) -> Layout:
        """Every parameter on every rank."""
        return replicas({name: tuple(p.shape) for name, p in named}, dist.get_world_size(self._group))

    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """All ranks of the group, on the device of the parameters."""
        return self._group or dist.group.WORLD, self._device  # type: ignore[return-value]


class RowBlocks(RankPlacement):
    """FSDP2: `fully_shard` has sharded every parameter by rows, over a mesh of one axis."""

    def __init__(self, round_mb: float = ROUND_MB):
        super().__init__(round_mb)
        self._mesh = None

    def has_layout(self, parameter: Tensor) -> bool:
        """Whether it is a matrix sharded by rows, or experts divided among the ranks.

        Raises ValueError for a parameter sharded in any other way.
        """
        if not isinstance(parameter, DTensor):
            return False
        if parameter.device_mesh.ndim != 1 or tuple(parameter.placements) != (Shard(0),):
            raise _unsupported(parameter)
        return parameter.ndim in (2, 3)

    def check_gradients(self, named: Named, error: Exception | None, squares: Tensor) -> tuple[float, ...]:
        """As RankPlacement; the mesh is that of the parameters."""
        sharded = [p for _, p in named if isinstance(p, DTensor)]
        for parameter in sharded:
            if parameter.device_mesh.ndim != 1:  # the same on all ranks, and such a mesh has no group for a collective
                raise _unsupported(parameter)
        if sharded:
            self._mesh = sharded[0].device_mesh
        return super().check_gradients(named, error, squares)

    def layout(self, named: Named) -> Layout:
        """Row blocks, as torch.chunk divides them."""
        group, _ = self.ranks()
        return row_blocks({name: tuple(p.shape) for name, p in named}, dist.get_world_size(group))

    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """All ranks of the mesh, each with its current device."""
        if self._mesh is None:
            raise ValueError("no parameter is a DTensor: call fully_shard before the first step")
        kind = self._mesh.device_type
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        return self._mesh.get_group(), device


def _unsupported(parameter: DTensor) -> ValueError:
    return ValueError(
        f"a parameter is placed as {parameter.placements} on a mesh of {parameter.device_mesh.ndim} axes; only "
        "fully_shard over one axis is supported: no tensor parallelism, no replicated shards (HSDP)"
    )


def shared_blocks(layout: Layout) -> list[dict[int, int]]:
    """For each matrix: number of each block of 8-bit states that lies on several ranks -> its number in the layout."""
    shared, total = [], 0
    for matrix in layout.matrices:
        ends = [f.param_offset for f in matrix.fragments if f.param_offset % BLOCK] if matrix.numel >= SMALL else []
        numbers = sorted({end // BLOCK for end in ends})
        shared.append({number: total + i for i, number in enumerate(numbers)})
        total += len(numbers)
    return shared


class FlatShards(RankPlacement):
    """ZeRO: each of the optimizer's tensors is one rank's flat shard of many matrices, with a layout of its own."""

    def __init__(
        self,
        layouts: Mapping[Tensor, Layout],
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        round_mb: float = ROUND_MB,
        other_layouts: Mapping[Tensor, Layout] | None = None,
    ):
        """device: for communication and maps; None is that of the tensors, which is right without CPU offload.

        other_layouts: of AdamW's flat shards, for 8-bit states; a parameter of any shape is there one row.
        """
        super().__init__(round_mb)
        self._layouts, self._group = dict(layouts), process_group
        self._all_layouts = {**self._layouts, **(other_layouts or {})}
        self.max_plans = max(self.max_plans, len(layouts))  # ZeRO 3 may have thousands of sub-groups
        self._device = device or next((tensor.device for tensor in layouts), torch.device("cpu"))

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The flat shards of matrices on this rank."""
        return list(self._layouts)

    def has_layout(self, parameter: Tensor) -> bool:
        """Whether there is a layout for it."""
        return parameter in self._layouts

    def segments(self, parameter: Tensor) -> Sequence[Segment] | None:
        """The parameters' segments in this rank's shard; None if its layout is not known."""
        layout, rank = self._all_layouts.get(parameter), dist.get_rank(self.ranks()[0])
        if layout is None:
            return None
        shared = shared_blocks(layout)
        return [
            Segment(f.local_offset, f.numel, f.param_offset, matrix.numel, shared[i])
            for i, matrix in enumerate(layout.matrices)
            for f in matrix.fragments
            if f.rank == rank
        ]

    def shared_blocks(self, named: Named) -> SharedBlocks | None:
        """The blocks that lie on several ranks, of the one tensor."""
        layouts = [self._all_layouts[parameter] for _, parameter in named if parameter in self._all_layouts]
        return SharedBlocks(sum(len(s) for layout in layouts for s in shared_blocks(layout)), self._largest)

    def _largest(self, maxima: Tensor) -> Tensor:
        group, device = self.ranks()
        maxima = maxima.to(device)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        return maxima

    def layout(self, named: Named) -> Layout:
        """The layout of the one tensor: ZeRO steps group by group, sub-group by sub-group."""
        if len(named) != 1:
            raise ValueError(f"one flat shard steps at a time; found {len(named)} in a group")
        return self._layouts[named[0][1]]

    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """The data-parallel group."""
        return self._group or dist.group.WORLD, self._device  # type: ignore[return-value]
