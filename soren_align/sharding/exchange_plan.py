"""The exchange plan of a step: the owner rank of each matrix, and the rounds in which matrices are gathered.

It is identical on every rank, which its fingerprint verifies. The bytes of a round are bounded, so that the memory of
the exchange does not grow with the model.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from .geometry import Layout
from .ownership import assign_owners, is_local

# MB (2^20 bytes) that a rank sends and receives in a round, one way; three rounds may overlap. 512 holds a float32
# 14336 x 4096 per rank, the largest of a 7B model, sent in fragments and received whole.
ROUND_MB = 512


@dataclass(frozen=True)
class ExchangePlan:
    """Owner ranks and rounds of the matrices of one layout.

    local: indices into `layout.matrices` of the matrices that lie whole on their owner rank and are not communicated.
    rounds: indices of all others; a matrix is in exactly one round.
    """

    layout: Layout
    owners: tuple[int, ...]
    local: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]

    @cached_property
    def fingerprint(self) -> int:
        """63 bits of a hash of everything in the plan."""
        content = repr((self.layout.num_ranks, self.layout.replicated, self.owners, self.local, self.rounds))
        digest = hashlib.sha256(content.encode())
        for matrix in self.layout.matrices:
            digest.update(repr((matrix.name, tuple(matrix.shape), matrix.tensor, matrix.storage)).encode())
            digest.update(repr([tuple(fragment) for fragment in matrix.fragments]).encode())
        return int.from_bytes(digest.digest()[:8], "big") >> 1


def make_exchange_plan(layout: Layout, round_mb: float = ROUND_MB, itemsize: int = 4) -> ExchangePlan:
    """The plan for `layout`, with at most `round_mb` MB of elements of `itemsize` bytes per rank and round.

    A rank whose next matrix alone needs more has that one matrix and no other in the round.
    """
    owners = assign_owners(layout)
    local = [i for i, m in enumerate(layout.matrices) if is_local(m, owners[i], layout)]
    rounds = _rounds(layout, owners, set(local), max_numel=int(round_mb * 2**20 / itemsize))
    return ExchangePlan(layout, owners, tuple(local), rounds)


def _rounds(layout: Layout, owners: Sequence[int], local: set[int], max_numel: int) -> tuple[tuple[int, ...], ...]:
    rounds: list[list[int]] = []
    used: list[int] = []
    for index in _round_robin(layout, owners, local):
        need = [*_buffer_elements(layout, index, owners[index])]
        if not rounds or any(used[rank] and used[rank] + numel > max_numel for rank, numel in need):
            rounds.append([])
            used = [0] * layout.num_ranks
        rounds[-1].append(index)
        for rank, numel in need:
            used[rank] += numel
    return tuple(map(tuple, rounds))


def _round_robin(layout: Layout, owners: Sequence[int], local: set[int]) -> list[int]:
    """The first matrix of each owner, then the second of each, so that all owners have work in every round.

    An owner's matrices come largest first and by shape, so that those of a round can be mapped together.
    """
    queues: dict[int, list[int]] = {}
    for index, owner in enumerate(owners):
        if index not in local:
            queues.setdefault(owner, []).append(index)
    turns = []
    for owner, queue in queues.items():
        queue.sort(key=lambda i: (-layout.matrices[i].numel, layout.matrices[i].shape, i))
        turns += [(turn, owner, index) for turn, index in enumerate(queue)]
    return [index for _, _, index in sorted(turns)]


def _buffer_elements(layout: Layout, index: int, owner: int) -> Iterator[tuple[int, int]]:
    """(rank, elements) of the buffers for one matrix of a round."""
    matrix = layout.matrices[index]
    if layout.replicated:
        yield owner, matrix.numel
        return
    received = 0
    for fragment in matrix.fragments:
        if fragment.rank != owner:
            received += fragment.numel
            yield fragment.rank, fragment.numel
    yield owner, received
