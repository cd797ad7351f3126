"""The plan of a step: owners, and what travels in which round. Identical on every rank, and comparable by a number.

A round's bytes are bounded, so that the memory of the exchange does not grow with the model.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from .geometry import Layout
from .ownership import assign_owners, is_at_home

# MB (2^20 bytes) that a rank sends and receives in a round, one way; three rounds may be under way at once. 512 holds
# a float32 14336 x 4096 per rank, the largest of a 7B model, sent in parts and received whole.
ROUND_MB = 512


@dataclass(frozen=True)
class Plan:
    """Numbers in `at_home` and `rounds` are places in `layout.matrices`; a matrix is in exactly one of them."""

    layout: Layout
    owners: tuple[int, ...]
    at_home: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]

    @cached_property
    def fingerprint(self) -> int:
        """63 bits of a hash of everything in the plan."""
        content = repr((self.layout.num_ranks, self.layout.replicated, self.owners, self.at_home, self.rounds))
        digest = hashlib.sha256(content.encode())
        for matrix in self.layout.matrices:
            digest.update(repr((matrix.name, tuple(matrix.shape), matrix.tensor)).encode())
            digest.update(repr([tuple(fragment) for fragment in matrix.fragments]).encode())
        return int.from_bytes(digest.digest()[:8], "big") >> 1


def make_plan(layout: Layout, round_mb: float = ROUND_MB, itemsize: int = 4) -> Plan:
    """The plan for `layout`, with at most `round_mb` MB of numbers of `itemsize` bytes per rank and round.

    A rank whose next matrix alone needs more takes that one matrix and no other in the round.
    """
    owners = assign_owners(layout)
    at_home = [i for i, m in enumerate(layout.matrices) if is_at_home(m, owners[i], layout)]
    return Plan(layout, owners, tuple(at_home), _rounds(layout, owners, set(at_home), int(round_mb * 2**20 / itemsize)))


def _rounds(layout: Layout, owners: Sequence[int], at_home: set[int], most: int) -> tuple[tuple[int, ...], ...]:
    rounds: list[list[int]] = []
    used: list[int] = []
    for index in _owners_in_turn(layout, owners, at_home):
        need = [*_numbers_held(layout, index, owners[index])]
        if not rounds or any(used[rank] and used[rank] + numel > most for rank, numel in need):
            rounds.append([])
            used = [0] * layout.num_ranks
        rounds[-1].append(index)
        for rank, numel in need:
            used[rank] += numel
    return tuple(map(tuple, rounds))


def _owners_in_turn(layout: Layout, owners: Sequence[int], at_home: set[int]) -> list[int]:
    """The first matrix of each owner, then the second of each: so all owners have work in every round.

    An owner's matrices come largest first and by shape, so that those of a round can be mapped together.
    """
    queues: dict[int, list[int]] = {}
    for index, owner in enumerate(owners):
        if index not in at_home:
            queues.setdefault(owner, []).append(index)
    turns = []
    for owner, queue in queues.items():
        queue.sort(key=lambda i: (-layout.matrices[i].numel, layout.matrices[i].shape, i))
        turns += [(turn, owner, index) for turn, index in enumerate(queue)]
    return [index for _, _, index in sorted(turns)]


def _numbers_held(layout: Layout, index: int, owner: int) -> Iterator[tuple[int, int]]:
    """(rank, numbers) of the buffers that one matrix of a round takes."""
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
