"""A plan carried out on one rank: every matrix to its owner, its output back, in rounds, while others are mapped.

    gather(i + 1)  |  map(i)  |  return(i - 1)

Only the plan decides what is communicated: a rank with nothing to send takes part in every round all the same.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim import GroupStep, Piece, Whole, momentum_dtype
from .geometry import Fragment
from .step_plan import Plan


class Exchange:
    """Carries out `plan` between the ranks of `process_group`; collectives and maps happen on `device`.

    bytes_sent: to other ranks, by all calls so far. peak_bytes: the most that the buffers of rounds held at once, at
    most 3 times what the plan grants a round.
    """

    def __init__(self, plan: Plan, process_group: dist.ProcessGroup, device: torch.device):
        self.plan, self.process_group, self.device = plan, process_group, device
        self.rank = dist.get_rank(process_group)
        self.bytes_sent = self.peak_bytes = self.held_bytes = 0
        self._here = {
            i: f for i, matrix in enumerate(plan.layout.matrices) for f in matrix.fragments if f.rank == self.rank
        }
        self._routes = [_Route(plan, indices, self.rank) for indices in plan.rounds]

    def run_(self, step: GroupStep, parameters: Sequence[Tensor]) -> None:
        """One step of `parameters`, the tensors that the layout numbers."""
        pieces = {}
        for index, fragment in self._here.items():
            name, shape, _, tensor = self.plan.layout.matrices[index]
            pieces[index] = Piece(name, shape, parameters[tensor], fragment.local_offset, fragment.numel)
        dtype = momentum_dtype(parameters[0])
        rounds = (_Round(self, route, step, pieces, dtype) for route in self._routes)
        coming, returning = next(rounds, None), None  # next() begins a round
        at_home = (i for i in self.plan.at_home if self.plan.owners[i] == self.rank and i in pieces)
        step.take_([pieces[i] for i in at_home], self.device)
        while coming is not None:
            present, coming = coming, next(rounds, None)
            present.map_()
            if returning is not None:
                returning.finish_()
            returning = present
        if returning is not None:
            returning.finish_()


class _Route:
    """Which stretches of a round's buffers belong to which fragments, on one rank; on the way back they are the same.

    outgoing: (matrix, its fragment here, offset in the buffer), by owner; incoming: for each matrix owned here, its
    fragments elsewhere with their offsets in the buffer, which is ordered by rank. Within a pair of ranks the order is
    the plan's.
    """

    def __init__(self, plan: Plan, indices: Sequence[int], rank: int):
        matrices, owners = plan.layout.matrices, plan.owners
        self.mine = [i for i in indices if owners[i] == rank]
        self.shapes = [matrices[i].shape for i in self.mine]
        self.fragment_here = {i: f for i in indices for f in matrices[i].fragments if f.rank == rank}
        self.sent, self.received = [0] * plan.layout.num_ranks, [0] * plan.layout.num_ranks

        leaving = [(owners[i], i) for i in indices if owners[i] != rank and i in self.fragment_here]
        self.outgoing: list[tuple[int, Fragment, int]] = []
        for owner, index in sorted(leaving, key=lambda pair: pair[0]):
            fragment = self.fragment_here[index]
            self.outgoing.append((index, fragment, sum(self.sent)))
            self.sent[owner] += fragment.numel

        arriving = [(f.rank, i, f) for i in self.mine for f in matrices[i].fragments if f.rank != rank]
        self.incoming: dict[int, list[tuple[Fragment, int]]] = {i: [] for i in self.mine}
        total = 0
        for source, index, fragment in sorted(arriving, key=lambda triple: triple[0]):
            self.incoming[index].append((fragment, total))
            self.received[source] += fragment.numel
            total += fragment.numel


class _Round:
    """One round under way: begun by sending the averaged fragments to their owners."""

    def __init__(
        self, exchange: Exchange, route: _Route, step: GroupStep, pieces: dict[int, Piece], dtype: torch.dtype
    ):
        self._exchange, self._route, self._step, self._pieces, self._dtype = exchange, route, step, pieces, dtype
        num_sent, num_received = sum(route.sent), sum(route.received)
        self._out = torch.empty(num_sent, dtype=dtype, device=exchange.device)
        self._in = torch.empty(num_received, dtype=dtype, device=exchange.device)
        self._bytes = (num_sent + num_received) * dtype.itemsize
        exchange.bytes_sent += self._bytes  # there and back: what came in goes out again
        exchange.held_bytes += self._bytes
        exchange.peak_bytes = max(exchange.peak_bytes, exchange.held_bytes)
        for index, fragment, offset in route.outgoing:
            averaged = step.averaged(pieces[index]).reshape(-1)
            self._out[offset : offset + fragment.numel].copy_(averaged)
        self._work = self._send(self._in, self._out, route.received, route.sent)

    def map_(self) -> None:
        """Map the matrices owned here, and send the outputs on their way."""
        self._work.wait()
        kinds = [Whole(shape, self._dtype, self._exchange.device) for shape in self._route.shapes]
        self._step.map_(kinds, self._assemble, self._take_apart)
        self._work = self._send(self._out, self._in, self._route.sent, self._route.received)

    def finish_(self) -> None:
        """Take the steps of the fragments whose outputs have come back."""
        self._work.wait()
        for index, fragment, offset in self._route.outgoing:
            self._step.apply_(self._pieces[index], self._out[offset : offset + fragment.numel])
        self._exchange.held_bytes -= self._bytes
        del self._out, self._in

    def _assemble(self, number: int) -> Tensor:
        index, (num_rows, num_columns) = self._route.mine[number], self._route.shapes[number]
        matrix = torch.empty(num_rows * num_columns, dtype=self._dtype, device=self._exchange.device)
        if index in self._pieces:
            here = self._route.fragment_here[index]
            own = self._step.averaged(self._pieces[index]).reshape(-1)
            matrix[here.param_offset : here.param_offset + here.numel].copy_(own)
        for fragment, offset in self._route.incoming[index]:
            there = slice(fragment.param_offset, fragment.param_offset + fragment.numel)
            matrix[there].copy_(self._in[offset : offset + fragment.numel])
        return matrix.view(num_rows, num_columns)

    def _take_apart(self, number: int, output: Tensor) -> None:
        index, flat = self._route.mine[number], output.reshape(-1)
        if index in self._pieces:
            here = self._route.fragment_here[index]
            self._step.apply_(self._pieces[index], flat[here.param_offset : here.param_offset + here.numel])
        for fragment, offset in self._route.incoming[index]:
            stretch = flat[fragment.param_offset : fragment.param_offset + fragment.numel]
            self._in[offset : offset + fragment.numel].copy_(stretch)

    def _send(self, into: Tensor, from_: Tensor, num_into: list[int], num_from: list[int]) -> dist.Work:
        group = self._exchange.process_group
        return dist.all_to_all_single(into, from_, num_into, num_from, group=group, async_op=True)  # type: ignore
