"""Layouts: which rank holds which elements of which matrix, computed from shapes alone, the same on every rank.

A parameter of shape (m, n) is its m * n elements in row-major order; a fragment is an interval of them on one rank.
Launchers divide parameters; `slabs` then divides those of several experts into one slab of shape (m, n) for each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..optim.pieces import Piece
from ..optim.storage import Storage, Storages, map_shape, num_matrices, slab_names

Shapes = Mapping[str, tuple[int, ...]]


class Fragment(NamedTuple):
    """`numel` elements of a matrix: from `param_offset` on in the matrix, from `local_offset` on in `rank`'s tensor."""

    rank: int
    param_offset: int
    local_offset: int
    numel: int


class Matrix(NamedTuple):
    """One matrix and its fragments, which are in the optimizer's tensor number `tensor` on every rank.

    More exactly a parameter, (m, n) or (experts, m, n), or a slab of one, which may be two matrices: see `storage`.
    """

    name: str
    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]
    tensor: int = 0
    storage: Storage = "plain"

    @property
    def numel(self) -> int:
        """Elements of all of it."""
        return math.prod(self.shape)

    @property
    def num_maps(self) -> int:
        """Of a slab: the matrices that are mapped."""
        return num_matrices(self.storage)

    @property
    def map_shape(self) -> tuple[int, int]:
        """Of a slab: the shape of each of these matrices."""
        return map_shape(self.shape, self.storage)


@dataclass(frozen=True)
class Layout:
    """The matrices of one spectral group on all ranks. replicated: every rank has every matrix whole."""

    matrices: tuple[Matrix, ...]
    num_ranks: int
    replicated: bool = False


def slabs(layout: Layout, storages: Storages) -> Layout:
    """The layout with the slabs of `layout`'s parameters, each with its storage, in their place.

    Raises ValueError for a parameter of three dimensions that `storages` does not name.
    """
    matrices = []
    for parameter in layout.matrices:
        *experts, rows, columns = parameter.shape
        if not experts:
            matrices.append(parameter._replace(storage=storages.get(parameter.name, "plain")))
            continue
        if parameter.name not in storages:
            raise ValueError(f"{parameter.name} has shape {parameter.shape}, and its group names no storage for it")
        storage, numel = storages[parameter.name], rows * columns
        fragments: list[list[Fragment]] = [[] for _ in slab_names(parameter.name, parameter.shape)]
        for rank, start, local_offset, size in parameter.fragments:
            for slab in range(start // numel, -(-(start + size) // numel)):
                first, last = max(start, slab * numel), min(start + size, (slab + 1) * numel)
                cut = Fragment(rank, first - slab * numel, local_offset + first - start, last - first)
                fragments[slab].append(cut)
        for name, parts in zip(slab_names(parameter.name, parameter.shape), fragments, strict=True):
            matrices.append(Matrix(name, (rows, columns), tuple(parts), parameter.tensor, storage))
    return Layout(tuple(matrices), layout.num_ranks, layout.replicated)


def piece_of(slab: Matrix, fragment: Fragment, tensors: Sequence[Tensor]) -> Piece:
    """The fragment of a slab as a piece of one of this rank's `tensors`."""
    shape, tensor = (slab.shape[0], slab.shape[1]), tensors[slab.tensor]
    return Piece(slab.name, shape, tensor, fragment.local_offset, fragment.numel, slab.storage)


def replicas(shapes: Shapes, num_ranks: int) -> Layout:
    """DDP, or one process: every rank holds every matrix, each in a tensor of its own."""
    matrices = []
    for tensor, (name, shape) in enumerate(shapes.items()):
        fragments = tuple(Fragment(rank, 0, 0, math.prod(shape)) for rank in range(num_ranks))
        matrices.append(Matrix(name, shape, fragments, tensor))
    return Layout(tuple(matrices), num_ranks, replicated=True)


def flat_partitions(
    shapes: Shapes, num_ranks: int, *, partition_numel: int | None = None, starts: Sequence[int] | None = None
) -> Layout:
    """ZeRO 1 and 2: the group's parameters, concatenated and divided into `num_ranks` equal partitions.

    partition_numel: elements per partition, padding included; None is the smallest sufficient number.
    starts: the offset of each parameter in the flat group, if there is padding between them.
    Raises ValueError if parameters overlap, or if one ends beyond the last partition.
    """
    starts = [*_cumulated([*map(math.prod, shapes.values())])] if starts is None else starts
    end = max((start + math.prod(shape) for start, shape in zip(starts, shapes.values(), strict=True)), default=0)
    size = -(-end // num_ranks) if partition_numel is None else partition_numel
    if end > size * num_ranks:
        raise ValueError(f"{num_ranks} partitions of {size} elements cannot hold {end}")
    matrices, free_from = [], 0
    for start, (name, shape) in zip(starts, shapes.items(), strict=True):
        if start < free_from:
            raise ValueError(f"{name} starts at {start}, within the parameter before it")
        free_from = start + math.prod(shape)
        fragments = []
        for rank in range(start // size, -(-free_from // size)) if free_from > start else ():
            first, last = max(start, rank * size), min(free_from, (rank + 1) * size)
            fragments.append(Fragment(rank, first - start, first - rank * size, last - first))
        matrices.append(Matrix(name, shape, tuple(fragments)))
    return Layout(tuple(matrices), num_ranks)


def parameter_slices(shapes: Shapes, num_ranks: int) -> Layout:
    """ZeRO 3: each parameter in `num_ranks` slices of ceil(numel / num_ranks), the last ones short or empty.

    A rank's flat tensor is the concatenation of its slices, each padded to the full size.
    """
    matrices, local = [], 0
    for name, shape in shapes.items():
        size = -(-math.prod(shape) // num_ranks)
        matrices.append(Matrix(name, shape, _slices(math.prod(shape), size, num_ranks, local)))
        local += size
    return Layout(tuple(matrices), num_ranks)


def row_blocks(shapes: Shapes, num_ranks: int) -> Layout:
    """FSDP2: each parameter in a tensor of its own, sharded by its first axis as torch.chunk does.

    So a matrix is sharded by rows, and experts are divided among the ranks. The last ranks may have nothing.
    """
    matrices = []
    for tensor, (name, shape) in enumerate(shapes.items()):
        size = -(-shape[0] // num_ranks) * math.prod(shape[1:])
        matrices.append(Matrix(name, shape, _slices(math.prod(shape), size, num_ranks, 0), tensor))
    return Layout(tuple(matrices), num_ranks)


def _slices(numel: int, size: int, num_ranks: int, local_offset: int) -> tuple[Fragment, ...]:
    ends = ((rank, rank * size, min((rank + 1) * size, numel)) for rank in range(num_ranks))
    return tuple(Fragment(rank, start, local_offset, stop - start) for rank, start, stop in ends if stop > start)


def _cumulated(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts[:-1]
