"""Numbers of parameters: of a model, and of one rank's shard of it under DDP, ZeRO and FSDP2.

The shards are those of DeepSpeed 0.19.8 and of torch's FSDP2; all ranks have the same size, padding included.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..optim.eight_bits import SMALL
from ..optim.storage import Storages
from ..recipe import Parallel
from ..sharding.geometry import Shapes

SUB_GROUP_SIZE = 10**9  # DeepSpeed's default: numbers per rank that ZeRO 3 updates at a time


class Numel(NamedTuple):
    """Numbers of the matrices, and of all other trained parameters."""

    matrices: int
    others: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.matrices + self.others


@dataclass(frozen=True)
class ModelSizes:
    """A model's parameters.

    matrices: the parameters that the spectral optimizer updates. storages: how some of them store matrices.
    num_others: numbers of all other trained parameters, which AdamW updates.
    num_frozen, frozen_bytes: numbers and bytes of the parameters that are not trained.
    num_small_others: numbers of the others whose 8-bit states have a scale each.
    """

    matrices: Shapes
    num_others: int
    num_frozen: int = 0
    frozen_bytes: int = 0
    num_small_others: int = 0
    storages: Storages = field(default_factory=dict)

    @property
    def small(self) -> Numel:
        """Numbers of all parameters whose 8-bit states have a scale each."""
        return Numel(sum(n for n in map(math.prod, self.matrices.values()) if n < SMALL), self.num_small_others)


@dataclass(frozen=True)
class RankSizes:
    """The trained numbers of one of `num_ranks` ranks."""

    model: ModelSizes
    num_ranks: int

    @property
    def whole(self) -> Numel:
        """Of all parameters."""
        return Numel(numel_of(self.model.matrices), self.model.num_others)

    @property
    def flat_partitions(self) -> Numel:
        """Of a rank's partitions under ZeRO 1 and 2."""
        return Numel(*(partition_numel(numel, self.num_ranks) for numel in self.whole))

    @property
    def parameter_slices(self) -> Numel:
        """Of a rank's slices of each parameter under ZeRO 3."""
        slices = (_ceil(math.prod(shape), self.num_ranks) for shape in self.model.matrices.values())
        return Numel(sum(slices), _ceil(self.model.num_others, self.num_ranks))

    @property
    def row_blocks(self) -> Numel:
        """Of a rank's rows (or experts) of each parameter under FSDP2, with every block as large as the first."""
        shapes = self.model.matrices.values()
        blocks = (_ceil(shape[0], self.num_ranks) * math.prod(shape[1:]) for shape in shapes)
        return Numel(sum(blocks), _ceil(self.model.num_others, self.num_ranks))

    def shard(self, parallel: Parallel) -> Numel:
        """Of a rank's optimizer states under `parallel`."""
        if parallel.kind == "ddp":
            return self.whole
        if parallel.kind == "fsdp2":
            return self.row_blocks
        return self.parameter_slices if parallel.stage == 3 else self.flat_partitions


def sub_groups(matrices: Shapes, num_ranks: int, zero: dict[str, Any]) -> list[Shapes]:
    """The sub-groups that ZeRO 3 updates one after another; each ends with the parameter that fills it."""
    limit, numel = zero.get("sub_group_size", SUB_GROUP_SIZE), 0
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in matrices.items():
        if numel >= limit:
            groups.append({})
            numel = 0
        groups[-1][name] = shape
        numel += _ceil(math.prod(shape), num_ranks)
    return [*groups]


def largest_sub_group(sizes: RankSizes, zero: dict[str, Any]) -> int:
    """A rank's numbers of the largest sub-group of matrices."""
    groups = sub_groups(sizes.model.matrices, sizes.num_ranks, zero)
    return max(sum(_ceil(math.prod(shape), sizes.num_ranks) for shape in group.values()) for group in groups)


def partition_numel(numel: int, num_ranks: int) -> int:
    """A rank's part of a flat group of ZeRO 1 and 2, which DeepSpeed pads to twice the number of ranks."""
    return _ceil(numel, 2 * num_ranks) * 2


def numel_of(matrices: Shapes) -> int:
    """Numbers of all matrices."""
    return sum(map(math.prod, matrices.values()))


def _ceil(numel: int, num_parts: int) -> int:
    return -(-numel // num_parts)
