"""How a parameter stores its matrices: as one, as one per expert, as two per expert, or as three of an attention.

transformers stores the experts of a layer in parameters of three dimensions, [experts, rows, columns]. Each expert's
slab is a matrix of its own; a slab of gate and up-projection is two, as in a layer without experts, and as transformers
4 and most published files have them. So no update depends on how a version of transformers stores weights.
torch.nn.MultiheadAttention stores the projections of queries, keys and values in one parameter, above one another.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torch import Tensor

Storage = Literal["plain", "transposed", "halves", "transposed halves", "transposed interleaved halves", "thirds"]
"""Of a slab of two dimensions. plain: a matrix as nn.Linear stores it, [outputs, inputs]. transposed: [inputs,
outputs]. halves: gate above up; transposed halves: gate left of up; interleaved: their columns alternate. thirds:
queries above keys above values."""
Storages = Mapping[str, Storage]
"""By a parameter's name; parameters that are one plain matrix are left out."""


def num_matrices(storage: Storage) -> int:
    """Of a slab."""
    return 3 if storage == "thirds" else 2 if "halves" in storage else 1


def map_shape(slab: Sequence[int], storage: Storage) -> tuple[int, int]:
    """The shape in which a slab's matrices are mapped: as they are stored. A map of X^T is that of X, transposed."""
    rows, columns = slab
    if storage == "transposed":
        return rows, columns
    num_parts = num_matrices(storage)
    return (rows, columns // num_parts) if "transposed" in storage else (rows // num_parts, columns)


def matrix_shape(slab: Sequence[int], storage: Storage) -> tuple[int, int]:
    """(outputs, inputs) of a slab's matrices."""
    rows, columns = map_shape(slab, storage)
    return (columns, rows) if "transposed" in storage else (rows, columns)


def matrix_names(slab: str, storage: Storage) -> list[str]:
    """The names of a slab's matrices."""
    if storage == "thirds":
        return [f"{slab}.q", f"{slab}.k", f"{slab}.v"]
    return [f"{slab}.gate", f"{slab}.up"] if "halves" in storage else [slab]


def slab_names(name: str, shape: Sequence[int]) -> list[str]:
    """The names of a parameter's slabs: its own, or one per expert."""
    return [name] if len(shape) == 2 else [f"{name}.{expert}" for expert in range(shape[0])]


def names_of_matrices(name: str, shape: Sequence[int], storage: Storage) -> list[str]:
    """The names of all matrices of a parameter."""
    return [matrix for slab in slab_names(name, shape) for matrix in matrix_names(slab, storage)]


def split(slabs: Tensor, storage: Storage) -> Tensor:
    """Views [..., 2, m, n] of gate and up in slabs [..., rows, columns] that are stored in halves; of thirds, three."""
    axis, position = _axes(storage)
    sizes = (-1, 2) if "interleaved" in storage else (num_matrices(storage), -1)
    return slabs.unflatten(axis, sizes).movedim(position, -3)


def join(matrices: Tensor, storage: Storage) -> Tensor:
    """The slabs [..., rows, columns] of `matrices` [..., 2 or 3, m, n]: the inverse of `split`."""
    axis, position = _axes(storage)
    parts = matrices.movedim(-3, position)
    return parts.flatten(parts.ndim + axis - 1, parts.ndim + axis)


def matrices_of(name: str, parameter: Tensor, storage: Storage) -> Iterator[tuple[str, Tensor]]:
    """The names and views of all matrices of a parameter, as they are stored."""
    slabs = parameter.unbind() if parameter.ndim == 3 else [parameter]
    for slab_name, slab in zip(slab_names(name, parameter.shape), slabs, strict=True):
        matrices = split(slab, storage) if num_matrices(storage) > 1 else [slab]
        yield from zip(matrix_names(slab_name, storage), matrices, strict=True)


def _axes(storage: Storage) -> tuple[int, int]:
    """The axis of a slab along which its matrices lie, and the axis that counts them once it is divided."""
    if "transposed" not in storage:
        return -2, -3
    return -1, (-1 if "interleaved" in storage else -2)
