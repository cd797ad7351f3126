"""Choose the owner rank of each matrix, and the buckets of the exchange.

Matrices are mapped whole. Given the layout, the maps' FLOPs are balanced over the ranks. The bytes of a bucket are
bounded, so that the memory of the exchange does not grow with the model. No communication happens here: every rank
computes the same plan from the same layout, which its fingerprint verifies.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from ..spectral.maps import MINIMAX
from .layout import Layout, ShardedWeight

# MB (2^20 bytes) that a rank sends and receives in a bucket, one way; three buckets may overlap. 512 holds a float32
# 14336 x 4096 per rank, the largest of a 7B model, sent in shards and received whole.
BUCKET_MB = 512


@dataclass(frozen=True)
class ExchangePlan:
    """Owner ranks and buckets of the matrices of one layout.

    local: indices into `layout.weights` of the matrices that lie whole on their owner rank and are not communicated.
    buckets: indices of all others; a matrix is in exactly one bucket.
    """

    layout: Layout
    owners: tuple[int, ...]
    local: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]

    @cached_property
    def fingerprint(self) -> int:
        """63 bits of a hash of everything in the plan."""
        content = repr((self.layout.num_ranks, self.layout.replicated, self.owners, self.local, self.buckets))
        digest = hashlib.sha256(content.encode())
        for weight in self.layout.weights:
            digest.update(repr((weight.name, tuple(weight.shape), weight.tensor, weight.layout)).encode())
            digest.update(repr([tuple(shard) for shard in weight.shards]).encode())
        return int.from_bytes(digest.digest()[:8], "big") >> 1


def make_exchange_plan(layout: Layout, bucket_mb: float = BUCKET_MB, itemsize: int = 4) -> ExchangePlan:
    """The plan for `layout`, with at most `bucket_mb` MB of elements of `itemsize` bytes per rank and bucket.

    A rank whose next matrix alone needs more has that one matrix and no other in the bucket.
    """
    owners = assign_owners(layout)
    weights, at_owner = layout.weights, set()
    for index, (weight, owner) in enumerate(zip(weights, owners, strict=True)):
        if layout.num_ranks == 1 or all(shard.rank == owner for shard in weight.shards):
            at_owner.add(index)
    # The first matrix of each owner, then the second of each, so that all owners have work in every bucket. An owner's
    # matrices come largest first and by shape, so that those of a bucket can be mapped together.
    queues: dict[int, list[int]] = defaultdict(list)
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i].numel, weights[i].shape, i)):
        if index not in at_owner:
            queues[owners[index]].append(index)
    turns = sorted((turn, owner, i) for owner, queue in queues.items() for turn, i in enumerate(queue))

    buckets: list[list[int]] = []
    used: list[int] = []
    for _, owner, index in turns:
        if layout.replicated:
            need = {owner: weights[index].numel}
        else:  # elements that a rank sends or receives
            need = {shard.rank: shard.numel for shard in weights[index].shards if shard.rank != owner}
            need[owner] = sum(need.values())
        most = int(bucket_mb * 2**20 / itemsize)
        if not buckets or any(used[rank] and used[rank] + numel > most for rank, numel in need.items()):
            buckets.append([])
            used = [0] * layout.num_ranks
        buckets[-1].append(index)
        for rank, numel in need.items():
            used[rank] += numel
    return ExchangePlan(layout, owners, tuple(sorted(at_owner)), tuple(map(tuple, buckets)))


def assign_owners(layout: Layout) -> tuple[int, ...]:
    """The owner rank of each matrix, in the layout's order.

    A matrix that lies whole on one rank is owned by it. The others, most expensive first, go to the rank with the least
    FLOPs among those that hold a shard. For this choice the missing share of the matrix is added to a rank's FLOPs:
    the rank with the largest shard is preferred, unless it has more to do by that much. Ties go to the lowest rank.
    """
    owners: dict[int, int] = {}
    flops = [0.0] * layout.num_ranks
    shared = []
    for index, weight in enumerate(layout.weights):
        if len(weight.shards) > 1:
            shared.append(index)
        else:
            owners[index] = weight.shards[0].rank if weight.shards else 0  # an empty matrix has no map
            flops[owners[index]] += _cost(weight)
    for index in sorted(shared, key=lambda i: (-_cost(layout.weights[i]), i)):
        weight = layout.weights[index]
        cost, largest = _cost(weight), max(f.numel for f in weight.shards) or 1  # 0: an empty matrix
        _, owner = min((flops[f.rank] + cost * (1 - f.numel / largest), f.rank) for f in weight.shards)
        owners[index] = owner
        flops[owner] += cost
    return tuple(owners[index] for index in range(len(layout.weights)))


def flops_per_rank(layout: Layout, owners: Sequence[int]) -> list[int]:
    """Floating-point operations of a step's maps, by rank."""
    flops = [0] * layout.num_ranks
    for weight, owner in zip(layout.weights, owners, strict=True):
        flops[owner] += _cost(weight)
    return flops


def elements_sent(layout: Layout, owners: Sequence[int]) -> list[int]:
    """Elements that each rank sends in a step: shards to their owner (gather), outputs to the shards (scatter).

    Replicas: the owner broadcasts the updated matrix in a ring, where every rank but the last sends each element once.
    """
    sent = [0] * layout.num_ranks
    for weight, owner in zip(layout.weights, owners, strict=True):
        if layout.replicated:
            for rank in range(layout.num_ranks):
                sent[rank] += weight.numel if (rank + 1) % layout.num_ranks != owner else 0
            continue
        for shard in weight.shards:
            if shard.rank != owner:
                sent[shard.rank] += shard.numel
                sent[owner] += shard.numel
    return sent


def _cost(weight: ShardedWeight) -> int:
    return weight.num_matrices * _map_flops(*sorted(weight.map_shape))


@cache
def _map_flops(num_rows: int, num_columns: int) -> int:
    # Those of the default map: the other maps scale with the shape in much the same way.
    return MINIMAX.num_flops(num_rows, num_columns) or 0 if num_rows else 0
