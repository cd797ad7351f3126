"""The interface through which an optimizer steps matrices that are sharded or replicated over ranks."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .eight_bits import Segment, SharedBlocks
from .storage import Storages
from .update import GroupUpdate


class Placement(Protocol):
    """Where the matrices of an optimizer lie, and who maps them. `soren_align.sharding` implements it."""

    def has_layout(self, parameter: Tensor) -> bool:
        """Whether the layout of the matrices in `parameter` is known."""
        ...

    def segments(self, parameter: Tensor) -> Sequence[Segment] | None:
        """The parameters' segments in a flat shard; None: it is one parameter. For 8-bit states."""
        ...

    def shared_blocks(self, named: Sequence[tuple[str, Tensor]]) -> SharedBlocks | None:
        """The blocks of these tensors' 8-bit states that lie on several ranks; None: there are none."""
        ...

    def check_gradients(
        self, named: Sequence[tuple[str, Tensor]], error: Exception | None, squares: Tensor
    ) -> tuple[float, ...]:
        """The sums of `squares` over the ranks, by one host read. Collective.

        Raises on every rank if `error` is set on any rank, or if the ranks lack different gradients.
        """
        ...

    def prepare(self, named: Sequence[tuple[str, Tensor]], storages: Storages) -> None:
        """Plan the step of these tensors of one spectral group, which store their matrices so.

        Raises ValueError on every rank if none is possible.
        """
        ...

    def step_(self, update: GroupUpdate, named: Sequence[tuple[str, Tensor]]) -> None:
        """One step of these tensors: every matrix in them is mapped once, on its owner rank. Collective."""
        ...
