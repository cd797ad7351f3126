"""How a parameter stores its matrices: one, those of all experts, or several in one weight.

A parameter is a weight of two dimensions [rows, columns], or the weights of all experts of a layer
[experts, rows, columns], as transformers stores them. A weight is one matrix, or the matrices of
gate and up-projection together: these are two matrices to a map, as in a layer without experts, and
as transformers 4 and most published files have them. So no update depends on how a version of
transformers stores weights. torch.nn.MultiheadAttention stores the projections of queries, keys and
values in one parameter, above one another. With `split` (`blocks`) a fused weight is several
weights, one for each block of its rows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class WeightLayout:
    """The matrices in a weight [rows, columns], in equal parts along its outputs.

    transposed: stored as [inputs, outputs]; nn.Linear stores [outputs, inputs].
    parts: the names of its matrices, in order; one without a name is the weight itself.
    interleaved: of a transposed weight: the columns of its parts alternate.
    sizes: the rows of blocks, which need not be equal: then each part is a weight of its own.
        Blocks of columns, of a transposed weight, stay one weight.
    """

    transposed: bool = False
    parts: tuple[str, ...] = ("",)
    interleaved: bool = False
    sizes: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: "str | WeightLayout") -> "WeightLayout":
        """Read a layout as checkpoints write it: "linear", "transposed gate_up", "blocks q:64
        k:32", "blocks 12*8" (12 of 8 rows)...
        """
        return text if isinstance(text, WeightLayout) else _parsed(text)

    def __str__(self) -> str:
        kind = {("",): "", GATE_UP: "gate_up", QKV: "qkv"}.get(self.parts, "")
        if self.sizes:
            numbers = tuple(map(str, range(len(self.sizes))))
            pairs = zip(self.parts, self.sizes, strict=True)
            kind = "blocks " + " ".join(f"{part}:{size}" for part, size in pairs)
            if self.parts == numbers and len({*self.sizes}) == 1:
                kind = f"blocks {len(numbers)}*{self.sizes[0]}"
        words = ["transposed" * self.transposed, "interleaved" * self.interleaved, kind]
        return " ".join(word for word in words if word) or "linear"

    @property
    def num_matrices(self) -> int:
        """The number of matrices in a weight."""
        return len(self.parts)

    def map_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """The shape in which a weight's matrices are mapped: as they are stored, since a map of X^T
        is that of X, transposed.
        """
        rows, columns = shape
        if self.transposed:
            return rows, columns // self.num_matrices
        return rows // self.num_matrices, columns

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """(outputs, inputs) of a weight's matrices."""
        rows, columns = self.map_shape(shape)
        return (columns, rows) if self.transposed else (rows, columns)

    def matrix_names(self, name: str) -> list[str]:
        """The names of the matrices in a weight of this name."""
        return [f"{name}.{part}" if part else name for part in self.parts]

    def split(self, weights: Tensor) -> Tensor:
        """Views [..., parts, m, n] of the matrices in weights [..., rows, columns]."""
        axis, position = self._axes()
        sizes = (-1, self.num_matrices) if self.interleaved else (self.num_matrices, -1)
        return weights.unflatten(axis, sizes).movedim(position, -3)

    def join(self, matrices: Tensor) -> Tensor:
        """The weights [..., rows, columns] of `matrices` [..., parts, m, n]: the inverse of
        `split`.
        """
        axis, position = self._axes()
        parts = matrices.movedim(-3, position)
        return parts.flatten(parts.ndim + axis - 1, parts.ndim + axis)

    def _axes(self) -> tuple[int, int]:
        """The axis of a weight along which its matrices lie, and the axis that counts them once it
        is divided.
        """
        if not self.transposed:
            return -2, -3
        return -1, (-1 if self.interleaved else -2)

    def numbers(self, shape: Sequence[int], places: Tensor) -> Tensor:
        """Which of a weight's matrices has each of its elements at `places`, row-major."""
        (rows, columns), num = shape, self.num_matrices
        if not self.transposed:
            return places // (rows // num * columns)
        column = places % columns
        return column % num if self.interleaved else column // (columns // num)


GATE_UP, QKV = ("gate", "up"), ("q", "k", "v")
LINEAR = WeightLayout()
"""One matrix as nn.Linear stores it."""
WeightLayouts = Mapping[str, WeightLayout]
"""The layout by a parameter's name; parameters that are one linear matrix are left out."""
MapState = Mapping[str, Callable[[int, int], tuple[int, ...]]]
"""A map's state for each matrix, beside the momentum: name -> its shape for a matrix of m outputs
and n inputs."""
Named = Sequence[tuple[str, Tensor]]


@cache
def _parsed(text: str) -> WeightLayout:
    # A text is parsed once per kind of weight (cached): a model of experts has thousands of weights
    # and a handful of kinds.
    words = text.split()
    layout = WeightLayout(transposed="transposed" in words, interleaved="interleaved" in words)
    if "gate_up" in words:
        return replace(layout, parts=GATE_UP)
    if "qkv" in words:
        return replace(layout, parts=QKV)
    if "blocks" not in words:
        return layout
    blocks: list[tuple[str, int]] = []
    # "12*8" is written for 12 heads of 8 rows: a name for each would make a group's settings as
    # long as its weights.
    for word in words[words.index("blocks") + 1 :]:
        number, times, size = word.partition("*")
        name, _, own_size = word.partition(":")
        blocks += (
            [(str(i), int(size)) for i in range(int(number))] if times else [(name, int(own_size))]
        )
    names, sizes = zip(*blocks, strict=True)
    return replace(layout, parts=names, sizes=sizes)


class Weight(NamedTuple):
    """A weight of two dimensions: an expert's, a row block, or a whole parameter."""

    name: str
    shape: tuple[int, int]
    layout: WeightLayout

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def matrix_names(self) -> list[str]:
        """The names of its matrices."""
        return self.layout.matrix_names(self.name)


def weights_in(name: str, shape: Sequence[int], layout: WeightLayout) -> list[Weight]:
    """The weights of a parameter, which lie in its elements one after another."""
    # Experts and row blocks are contiguous in a parameter, so that each can be a weight of its own,
    # with its own owner rank. Columns are not: blocks of columns stay parts of one weight.
    *experts, rows, columns = shape
    if experts:
        return [Weight(f"{name}.{expert}", (rows, columns), layout) for expert in range(experts[0])]
    if layout.sizes and not layout.transposed:
        return [
            Weight(f"{name}.{part}", (size, columns), LINEAR)
            for part, size in zip(layout.parts, layout.sizes, strict=True)
        ]
    return [Weight(name, (rows, columns), layout)]


def names_of_matrices(name: str, shape: Sequence[int], layout: WeightLayout) -> list[str]:
    """The names of all matrices of a parameter."""
    return [matrix for weight in weights_in(name, shape, layout) for matrix in weight.matrix_names]


def matrices_of(
    name: str, parameter: Tensor, layout: WeightLayout | str
) -> Iterator[tuple[str, Tensor]]:
    """The names and views of all matrices of a parameter, as they are stored."""
    weights = weights_in(name, parameter.shape, WeightLayout.parse(layout))
    tensors = (
        parameter.unbind()
        if parameter.ndim == 3
        else parameter.split([weight.shape[0] for weight in weights])
    )
    for weight, tensor in zip(weights, tensors, strict=True):
        matrices = weight.layout.split(tensor) if weight.layout.num_matrices > 1 else [tensor]
        yield from zip(weight.matrix_names, matrices, strict=True)


def map_state_sizes(
    shape: Sequence[int], layout: WeightLayout, map_state: MapState
) -> dict[str, int]:
    """The numbers of a map's state for all matrices of a weight, by name."""
    matrix = layout.matrix_shape(shape)
    return {
        key: layout.num_matrices * math.prod(shape_of(*matrix))
        for key, shape_of in map_state.items()
    }


def share_of_state(shape: Sequence[int], offset: int, numel: int, size: int) -> tuple[int, int]:
    """The interval of `size` numbers of a weight's map state that lies with `numel` elements from
    `offset` on.

    In proportion: a number per row lies with the row's first element, on whatever rank that is.
    """
    # Both ends are rounded up, so that neighbouring shards share no number and leave none out
    # (test_each_number_of_the_state_lies_on_one_rank_of_flat_shards).
    total = max(1, math.prod(shape))
    return -(-offset * size // total), -(-(offset + numel) * size // total)


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the whole parameter, also where ZeRO 3 has emptied the tensor.

    The only place that reads DeepSpeed's attribute (tests/test_layers.py): optim lies below
    sharding, and needs the shape before there is a strategy.
    """
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
