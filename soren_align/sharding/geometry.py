"""Layouts: which rank holds which elements of which matrix, computed from shapes alone, the same on every rank.

A matrix of shape (m, n) is its m * n elements in row-major order; a fragment is an interval of them on one rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, int]]


class Fragment(NamedTuple):
    """`numel` elements of a matrix: from `param_offset` on in the matrix, from `local_offset` on in `rank`'s tensor."""

    rank: int
    param_offset: int
    local_offset: int
    numel: int


class Matrix(NamedTuple):
    """One matrix and its fragments, which are in the optimizer's tensor number `tensor` on every rank."""

    name: str
    shape: tuple[int, int]
    fragments: tuple[Fragment, ...]
    tensor: int = 0

    @property
    def numel(self) -> int:
        """Elements of the whole matrix."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Layout:
    """The matrices of one spectral group on all ranks. replicated: every rank has every matrix whole."""

    matrices: tuple[Matrix, ...]
    num_ranks: int
    replicated: bool = False


def replicas(shapes: Shapes, num_ranks: int) -> Layout:
    """DDP, or one process: every rank holds every matrix, each in a tensor of its own."""
    matrices = []
    for tensor, (name, (m, n)) in enumerate(shapes.items()):
        matrices.append(Matrix(name, (m, n), tuple(Fragment(r, 0, 0, m * n) for r in range(num_ranks)), tensor))
    return Layout(tuple(matrices), num_ranks, replicated=True)


def flat_partitions(
    shapes: Shapes, num_ranks: int, *, partition_numel: int | None = None, starts: Sequence[int] | None = None
) -> Layout:
    """ZeRO 1 and 2: the group's parameters, concatenated and divided into `num_ranks` equal partitions.

    partition_numel: elements per partition, padding included; None is the smallest sufficient number.
    starts: the offset of each parameter in the flat group, if there is padding between them.
    Raises ValueError if parameters overlap, or if one ends beyond the last partition.
    """
    starts = [*_cumulated([m * n for m, n in shapes.values()])] if starts is None else starts
    end = max((start + m * n for start, (m, n) in zip(starts, shapes.values(), strict=True)), default=0)
    size = -(-end // num_ranks) if partition_numel is None else partition_numel
    if end > size * num_ranks:
        raise ValueError(f"{num_ranks} partitions of {size} elements cannot hold {end}")
    matrices, free_from = [], 0
    for start, (name, (m, n)) in zip(starts, shapes.items(), strict=True):
        if start < free_from:
            raise ValueError(f"{name} starts at {start}, within the parameter before it")
        free_from = start + m * n
        fragments = []
        for rank in range(start // size, -(-free_from // size)) if free_from > start else ():
            first, last = max(start, rank * size), min(free_from, (rank + 1) * size)
            fragments.append(Fragment(rank, first - start, first - rank * size, last - first))
        matrices.append(Matrix(name, (m, n), tuple(fragments)))
    return Layout(tuple(matrices), num_ranks)


def parameter_slices(shapes: Shapes, num_ranks: int) -> Layout:
    """ZeRO 3: each parameter in `num_ranks` slices of ceil(numel / num_ranks), the last ones short or empty.

    A rank's flat tensor is the concatenation of its slices, each padded to the full size.
    """
    matrices, local = [], 0
    for name, (m, n) in shapes.items():
        size = -(-m * n // num_ranks)
        matrices.append(Matrix(name, (m, n), _slices(m * n, size, num_ranks, local)))
        local += size
    return Layout(tuple(matrices), num_ranks)


def row_blocks(shapes: Shapes, num_ranks: int) -> Layout:
    """FSDP2: each matrix in a tensor of its own, sharded by rows as torch.chunk does; the last ranks may have none."""
    matrices = []
    for tensor, (name, (m, n)) in enumerate(shapes.items()):
        matrices.append(Matrix(name, (m, n), _slices(m * n, -(-m // num_ranks) * n, num_ranks, 0), tensor))
    return Layout(tuple(matrices), num_ranks)


def _slices(numel: int, size: int, num_ranks: int, local_offset: int) -> tuple[Fragment, ...]:
    ends = ((rank, rank * size, min((rank + 1) * size, numel)) for rank in range(num_ranks))
    return tuple(Fragment(rank, start, local_offset, stop - start) for rank, start, stop in ends if stop > start)


def _cumulated(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts[:-1]
