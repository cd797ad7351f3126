"""The exchange of sharded matrices on one rank: gather each on its owner rank, map, scatter the output, in rounds.

    gather(i + 1)  |  map(i)  |  scatter(i - 1)

Only the plan decides what is communicated: every rank takes part in every round, even if it has nothing to send.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim import GroupUpdate, Piece, Whole, momentum_dtype, staged
from .exchange_plan import ExchangePlan
from .geometry import Fragment, piece_of


class Exchange:
    """Carries out `plan` between the ranks of `process_group`; collectives and maps run on `device`.

    bytes_sent: to other ranks, by all calls. peak_bytes: the largest sum of the sizes of the rounds' buffers, at most 3
    times the plan's limit for a round.
    """

    def __init__(self, plan: ExchangePlan, process_group: dist.ProcessGroup, device: torch.device):
        self.plan, self.process_group, self.device = plan, process_group, device
        self.rank = dist.get_rank(process_group)
        self.bytes_sent = self.peak_bytes = self.buffer_bytes = 0
        self._fragments = {
            i: f for i, matrix in enumerate(plan.layout.matrices) for f in matrix.fragments if f.rank == self.rank
        }
        self._buffer_layouts = [_BufferLayout(plan, indices, self.rank) for indices in plan.rounds]

    def run_(self, update: GroupUpdate, parameters: Sequence[Tensor]) -> None:
        """Map and update `parameters`, whose momentum is that of this step; layouts refer to them by number."""
        pieces = {}
        for index, fragment in self._fragments.items():
            pieces[index] = piece_of(self.plan.layout.matrices[index], fragment, parameters)
        dtype = momentum_dtype(parameters[0])
        rounds = [_Round(self, layout, update, pieces, dtype) for layout in self._buffer_layouts]
        if rounds:
            rounds[0].gather_()
        local = (i for i in self.plan.local if self.plan.owners[i] == self.rank and i in pieces)
        update.map_and_add_([pieces[i] for i in local], self.device)
        for number, current in enumerate(rounds):
            if number + 1 < len(rounds):
                rounds[number + 1].gather_()
            current.map_and_scatter_()
            if number > 0:
                rounds[number - 1].add_outputs_()
        if rounds:
            rounds[-1].add_outputs_()


class _BufferLayout:
    """The segments of a round's buffers on one rank, the same for gather and scatter.

    outgoing: (matrix, its fragment here, offset in the buffer), by owner; incoming: for each matrix owned here, its
    fragments on other ranks with their offsets in the buffer, which is ordered by rank. Between two ranks the order is
    that of the plan.
    """

    def __init__(self, plan: ExchangePlan, indices: Sequence[int], rank: int):
        matrices, owners = plan.layout.matrices, plan.owners
        self.owned = [i for i in indices if owners[i] == rank]
        self.matrices = [matrices[i] for i in self.owned]
        self.fragments_here = {i: f for i in indices for f in matrices[i].fragments if f.rank == rank}
        self.num_sent, self.num_received = [0] * plan.layout.num_ranks, [0] * plan.layout.num_ranks

        leaving = [(owners[i], i) for i in indices if owners[i] != rank and i in self.fragments_here]
        self.outgoing: list[tuple[int, Fragment, int]] = []
        for owner, index in sorted(leaving, key=lambda pair: pair[0]):
            fragment = self.fragments_here[index]
            self.outgoing.append((index, fragment, sum(self.num_sent)))
            self.num_sent[owner] += fragment.numel

        arriving = [(f.rank, i, f) for i in self.owned for f in matrices[i].fragments if f.rank != rank]
        self.incoming: dict[int, list[tuple[Fragment, int]]] = {i: [] for i in self.owned}
        total = 0
        for source, index, fragment in sorted(arriving, key=lambda triple: triple[0]):
            self.incoming[index].append((fragment, total))
            self.num_received[source] += fragment.numel
            total += fragment.numel


class _Round:
    """One round of the exchange: gather_, then map_and_scatter_, then add_outputs_."""

    def __init__(
        self,
        exchange: Exchange,
        layout: _BufferLayout,
        update: GroupUpdate,
        pieces: dict[int, Piece],
        dtype: torch.dtype,
    ):
        self._exchange, self._layout, self._update, self._pieces = exchange, layout, update, pieces
        self._dtype = dtype
        self._num_bytes = (sum(layout.num_sent) + sum(layout.num_received)) * dtype.itemsize
        self._out: Tensor
        self._in: Tensor
        self._work: dist.Work

    def gather_(self) -> None:
        """Allocate the buffers and send the map inputs of the fragments here to their owners."""
        exchange, layout = self._exchange, self._layout
        self._out = torch.empty(sum(layout.num_sent), dtype=self._dtype, device=exchange.device)
        self._in = torch.empty(sum(layout.num_received), dtype=self._dtype, device=exchange.device)
        exchange.bytes_sent += self._num_bytes  # in gather and scatter together: received elements are sent back
        exchange.buffer_bytes += self._num_bytes
        exchange.peak_bytes = max(exchange.peak_bytes, exchange.buffer_bytes)
        for index, fragment, offset in layout.outgoing:
            map_input = self._update.map_input(self._pieces[index]).reshape(-1)
            self._out[offset : offset + fragment.numel].copy_(staged(map_input, exchange.device))
        self._work = self._all_to_all(self._in, self._out, layout.num_received, layout.num_sent)

    def map_and_scatter_(self) -> None:
        """Map the matrices owned here and send the outputs to the fragments."""
        self._work.wait()
        owned, device = self._layout.matrices, self._exchange.device
        wholes = [Whole((m.shape[0], m.shape[1]), self._dtype, device, m.storage) for m in owned]
        self._update.map_(wholes, [m.name for m in owned], self._assemble, self._split)
        self._work = self._all_to_all(self._out, self._in, self._layout.num_sent, self._layout.num_received)

    def add_outputs_(self) -> None:
        """Add the outputs that have arrived to the weights of the fragments here, and free the buffers."""
        self._work.wait()
        for index, fragment, offset in self._layout.outgoing:
            self._update.add_output_(self._pieces[index], self._out[offset : offset + fragment.numel])
        self._exchange.buffer_bytes -= self._num_bytes
        del self._out, self._in, self._work  # which holds the buffers too

    def _assemble(self, number: int) -> Tensor:
        index, shape = self._layout.owned[number], self._layout.matrices[number].shape
        matrix = torch.empty(self._layout.matrices[number].numel, dtype=self._dtype, device=self._exchange.device)
        if index in self._pieces:
            here = self._layout.fragments_here[index]
            map_input = self._update.map_input(self._pieces[index]).reshape(-1)
            matrix[here.param_offset : here.param_offset + here.numel].copy_(staged(map_input, matrix.device))
        for fragment, offset in self._layout.incoming[index]:
            target = slice(fragment.param_offset, fragment.param_offset + fragment.numel)
            matrix[target].copy_(self._in[offset : offset + fragment.numel])
        return matrix.view(shape)

    def _split(self, number: int, output: Tensor) -> None:
        index, flat = self._layout.owned[number], output.reshape(-1)
        if index in self._pieces:
            here = self._layout.fragments_here[index]
            self._update.add_output_(self._pieces[index], flat[here.param_offset : here.param_offset + here.numel])
        for fragment, offset in self._layout.incoming[index]:
            segment = flat[fragment.param_offset : fragment.param_offset + fragment.numel]
            self._in[offset : offset + fragment.numel].copy_(segment)

    def _all_to_all(self, into: Tensor, from_: Tensor, num_into: list[int], num_from: list[int]) -> dist.Work:
        group = self._exchange.process_group
        return dist.all_to_all_single(into, from_, num_into, num_from, group=group, async_op=True)  # type: ignore
