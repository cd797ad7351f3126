"""FSDP2: gather the rows of each DTensor on the owner rank of its matrix.

`fully_shard` has divided the rows of every parameter among the ranks of a mesh of one axis.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..optim.layout import LINEAR, MapState, Named, WeightLayouts, map_state_sizes, weights_in
from .gather import RankStrategy
from .layout import Layout, row_blocks
from .plan import BUCKET_MB


class FSDP2Strategy(RankStrategy):
    """FSDP2: `fully_shard` has sharded every parameter by rows, over a mesh of one axis."""

    def __init__(self, bucket_mb: float = BUCKET_MB):
        super().__init__(bucket_mb)
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

    def check_gradients(
        self, named: Named, error: Exception | None, squares: Tensor, *others: Tensor
    ) -> list[float]:
        """See RankStrategy; the mesh is that of the parameters."""
        # Found at each step rather than at construction: launchers replace the parameters late.
        sharded = [p for _, p in named if isinstance(p, DTensor)]
        for parameter in sharded:
            # Raised without a collective: it is the same on all ranks, and such a mesh has no
            # group.
            if parameter.device_mesh.ndim != 1:
                raise _unsupported(parameter)
        if sharded:
            self._mesh = sharded[0].device_mesh
        return super().check_gradients(named, error, squares, *others)

    def map_state_shapes(
        self, name: str, parameter: Tensor, layouts: WeightLayouts, map_state: MapState
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of whole DTensors: divided as the parameter is, by its first axis."""
        sizes: Counter[str] = Counter()
        for weight in weights_in(name, parameter.shape, layouts.get(name, LINEAR)):
            sizes.update(map_state_sizes(weight.shape, weight.layout, map_state))
        shapes: dict[str, tuple[int, ...]] = {}
        for key, size in sizes.items():
            # Divided as the parameter is, by its first axis: FSDP2 saves and loads both alike.
            columns, rest = divmod(size, len(parameter))
            if rest:
                raise ValueError(
                    f"{key} of {name}, which is stored as [inputs, outputs], is not supported "
                    "under FSDP2; use DDP or ZeRO"
                )
            shapes[key] = (len(parameter), columns)
        return shapes

    def layout(self, named: Named) -> Layout:
        """The layout of row blocks, as torch.chunk divides them."""
        # From shapes alone, not from the local tensors: every rank computes the shards of all the
        # others without asking them.
        group, _ = self.ranks()
        return row_blocks({name: tuple(p.shape) for name, p in named}, dist.get_world_size(group))

    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """All ranks of the mesh, each with its current device."""
        if self._mesh is None:
            raise ValueError("no parameter is a DTensor; call fully_shard before the first step")
        kind = self._mesh.device_type
        device = (
            torch.device(kind, torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind)
        )
        return self._mesh.get_group(), device


def _unsupported(parameter: DTensor) -> ValueError:
    return ValueError(
        f"a parameter has the placements {parameter.placements} on a mesh of "
        f"{parameter.device_mesh.ndim} axes; use fully_shard over one axis, without tensor "
        "parallelism or replicated shards (HSDP)"
    )
