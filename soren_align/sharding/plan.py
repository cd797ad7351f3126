"""Choose the owner rank of each matrix, and the buckets of the exchange.

Matrices are mapped whole. Given the layout, the maps' FLOPs are balanced over the ranks. The bytes
of a bucket are bounded, so that the memory of the exchange does not grow with the model. No
communication happens here: every rank computes the same plan from the same layout, which its
fingerprint verifies.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from ..spectral.maps import MINIMAX
from .layout import Layout, ShardedWeight

# MB (2^20 bytes) that a rank sends and receives in a bucket, one way; three buckets may overlap.
# 512 holds a float32 14336 x 4096 per rank, the largest of a 7B model, sent in shards and received
# whole.
BUCKET_MB = 512


@dataclass(frozen=True)
class ExchangePlan:
    """Owner ranks and buckets of the matrices of one layout.

    local: indices into `layout.weights` of the matrices that lie whole on their owner rank and are
    not communicated.
    buckets: indices of all others; a matrix is in exactly one bucket.
    """

    layout: Layout
    owners: tuple[int, ...]
    local: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]

    @cached_property
    def fingerprint(self) -> int:
        """63 bits of a hash of everything in the plan."""
        content = repr(
            (self.layout.num_ranks, self.layout.replicated, self.owners, self.local, self.buckets)
        )
        # Not Python's hash(): it is salted per process, and ranks that agree would seem to differ.
        digest = hashlib.sha256(content.encode())
        for weight in self.layout.weights:
            digest.update(
                repr((weight.name, tuple(weight.shape), weight.tensor, weight.layout)).encode()
            )
            digest.update(repr([tuple(shard) for shard in weight.shards]).encode())
        return int.from_bytes(digest.digest()[:8], "big") >> 1


def make_exchange_plan(
    layout: Layout, bucket_mb: float = BUCKET_MB, itemsize: int = 4
) -> ExchangePlan:
    """The plan for `layout`, with at most `bucket_mb` MB of elements of `itemsize` bytes per rank
    and bucket.

    A rank whose next matrix alone needs more has that one matrix and no other in the bucket.
    """
    owners = assign_owners(layout)
    local = [
        index
        for index, (weight, owner) in enumerate(zip(layout.weights, owners, strict=True))
        if layout.num_ranks == 1 or all(rank == owner for rank in numels_by_rank(weight))
    ]
    # At least one element: a bound of zero would leave every matrix without a bucket.
    max_numel = max(1, int(bucket_mb * 2**20 / itemsize))
    return ExchangePlan(layout, owners, tuple(local), _buckets(layout, owners, local, max_numel))


def numels_by_rank(weight: ShardedWeight) -> Counter[int]:
    """The elements of a weight on each rank that has some."""
    numels: Counter[int] = Counter()
    for shard in weight.shards:
        numels[shard.rank] += shard.numel
    return numels


def _buckets(
    layout: Layout, owners: Sequence[int], local: Sequence[int], max_numel: int
) -> tuple[tuple[int, ...], ...]:
    """Buckets of at most `max_numel` elements per rank, of the matrices that are not local, with
    the least waiting.

    In each bucket all ranks wait for the busiest one. So the matrices are put in the order in which
    their maps would begin if no rank waited, in FLOPs. At the end of a bucket, ranks then wait from
    the next begin in this order to the latest end before it. The sum of these times is the smallest
    possible in this order; among equal ones the number of buckets is. For matrices of one shape,
    every owner has as many of them in each bucket as the others.
    """
    # When would each map begin and end if no rank waited? Local matrices are mapped first, while
    # the first bucket is gathered; then largest first and by shape, so that those of a bucket can
    # be mapped together.
    weights = layout.weights
    flops = [0] * layout.num_ranks
    for index in local:
        flops[owners[index]] += map_flops(weights[index])
    latest, maps = max(flops), []
    exchanged = set(range(len(weights))).difference(local)
    for index in sorted(exchanged, key=lambda i: (-weights[i].numel, weights[i].shape, i)):
        owner = owners[index]
        begin = flops[owner]
        flops[owner] += map_flops(weights[index])
        maps.append((begin, owner, flops[owner], index))
    maps.sort()

    # How much of a bucket's bound does each matrix use, on which ranks? One that is larger than the
    # bound counts as the bound, so that it is alone in a bucket instead of in none.
    needs: list[dict[int, int]] = []
    for _, owner, _, index in maps:
        weight = weights[index]
        need = {owner: weight.numel} if layout.replicated else elements_exchanged(weight, owner)
        needs.append({rank: min(numel, max_numel) for rank, numel in need.items()})

    # A dynamic program over the ends of buckets. ends[n]: after the first n maps, the least sum of
    # waiting times, then the least number of buckets, and where their last bucket begins. A bucket
    # that ends at n may begin anywhere from `first` to n - 1: the window within the bound, whose
    # left side only moves right. Its best begin is the minimum over a sliding window, which a queue
    # of candidates in ascending order gives in constant time: a 7B model on
    # 1,024 ranks is planned in seconds (test_plan).
    ends = [(0, 0, 0)]
    begins = deque([0])
    first, numels = 0, [0] * layout.num_ranks
    for number, (_, _, end, _) in enumerate(maps, start=1):
        # The window takes in this map and drops the first ones until it is within the bound.
        for rank, numel in needs[number - 1].items():
            numels[rank] += numel
        while any(numels[rank] > max_numel for rank in needs[number - 1]):
            for rank, numel in needs[first].items():
                numels[rank] -= numel
            first += 1
        while begins[0] < first:
            begins.popleft()
        # Ranks that could begin the next map would wait for the latest end so far.
        latest = max(latest, end)
        waiting, num_buckets, _ = ends[begins[0]]
        waiting += latest - maps[number][0] if number < len(maps) else 0
        ends.append((waiting, num_buckets + 1, begins[0]))
        # Candidates that are worse than this end, and leave the window before it, are of no use.
        while begins and ends[begins[-1]] > ends[-1]:
            begins.pop()
        begins.append(number)

    # The best buckets, read from the last one backwards.
    buckets, number = [], len(maps)
    while number:
        begin = ends[number][2]
        buckets.append(tuple(index for *_, index in maps[begin:number]))
        number = begin
    return tuple(reversed(buckets))


def assign_owners(layout: Layout) -> tuple[int, ...]:
    """The owner rank of each matrix, in the layout's order.

    A matrix that lies whole on one rank is owned by it. The others, most expensive first, go to the
    rank with the least FLOPs among those that hold a shard. For this choice the missing share of
    the matrix is added to a rank's FLOPs: the rank with the largest shard is preferred, unless it
    has more to do by that much. Ties go to the lowest rank. In the end the busiest rank passes
    matrices on, where that saves 1% of its FLOPs.
    """
    # In units of the default map's FLOPs, which depend on shapes alone: the owners stay the same
    # whatever map a user chooses.
    costs = [map_flops(weight) for weight in layout.weights]
    numels = [numels_by_rank(weight) for weight in layout.weights]
    owners: dict[int, int] = {}
    flops = [0] * layout.num_ranks

    # Whole matrices are not sent anywhere, so they stay.
    for index, by_rank in enumerate(numels):
        if len(by_rank) <= 1:
            owners[index] = min(by_rank, default=0)  # an empty matrix has no map
            flops[owners[index]] += costs[index]

    # Greedy, most expensive first: small ones then even out what large ones leave.
    shared: list[list[int]] = [[] for _ in flops]  # by owner: those that another rank could own
    for index in sorted(set(range(len(costs))).difference(owners), key=lambda i: (-costs[i], i)):
        largest = max(numels[index].values()) or 1  # 0: an empty matrix
        _, owner = min(
            (flops[rank] + costs[index] * (1 - numel / largest), rank)
            for rank, numel in numels[index].items()
        )
        owners[index] = owner
        flops[owner] += costs[index]
        shared[owner].append(index)

    # Under ZeRO 1 and 2 a matrix lies on two ranks, so that the next rank must often pass one on
    # itself: a search for the shortest chain whose ranks all stay below `limit`. Under ZeRO 3 there
    # is rarely one.
    while True:
        busiest = max(range(layout.num_ranks), key=flops.__getitem__)
        # A pass leaves all of its ranks below 99% of the busiest one: without a margin ranks of
        # nearly equal work would exchange matrices for ever smaller gains.
        limit = 0.99 * flops[busiest]
        # The matrix that each rank of a chain would get.
        gains: dict[int, int | None] = {busiest: None}
        chain, last = [busiest], None
        # Breadth first, so that the chain found first is the shortest one: each of its members
        # sends one more matrix. `chain` grows while it is read.
        for rank in chain:
            gain = gains[rank]
            total = flops[rank] + (0 if gain is None else costs[gain])
            if total < limit:
                last = rank
                break
            for index in shared[rank]:
                for other in numels[index] if total - costs[index] < limit else ():
                    if other not in gains:
                        gains[other] = index
                        chain.append(other)
        if last is None:
            return tuple(owners[index] for index in range(len(costs)))
        # From the end of the chain to the busiest rank, each gets the matrix of the one before it.
        while (index := gains[last]) is not None:
            owner, owners[index] = owners[index], last
            shared[owner].remove(index)
            shared[last].append(index)
            flops[owner] -= costs[index]
            flops[last] += costs[index]
            last = owner


def schedule_flops(plan: ExchangePlan, flops: Sequence[int]) -> int:
    """FLOPs of the busiest rank in each bucket, summed: a step's time if all ranks wait for it
    there.

    flops: of the maps of each weight. The local matrices are mapped while the first bucket is
    gathered, so they count with it. Replicas wait for each other only at the end. An upper bound:
    in fact a rank can be a bucket ahead.
    """
    # In each bucket all ranks wait for the busiest one.
    phases = [[*plan.local, *(plan.buckets[0] if plan.buckets else ())], *plan.buckets[1:]]
    if plan.layout.replicated:
        phases = [range(len(flops))]
    total = 0
    for indices in phases:
        by_rank = [0] * plan.layout.num_ranks
        for index in indices:
            by_rank[plan.owners[index]] += flops[index]
        total += max(by_rank)
    return total


def elements_sent(layout: Layout, owners: Sequence[int]) -> list[int]:
    """Elements that each rank sends in a step: shards to their owner (gather), outputs to the
    shards (scatter).

    Replicas: the owner broadcasts the updated matrix in a ring, where every rank but the last sends
    each element once.
    """
    sent = [0] * layout.num_ranks
    for weight, owner in zip(layout.weights, owners, strict=True):
        if layout.replicated:
            for rank in range(layout.num_ranks):
                sent[rank] += weight.numel if (rank + 1) % layout.num_ranks != owner else 0
            continue
        for rank, numel in elements_exchanged(weight, owner).items():
            sent[rank] += numel
    return sent


def elements_exchanged(weight: ShardedWeight, owner: int) -> Counter[int]:
    """Elements of the messages between a weight's owner and each other rank with a shard, one way;
    the owner's are all.

    """
    numels: Counter[int] = Counter()
    for shard in weight.shards:
        if shard.rank != owner:
            for rank in (shard.rank, owner):
                numels[rank] += shard.numel
    return numels


def map_flops(weight: ShardedWeight) -> int:
    """Floating-point operations of the default map of a weight's matrices, in float32; other maps
    scale much alike.
    """
    return weight.num_matrices * _map_flops(*sorted(weight.map_shape))


@cache
def _map_flops(num_rows: int, num_columns: int) -> int:
    return MINIMAX.num_flops(num_rows, num_columns) or 0 if num_rows else 0
