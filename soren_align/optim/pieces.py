"""Where a matrix lies: the whole of it in one parameter, or pieces of it in the parameters of several ranks."""

from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """`numel` elements of a matrix of `shape`: those from `start` on of the flattened `parameter`, row-major.

    For FSDP2's DTensors `start` counts within the local shard.
    """

    name: str
    shape: tuple[int, int]
    parameter: Tensor
    start: int
    numel: int

    @property
    def is_whole(self) -> bool:
        """Whether the piece is all of the matrix."""
        return self.numel == self.shape[0] * self.shape[1]

    def view_of(self, tensor: Tensor) -> Tensor:
        """The piece's elements of `tensor`, which has the parameter's shape: its gradient or a state. Shares memory.

        All of a local tensor keeps its shape and strides; any other piece is one-dimensional.
        """
        here = local(tensor)
        return here if self.numel == here.numel() else here.view(-1)[self.start : self.start + self.numel]


class Whole(NamedTuple):
    """A whole matrix as a map takes it; equal ones may be mapped in one batch."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


def whole_piece(name: str, parameter: Tensor) -> Piece:
    """The piece that is all of the matrix `parameter`."""
    return Piece(name, (parameter.shape[0], parameter.shape[1]), parameter, 0, parameter.numel())


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
