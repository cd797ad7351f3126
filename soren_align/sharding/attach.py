"""How an optimizer learns where its matrices lie: `optimizer.placement = ...`, for DDP, FSDP2 and flat shards."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .geometry import Layout, replicas, row_blocks
from .placement import Named, RankPlacement
from .step_plan import ROUND_MB


class Replicas(RankPlacement):
    """DDP: all ranks hold all matrices, and their gradients are averaged already."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, round_mb: float = ROUND_MB):
        super().__init__(round_mb)
        self._group = process_group
        self._device = torch.device("cpu")

    def holds(self, parameter: Tensor) -> bool:
        """Whether it is a whole matrix."""
        return parameter.ndim == 2 and not isinstance(parameter, DTensor)

    def agree(self, named: Named, error: Exception | None) -> None:
        """As RankPlacement, on the device of the first tensor that steps, whether it is a matrix or has a gradient.

        Then it is one device on all ranks, also on one that has found an error, and one that the group can reduce on.
        """
        self._device = named[0][1].device
        super().agree(named, error)

    def layout(self, named: Named) -> Layout:
        """Every matrix on every rank."""
        return replicas({name: (p.shape[0], p.shape[1]) for name, p in named}, dist.get_world_size(self._group))

    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """All of the group, where the parameters are."""
        return self._group or dist.group.WORLD, self._device  # type: ignore[return-value]


class RowBlocks(RankPlacement):
    """FSDP2: `fully_shard` has cut every parameter by rows, over a mesh of one axis."""

    def __init__(self, round_mb: float = ROUND_MB):
        super().__init__(round_mb)
        self._mesh = None

    def holds(self, parameter: Tensor) -> bool:
        """Whether it is a matrix cut by rows. ValueError for any other way of cutting it."""
        if not isinstance(parameter, DTensor):
            return False
        if parameter.device_mesh.ndim != 1 or tuple(parameter.placements) != (Shard(0),):
            raise _unsupported(parameter)
        return parameter.ndim == 2

    def agree(self, named: Named, error: Exception | None) -> None:
        """As RankPlacement; the mesh is found here, on the tensors that step."""
        sharded = [p for _, p in named if isinstance(p, DTensor)]
        for parameter in sharded:
            if parameter.device_mesh.ndim != 1:  # the same on all ranks, and such a mesh has no group to agree in
                raise _unsupported(parameter)
        if sharded:
            self._mesh = sharded[0].device_mesh
        super().agree(named, error)

    def layout(self, named: Named) -> Layout:
        """Blocks of rows, as torch.chunk cuts them."""
        group, _ = self.ranks()
        return row_blocks({name: (p.shape[0], p.shape[1]) for name, p in named}, dist.get_world_size(group))

    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """Those of the mesh, each with its current device."""
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


class FlatShards(RankPlacement):
    """ZeRO: each of the optimizer's tensors is one rank's part of many matrices, as `layouts` says."""

    def __init__(
        self,
        layouts: Mapping[Tensor, Layout],
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        round_mb: float = ROUND_MB,
    ):
        """device: where the ranks communicate and map; None is where the tensors are, as without CPU offload."""
        super().__init__(round_mb)
        self._layouts, self._group = dict(layouts), process_group
        self.most_plans = max(self.most_plans, len(layouts))  # ZeRO 3 may have thousands of sub-groups
        self._device = device or next((tensor.device for tensor in layouts), torch.device("cpu"))

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Those that hold parts of matrices on this rank."""
        return list(self._layouts)

    def holds(self, parameter: Tensor) -> bool:
        """Whether there is a layout for it."""
        return parameter in self._layouts

    def layout(self, named: Named) -> Layout:
        """That of the one tensor that steps: ZeRO steps group by group, sub-group by sub-group."""
        if len(named) != 1:
            raise ValueError(f"one flat shard steps at a time; found {len(named)} in a group")
        return self._layouts[named[0][1]]

    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """The data-parallel group."""
        return self._group or dist.group.WORLD, self._device  # type: ignore[return-value]
