"""Where a matrix lies: the whole of it in one parameter, or pieces of it in the parameters of several ranks."""

from typing import NamedTuple

import torch
from torch import Tensor

from .storage import Storage, slab_names


class Piece(NamedTuple):
    """`numel` elements of a slab of `shape`: those from `start` on of the flattened `parameter`, row-major.

    A slab is one matrix, or the gate's and the up-projection's of one expert: see `storage`. For FSDP2's DTensors
    `start` counts within the local shard.
    """

    name: str
    shape: tuple[int, int]
    parameter: Tensor
    start: int
    numel: int
    storage: Storage = "plain"

    @property
    def is_whole(self) -> bool:
        """Whether the piece is all of the slab."""
        return self.numel == self.shape[0] * self.shape[1]

    def view_of(self, tensor: Tensor) -> Tensor:
        """The piece's elements of `tensor`, which has the parameter's shape: its gradient or a state. Shares memory.

        All of a local tensor keeps its shape and strides, and so does one of its slabs; any other piece is
        one-dimensional.
        """
        here = local(tensor)
        if self.numel == here.numel():
            return here
        if here.ndim == 3 and self.is_whole:
            return here[self.start // self.numel]
        return here.view(-1)[self.start : self.start + self.numel]


class Whole(NamedTuple):
    """A whole slab whose matrices are mapped; equal ones may be mapped in one batch."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    storage: Storage = "plain"


def whole_pieces(name: str, parameter: Tensor, storage: Storage = "plain") -> list[Piece]:
    """The slabs of a parameter [m, n] or [experts, m, n], each as one piece."""
    rows, columns = parameter.shape[-2:]
    names, numel = slab_names(name, parameter.shape), rows * columns
    return [Piece(slab, (rows, columns), parameter, i * numel, numel, storage) for i, slab in enumerate(names)]


def staged(tensor: Tensor, device: torch.device | None) -> Tensor:
    """`tensor` on `device` (None: where it is); from a CPU to a GPU through pinned memory.

    The host does not wait for that copy; torch keeps a pinned block until its copies are done. Not run on a GPU yet.
    """
    if device is not None and device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]
