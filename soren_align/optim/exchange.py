"""The protocol between an optimizer and the ranks that share its matrices.

A `Shard` is this rank's elements of one weight. Before a step a `ShardingStrategy` agrees with the
other ranks on an `Exchange`, which gathers the shards' map inputs into a `Batch` of whole weights
on their owner rank, and returns what becomes of them. The classes here are those of one process,
where every weight is whole and nothing is sent; `soren_align.sharding` has those of several ranks.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..spectral import MAPS
from .layout import (
    LINEAR,
    MapState,
    Named,
    WeightLayout,
    WeightLayouts,
    local,
    map_state_sizes,
    share_of_state,
    weights_in,
)
from .state import map_dtype

WeightKind = tuple[tuple[int, int], WeightLayout, torch.dtype, torch.device]
"""(shape, layout, dtype, device) of a whole weight's map input: equal ones are mapped in one
batch."""


@dataclass(eq=False)
class Shard:
    """This rank's elements of one expert weight of `shape`: `numel` from its element number
    `offset` on, row-major.

    They are those from `start` on of the flattened `parameter`, in whose state those of the
    momentum are; for a DTensor `start` counts within the local tensor. map_state: places of the
    map's state for these elements, in the parameter's.
    squares: see `second_moment`.
    """

    name: str
    shape: tuple[int, int]
    layout: WeightLayout
    parameter: Tensor
    start: int
    offset: int
    numel: int
    state: dict[str, Tensor] = field(default_factory=dict)
    map_state: dict[str, slice] = field(default_factory=dict)
    squares: Tensor | None = None

    def view_of(self, tensor: Any) -> Tensor:
        """The shard's elements of `tensor`, which has the parameter's shape: its gradient or a
        state. Shares memory.

        All of a local tensor keeps its shape and strides, and so do one of its expert weights and a
        block of its rows; any other shard is one-dimensional.
        """
        # Views, never copies: a step writes through them into the weight, the momentum and the
        # state.
        here = local(tensor)
        if self.numel == here.numel():
            return here
        if here.ndim == 3 and self.numel == math.prod(self.shape):
            return here[self.start // self.numel]
        if here.ndim == 2:  # rows of it
            return here[self.start // self.shape[1] : (self.start + self.numel) // self.shape[1]]
        return here.view(-1)[self.start : self.start + self.numel]

    @property
    def weight(self) -> Tensor:
        """The shard's elements of the parameter, sharing memory."""
        return self.view_of(self.parameter)

    @property
    def momentum(self) -> Tensor:
        """The momentum, in its own dtype, sharing memory."""
        return self.view_of(self.state["exp_avg"])

    def numbers_of(self, key: str) -> Tensor:
        """This shard's numbers of the map's state `key`, one-dimensional, sharing memory."""
        return local(self.state[key]).view(-1)[self.map_state[key]]

    @property
    def second_moments(self) -> Tensor:
        """The second moments of the elements of the map's output; only in a group that has them."""
        return self.view_of(self.state["exp_avg_sq"])

    @property
    def compensation(self) -> Tensor | None:
        """The lower half of the master weights, if there is one."""
        return self.view_of(self.state["compensation"]) if "compensation" in self.state else None

    @property
    def starting_weight(self) -> Tensor | None:
        """The weight before the first step, if its decay moves towards it."""
        return self.view_of(self.state["start"]) if "start" in self.state else None


def with_map_state(shards: Sequence[Shard], map_state: MapState) -> Sequence[Shard]:
    """The shards, with the places of the map's state: of each parameter's shards one after another.

    Each has the share of the state of its weight's matrices that lies with its elements.
    """
    # One flat tensor per parameter and name: launchers shard and save it beside the momentum.
    ends: dict[tuple[int, str], int] = defaultdict(int)
    for shard in shards if map_state else ():
        # By the identity of the parameter: a comparison of tensors would be elementwise.
        for key, size in map_state_sizes(shard.shape, shard.layout, map_state).items():
            first, last = share_of_state(shard.shape, shard.offset, shard.numel, size)
            start = ends[id(shard.parameter), key]
            ends[id(shard.parameter), key] += last - first
            shard.map_state[key] = slice(start, start + last - first)
    return shards


# MB (2^20 bytes), by device. On two CPU cores a batch of 64 x 64 takes a quarter of the time, of
# 256 x 256 four fifths, of 512 x 512 a third more: 16 MB keep those apart. Elsewhere 2048 is a
# guess, not measured: a product of 256 rows has 4 tiles of 128 x 128 for the 132 multiprocessors of
# an H100, and all 72 of Qwen2.5-3B make one batch.
WORKSPACE_MB = {"cpu": 16}
WORKSPACE_MB_ELSEWHERE = 2048


def matrix_batches(kinds: Sequence[WeightKind], workspace_mb: float | None) -> list[list[int]]:
    """Batches of indices into whole weights: equal ones in order, as many as the workspace holds,
    without empty ones.

    workspace_mb: MB (2^20 bytes); a weight that needs more is a batch of its own. None:
    `default_workspace_mb`.
    """
    # Equal weights together: one launch for many small matrices, whose maps alone leave most of a
    # GPU idle. An empty shard's weight has no map.
    indices: dict[Any, list[int]] = {}
    for index, kind in enumerate(kinds):
        if 0 not in kind[0]:
            indices.setdefault(kind, []).append(index)
    batches = []
    for (shape, layout, dtype, device), equal in indices.items():
        limit = default_workspace_mb(device.type) if workspace_mb is None else workspace_mb
        # The bound is of the workspace, not of the matrices: a map of one 2048 x 2048 needs several
        # times the memory of its input, and a batch as many times more as it has matrices.
        size = max(1, int(limit * 2**20 / (num_batch_numbers(shape, layout) * dtype.itemsize)))
        batches += [equal[start : start + size] for start in range(0, len(equal), size)]
    return batches


def num_batch_numbers(shape: tuple[int, int], layout: WeightLayout) -> int:
    """The numbers, in the dtype of a map's input, that a weight needs in a batch: its input and the
    maps' workspace.
    """
    m, n = layout.map_shape(shape)
    # Of the default map in float32; and the tanh of gradients that are not clipped.
    of_maps = MAPS["minimax"].num_workspace_numbers(m, n) + m * n
    return layout.num_matrices * of_maps + math.prod(shape)


def default_workspace_mb(device_type: str) -> float:
    """MB (2^20 bytes) of the workspace on a type of device ("cpu", "cuda", ...)."""
    return WORKSPACE_MB.get(device_type, WORKSPACE_MB_ELSEWHERE)


def staged(tensor: Tensor, device: torch.device | None) -> Tensor:
    """`tensor` on `device` (None: where it is); from a CPU to a GPU through pinned memory.

    The host does not wait for that copy; torch keeps a pinned block until its copies are done.
    """
    # CPU offload: momenta lie in the memory of the host, and each map input makes this way. A copy
    # from pageable memory would stop the host until it has ended.
    if device is not None and device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(eq=False)
class Batch:
    """The map's inputs of whole weights of one shape and layout, with the names of their matrices.

    inputs: N of the weights, [rows, columns] or [k, rows, columns].
    returned: outputs, shaped as the weights -> (shard, its part of an output in any shape) for all
    shards on this rank whose outputs have arrived. Call it once, and use each pair before the next.
    map_state: by name [matrices of a weight, numbers] or [k, ...]; the map changes it in place.
    """

    inputs: Tensor
    layout: WeightLayout
    names: list[str]
    returned: Callable[[Any], Iterator[tuple[Shard, Tensor]]]
    map_state: dict[str, Tensor] = field(default_factory=dict)

    def map(self, function: Callable[..., Tensor]) -> Tensor:
        """The outputs for the matrices, stored as the weights store theirs.

        function: matrices [m, n] or [k, m, n], their names, their state by keyword -> outputs of
        the same shape.
        """
        x, layout, names, state = self.inputs, self.layout, self.names, self.map_state
        if layout.num_matrices == 1:
            return function(
                x, names, **{key: numbers.squeeze(-2) for key, numbers in state.items()}
            )
        # The matrices of a weight are mapped apart, as in a model that stores them apart.
        parts = layout.split(x)
        if x.ndim == 3:
            together = {key: numbers.flatten(0, 1) for key, numbers in state.items()}
            return layout.join(function(parts.flatten(0, 1), names, **together).view(parts.shape))
        outputs = []
        # One matrix at a time: the workspace may hold no more.
        for number, (part, name) in enumerate(zip(parts, names, strict=True)):
            of_part = {key: numbers[number] for key, numbers in state.items()}
            outputs.append(function(part.contiguous(), [name], **of_part))
        return layout.join(torch.stack(outputs))


@dataclass(frozen=True)
class MapRequest:
    """The maps of one spectral group in a step."""

    map_input: Callable[[Shard], Tensor]
    """N of a shard, in any shape; not modified."""
    workspace_mb: float | None
    """See `matrix_batches`."""
    adapt: Callable[[Shard, Tensor], Tensor] | None = None
    """Changes a shard's part of an output before it is returned; sets `shard.squares`, added
    over the ranks."""


def whole_batches(
    shards: Sequence[Shard], request: MapRequest, device: torch.device | None = None
) -> Iterator[Batch]:
    """Shards that are whole weights, in batches on `device`; None: each where it is."""
    adapt = request.adapt
    # Dtype and device belong to the kind: a batch is one tensor.
    kinds: list[WeightKind] = [
        (s.shape, s.layout, map_dtype(s.parameter), device or s.parameter.device) for s in shards
    ]
    for indices in matrix_batches(kinds, request.workspace_mb):
        members = [shards[i] for i in indices]
        inputs = (
            staged(request.map_input(shard).reshape(shard.shape), device) for shard in members
        )
        states = {key: [shard.numbers_of(key) for shard in members] for key in members[0].map_state}

        # A default argument, since the loop changes `members` before the last pairs are read.
        def pairs(outputs: Sequence[Tensor], members=members) -> Iterator[tuple[Shard, Tensor]]:
            for shard, output in zip(members, outputs, strict=True):
                yield shard, output if adapt is None else adapt(shard, output)

        yield batch_of(kinds[indices[0]], members, inputs, states, pairs)


def batch_of(
    kind: WeightKind,
    members: Sequence[Any],
    inputs: Iterator[Tensor],
    states: Mapping[str, Sequence[Tensor]],
    pairs: Callable[[Sequence[Tensor]], Iterator[tuple[Shard, Tensor]]],
) -> Batch:
    """A batch of whole weights of one kind: one as it is, several copied into one tensor, so that
    one at a time exists.

    members: have the names of the weights. states: the numbers of the map's state of each, which
    get the new ones.
    pairs: outputs of the weights -> the pairs that the batch returns.
    """
    # Inputs are an iterator: each is made, copied into the batch and freed before the next one. A
    # single weight is not copied at all.
    shape, layout, dtype, device = kind
    if len(members) == 1:
        stacked = next(inputs)
        state = {key: numbers.view(layout.num_matrices, -1) for key, (numbers,) in states.items()}
    else:
        stacked = torch.empty(len(members), *shape, dtype=dtype, device=device)
        for target in stacked:
            target.copy_(next(inputs))
        stacks = {key: torch.stack(list(numbers)) for key, numbers in states.items()}
        state = {
            key: stack.view(len(members), layout.num_matrices, -1) for key, stack in stacks.items()
        }

    def returned(output: Tensor) -> Iterator[tuple[Shard, Tensor]]:
        # A single weight's state was mapped in place; that of a batch is a stacked copy.
        for key, values in state.items() if len(members) > 1 else ():
            for old, new in zip(states[key], values, strict=True):
                old.copy_(new.reshape(-1))
        yield from pairs([output] if output.ndim == 2 else output.unbind())

    names = [matrix for member in members for matrix in layout.matrix_names(member.name)]
    return Batch(stacked, layout, names, returned, state)


class Exchange:
    """Gathers the matrices of one spectral group's tensors for a step, and returns what becomes of
    them.

    This one has all weights whole, on one process; those between ranks are subclasses
    (`sharding.gather`).
    """

    def __init__(self, weights: Sequence[Shard]):
        self._weights = weights

    def shards(self, state: Mapping[Tensor, dict[str, Tensor]]) -> Sequence[Shard]:
        """This rank's shards of the matrices, with the tensors' state."""
        # Found anew at each step: an optimizer replaces its state when it loads a checkpoint.
        for shard in self._weights:
            shard.state = state[shard.parameter]
        return self._weights

    def whole_matrices(self, shards: Sequence[Shard], request: MapRequest) -> Iterator[Batch]:
        """Gather the map inputs of all shards: every matrix is in one batch on one rank.
        Collective.
        """
        return whole_batches(shards, request)


class ShardingStrategy:
    """The places of an optimizer's matrices, by which the ranks agree before a step that they can
    take it, and how.

    This is the strategy of one process, where every matrix is whole; those of several ranks are
    subclasses (`sharding.gather`).
    """

    def has_layout(self, parameter: Tensor) -> bool:
        """Whether the layout of the matrices in `parameter` is known: here of a matrix, or all
        experts of a layer.
        """
        # The tensor's own shape counts: under ZeRO 3 a flat shard still has a two-dimensional
        # ds_shape.
        grad = parameter.grad
        return (
            parameter.ndim in (2, 3)
            and grad is not None
            and grad.ndim > 1
            and local(parameter) is parameter
        )

    def shards(self, named: Named, layouts: WeightLayouts) -> list[Shard]:
        """This rank's shards of the weights in these tensors, without their state.

        The weights are parameters [m, n], their blocks, and the experts in parameters [experts, m,
        n].
        """
        shards = []
        for name, parameter in named:
            start = 0
            for weight in weights_in(name, parameter.shape, layouts.get(name, LINEAR)):
                shards.append(Shard(*weight, parameter, start, 0, weight.numel))
                start += weight.numel
        return shards

    def check_gradients(
        self, named: Named, error: Exception | None, squares: Tensor, *others: Tensor
    ) -> list[float]:
        """The sums of `squares` over the ranks and the numbers `others` of this rank, by one host
        read. Collective.

        Raises on every rank if `error` is set on any rank, or if the ranks lack different
        gradients.
        """
        if error is not None:
            raise error
        return torch.cat([squares, *others]).tolist()

    def map_state_shapes(
        self, name: str, parameter: Tensor, layouts: WeightLayouts, map_state: MapState
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of the maps' state beside a parameter on this rank, flat, by name."""
        ends: dict[str, tuple[int, ...]] = {}
        for shard in with_map_state(self.shards([(name, parameter)], layouts), map_state):
            ends |= {key: (place.stop,) for key, place in shard.map_state.items()}
        return ends

    def plan(self, named: Named, layouts: WeightLayouts, map_state: MapState) -> Exchange:
        """The exchange of these tensors of one spectral group.
        Collective; raises ValueError on every rank.
        """
        return Exchange(with_map_state(self.shards(named, layouts), map_state))
