"""Who updates which matrix, so that the slowest rank has little more to do than the mean.

A matrix is mapped whole, by one rank. Nothing is communicated here: from the same layout every rank finds the same.
"""

from collections.abc import Sequence
from functools import cache

from ..spectral import num_flops
from .geometry import Layout, Matrix


def assign_owners(layout: Layout) -> tuple[int, ...]:
    """The owner of each matrix, in the layout's order.

    A matrix that lies whole on one rank is owned there. The others, dearest first, go to the holder with the least
    load; a holder counts as loaded by what it lacks of the matrix, so that a straddler goes to its biggest holder
    unless that one is behind by more. Ties go to the lowest rank.
    """
    owners: dict[int, int] = {}
    load = [0.0] * layout.num_ranks
    shared = []
    for index, matrix in enumerate(layout.matrices):
        if len(matrix.fragments) > 1:
            shared.append(index)
        else:
            owners[index] = matrix.fragments[0].rank if matrix.fragments else 0  # an empty one needs nobody
            load[owners[index]] += _cost(matrix)
    for index in sorted(shared, key=lambda i: (-_cost(layout.matrices[i]), i)):
        matrix = layout.matrices[index]
        cost, most = _cost(matrix), max(f.numel for f in matrix.fragments) or 1  # 0: an empty matrix
        _, owner = min((load[f.rank] + cost * (1 - f.numel / most), f.rank) for f in matrix.fragments)
        owners[index] = owner
        load[owner] += cost
    return tuple(owners[index] for index in range(len(layout.matrices)))


def loads(layout: Layout, owners: Sequence[int]) -> list[int]:
    """Floating-point operations of the maps per rank and step."""
    load = [0] * layout.num_ranks
    for matrix, owner in zip(layout.matrices, owners, strict=True):
        load[owner] += _cost(matrix)
    return load


def numbers_sent(layout: Layout, owners: Sequence[int]) -> list[int]:
    """How many numbers each rank sends in a step: fragments to their owner, and the outputs back to the fragments.

    Replicas: the updated matrix from its owner to all, of which a ring sends each number once per rank but the last.
    """
    sent = [0] * layout.num_ranks
    for matrix, owner in zip(layout.matrices, owners, strict=True):
        if layout.replicated:
            for rank in range(layout.num_ranks):
                sent[rank] += matrix.numel if (rank + 1) % layout.num_ranks != owner else 0
            continue
        for fragment in matrix.fragments:
            if fragment.rank != owner:
                sent[fragment.rank] += fragment.numel
                sent[owner] += fragment.numel
    return sent


def is_at_home(matrix: Matrix, owner: int, layout: Layout) -> bool:
    """Whether a matrix is mapped where it lies, without any communication."""
    return layout.num_ranks == 1 or all(fragment.rank == owner for fragment in matrix.fragments)


def _cost(matrix: Matrix) -> int:
    return _map_flops(*sorted(matrix.shape))


@cache
def _map_flops(num_rows: int, num_columns: int) -> int:
    # The default map's: the others rise with the shape in much the same way.
    return num_flops("minimax", num_rows, num_columns) if num_rows else 0
