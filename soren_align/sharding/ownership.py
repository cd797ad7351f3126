"""Assign each matrix to one owner rank.

Matrices are mapped whole. Given the layout, this module balances the maps' FLOPs over ranks. No communication happens
here: every rank computes the same owners from the same layout.
"""

from collections.abc import Sequence
from functools import cache

from ..spectral.maps import MINIMAX
from .geometry import Layout, Matrix


def assign_owners(layout: Layout) -> tuple[int, ...]:
    """The owner rank of each matrix, in the layout's order.

    A matrix that lies whole on one rank is owned by it. The others, most expensive first, go to the rank with the least
    FLOPs among those that hold a fragment. For this choice the missing share of the matrix is added to a rank's FLOPs:
    the rank with the largest fragment is preferred, unless it has more to do by that much. Ties go to the lowest rank.
    """
    owners: dict[int, int] = {}
    flops = [0.0] * layout.num_ranks
    shared = []
    for index, matrix in enumerate(layout.matrices):
        if len(matrix.fragments) > 1:
            shared.append(index)
        else:
            owners[index] = matrix.fragments[0].rank if matrix.fragments else 0  # an empty matrix has no map
            flops[owners[index]] += _cost(matrix)
    for index in sorted(shared, key=lambda i: (-_cost(layout.matrices[i]), i)):
        matrix = layout.matrices[index]
        cost, largest = _cost(matrix), max(f.numel for f in matrix.fragments) or 1  # 0: an empty matrix
        _, owner = min((flops[f.rank] + cost * (1 - f.numel / largest), f.rank) for f in matrix.fragments)
        owners[index] = owner
        flops[owner] += cost
    return tuple(owners[index] for index in range(len(layout.matrices)))


def flops_per_rank(layout: Layout, owners: Sequence[int]) -> list[int]:
    """Floating-point operations of a step's maps, by rank."""
    flops = [0] * layout.num_ranks
    for matrix, owner in zip(layout.matrices, owners, strict=True):
        flops[owner] += _cost(matrix)
    return flops


def elements_sent(layout: Layout, owners: Sequence[int]) -> list[int]:
    """Elements that each rank sends in a step: fragments to their owner (gather), outputs to the fragments (scatter).

    Replicas: the owner broadcasts the updated matrix in a ring, where every rank but the last sends each element once.
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


def is_local(matrix: Matrix, owner: int, layout: Layout) -> bool:
    """Whether a matrix lies whole on its owner rank and needs no communication."""
    return layout.num_ranks == 1 or all(fragment.rank == owner for fragment in matrix.fragments)


def _cost(matrix: Matrix) -> int:
    return matrix.num_maps * _map_flops(*sorted(matrix.map_shape))


@cache
def _map_flops(num_rows: int, num_columns: int) -> int:
    # Those of the default map: the other maps scale with the shape in much the same way.
    return MINIMAX.num_flops(num_rows, num_columns) or 0 if num_rows else 0
