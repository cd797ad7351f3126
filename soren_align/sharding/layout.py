"""Layouts: which rank has which elements of which weight, computed from shapes alone, the same on
every rank.

A parameter of shape (m, n) is its m * n elements in row-major order; a shard is an interval of them
on one rank. Launchers divide parameters; `split_weights` then divides those of several experts or
blocks into one weight (m, n) for each.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..optim.layout import LINEAR, WeightLayout, WeightLayouts, weights_in

Shapes = Mapping[str, tuple[int, ...]]


class RankShard(NamedTuple):
    """`numel` elements of a weight: from `offset` on in the weight, from `start` on in `rank`'s
    tensor.
    """

    rank: int
    offset: int
    start: int
    numel: int


class ShardedWeight(NamedTuple):
    """A parameter, (m, n) or (experts, m, n), or one of its weights; its shards lie in the
    optimizer's tensor number `tensor` on every rank. `layout`: of the matrices in a weight.
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[RankShard, ...]
    tensor: int = 0
    layout: WeightLayout = LINEAR

    @property
    def numel(self) -> int:
        """The number of elements of the whole weight."""
        return math.prod(self.shape)

    @property
    def num_matrices(self) -> int:
        """The number of matrices in an expert weight, each of which is mapped."""
        return self.layout.num_matrices

    @property
    def map_shape(self) -> tuple[int, int]:
        """The shape of each matrix in an expert weight."""
        return self.layout.map_shape(self.shape)


@dataclass(frozen=True)
class Layout:
    """The weights of one spectral group on all ranks.
    replicated: every rank has every weight whole.
    """

    weights: tuple[ShardedWeight, ...]
    num_ranks: int
    replicated: bool = False


def split_weights(layout: Layout, weight_layouts: WeightLayouts) -> Layout:
    """The layout with the weights of its parameters in their place: experts, and row blocks.

    Raises ValueError for a parameter of three dimensions that `weight_layouts` does not name.
    """
    weights = []
    for parameter in layout.weights:
        if len(parameter.shape) > 2 and parameter.name not in weight_layouts:
            raise ValueError(
                f"{parameter.name} has shape {parameter.shape}, and is neither a matrix [m, n] "
                "nor experts [experts, m, n] with a layout in the group's weight_layouts. Build "
                "the parameter groups with soren_align.param_groups, or give this parameter to "
                "AdamW"
            )
        parts = weights_in(
            parameter.name, parameter.shape, weight_layouts.get(parameter.name, LINEAR)
        )
        # The parameter is the weight itself; an empty one keeps its empty shards.
        if len(parts) == 1 and len(parameter.shape) == 2:
            weights.append(parameter._replace(layout=parts[0].layout))
            continue
        # Cut each shard where a weight ends: both lists ascend, so that a bisection finds the
        # weights that a shard touches (a layer may have hundreds of experts).
        ends = [*accumulate(part.numel for part in parts)]
        shards: list[list[RankShard]] = [[] for _ in parts]
        for rank, offset, start, size in parameter.shards:
            for number in range(
                bisect_right(ends, offset), bisect_left(ends, offset + size) + 1 if size else 0
            ):
                begin = ends[number] - parts[number].numel
                first, last = max(offset, begin), min(offset + size, ends[number])
                shards[number].append(
                    RankShard(rank, first - begin, start + first - offset, last - first)
                )
        for part, of_ranks in zip(parts, shards, strict=True):
            weights.append(
                ShardedWeight(part.name, part.shape, tuple(of_ranks), parameter.tensor, part.layout)
            )
    return Layout(tuple(weights), layout.num_ranks, layout.replicated)


def replicas(shapes: Shapes, num_ranks: int) -> Layout:
    """DDP, or one process: every rank holds every matrix, each in a tensor of its own."""
    weights = []
    for tensor, (name, shape) in enumerate(shapes.items()):
        shards = tuple(RankShard(rank, 0, 0, math.prod(shape)) for rank in range(num_ranks))
        weights.append(ShardedWeight(name, shape, shards, tensor))
    return Layout(tuple(weights), num_ranks, replicated=True)


def flat_partitions(
    shapes: Shapes,
    num_ranks: int,
    *,
    partition_numel: int | None = None,
    starts: Sequence[int] | None = None,
) -> Layout:
    """ZeRO 1 and 2: the group's parameters, concatenated and divided into `num_ranks` equal
    partitions.

    partition_numel: elements per partition, padding included; None is the smallest sufficient
    number.
    starts: the offset of each parameter in the flat group, if there is padding between them.
    Raises ValueError if parameters overlap, or if one ends beyond the last partition.
    """
    starts = [0, *accumulate(map(math.prod, shapes.values()))][:-1] if starts is None else starts
    end = max(
        (start + math.prod(shape) for start, shape in zip(starts, shapes.values(), strict=True)),
        default=0,
    )
    # DeepSpeed pads the flat group so that partitions are equal and aligned; None is for a group
    # without such padding.
    size = -(-end // num_ranks) if partition_numel is None else partition_numel
    if end > size * num_ranks:
        raise ValueError(f"{num_ranks} partitions of {size} elements cannot hold {end}")
    # A parameter of the flat group lies on as many ranks as partition bounds cut it: under ZeRO 1
    # and 2 most lie on one.
    weights, free_from = [], 0
    for start, (name, shape) in zip(starts, shapes.items(), strict=True):
        if start < free_from:
            raise ValueError(f"{name} starts at {start}, within the parameter before it")
        free_from = start + math.prod(shape)
        shards = []
        for rank in range(start // size, -(-free_from // size)) if free_from > start else ():
            first, last = max(start, rank * size), min(free_from, (rank + 1) * size)
            shards.append(RankShard(rank, first - start, first - rank * size, last - first))
        weights.append(ShardedWeight(name, shape, tuple(shards)))
    return Layout(tuple(weights), num_ranks)


def parameter_slices(shapes: Shapes, num_ranks: int) -> Layout:
    """ZeRO 3: each parameter in `num_ranks` slices of ceil(numel / num_ranks), the last ones short
    or empty.

    A rank's flat tensor is the concatenation of its slices, each padded to the full size.
    """
    weights, local = [], 0
    for name, shape in shapes.items():
        # ceil, as DeepSpeed partitions: the last ranks may have less or nothing, but each rank's
        # flat tensor has room for a full slice of every parameter, so that `local` is the same on
        # all ranks.
        size = -(-math.prod(shape) // num_ranks)
        weights.append(
            ShardedWeight(name, shape, _slices(math.prod(shape), size, num_ranks, local))
        )
        local += size
    return Layout(tuple(weights), num_ranks)


def row_blocks(shapes: Shapes, num_ranks: int) -> Layout:
    """FSDP2: each parameter in a tensor of its own, sharded by its first axis as torch.chunk does.

    So a matrix is sharded by rows, and experts are divided among the ranks. The last ranks may have
    nothing.
    """
    weights = []
    for tensor, (name, shape) in enumerate(shapes.items()):
        # torch.chunk rounds up: 10 rows are 3, 3, 3 and 1 on 4 ranks, and of 9 on 8 ranks three get
        # none (test_row_blocks_are_those_of_torch_chunk).
        size = -(-shape[0] // num_ranks) * math.prod(shape[1:])
        weights.append(
            ShardedWeight(name, shape, _slices(math.prod(shape), size, num_ranks, 0), tensor)
        )
    return Layout(tuple(weights), num_ranks)


def _slices(numel: int, size: int, num_ranks: int, position: int) -> tuple[RankShard, ...]:
    ends = ((rank, rank * size, min((rank + 1) * size, numel)) for rank in range(num_ranks))
    return tuple(
        RankShard(rank, start, position, stop - start) for rank, start, stop in ends if stop > start
    )
