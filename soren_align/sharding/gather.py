"""Gather sharded matrices on their owner ranks, and scatter the outputs (ZeRO, FSDP2).

    gather(i + 1)  |  map(i)  |  scatter(i - 1)

Momentum stays where its shard is; only N is sent: each bucket is one all-to-all of N to the owners,
and one of O back. Only the plan decides what is communicated: every rank takes part in every
bucket, even if it has nothing to send. The plan is made at the first step, from the tensors that
step, since launchers replace a model's parameters late.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim.exchange import (
    Batch,
    Exchange,
    MapRequest,
    Shard,
    ShardingStrategy,
    WeightKind,
    batch_of,
    matrix_batches,
    staged,
    whole_batches,
    with_map_state,
)
from ..optim.layout import LINEAR, MapState, Named, WeightLayouts, map_state_sizes, share_of_state
from ..optim.state import map_dtype
from .collectives import all_reduce, all_to_all
from .layout import Layout, RankShard, split_weights
from .plan import BUCKET_MB, ExchangePlan, make_exchange_plan

# Plans are cached per subset of a model's matrices that step together: one, unless some have no
# gradient at times, or ZeRO 3 steps sub-group by sub-group. A plan beyond this number is made again
# when it is needed, for one all-reduce.
MAX_PLANS = 256


class RankStrategy(ShardingStrategy, ABC):
    """The strategy of the ranks of a process group: checks that they agree, and plans.

    bucket_mb: MB (2^20 bytes) that a rank sends and receives in a bucket, one way; see
    `plan.BUCKET_MB`.
    """

    def __init__(self, bucket_mb: float = BUCKET_MB):
        self.bucket_mb, self.max_plans = bucket_mb, MAX_PLANS
        # By the identities of the tensors that step together, the last used last. An exchange has
        # the tensors, so that no other tensor gets such an identity.
        self.exchanges: dict[tuple[int, ...], RankExchange] = {}

    @abstractmethod
    def has_layout(self, parameter: Tensor) -> bool:
        """Whether the layout of the matrices in `parameter` is known."""

    @abstractmethod
    def layout(self, named: Named) -> Layout:
        """The parameters in these tensors of one spectral group."""

    @abstractmethod
    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """The ranks that share the tensors, and the device for communication and maps."""

    def shards(self, named: Named, layouts: WeightLayouts) -> list[Shard]:
        """This rank's shards of the weights in these tensors, without their state."""
        layout = split_weights(self.layout(named), layouts)
        return shards_on(
            dist.get_rank(self.ranks()[0]), layout, [parameter for _, parameter in named], {}
        )

    def check_gradients(
        self, named: Named, error: Exception | None, squares: Tensor, *others: Tensor
    ) -> list[float]:
        """The sums of `squares` over the ranks and this rank's `others`, by one host read.
        Collective.

        Raises on every rank if `error` is set on any rank, or if the ranks lack different
        gradients: otherwise one rank would raise, and the others would wait for it in the next
        collective.
        """
        # One all-reduce for three questions: is there an error, has every rank the same gradients,
        # and how large are they all together?
        counts = [
            error is not None,
            isinstance(error, ValueError),
            *(p.grad is not None for _, p in named),
        ]
        group, device = self.ranks()
        here = torch.tensor(counts, dtype=torch.float64, device=device)
        sums = torch.cat([here, squares.to(device)])
        all_reduce(sums, group)
        num_errors, num_value_errors, *numbers = torch.cat(
            [sums, *(t.to(device) for t in others)]
        ).tolist()
        if error is not None:
            raise error
        # The others raise the same class as the rank with the error: a training turns a
        # FloatingPointError, of a NaN, into DivergedError on every rank, and leaves a ValueError as
        # it is.
        if num_errors:
            raise (ValueError if num_value_errors else FloatingPointError)(
                "another rank has an invalid gradient or map, so no rank applied this optimizer "
                "step; the message of that rank names the parameter"
            )
        # A parameter that only some ranks used has no gradient on the others: the ranks would plan
        # different exchanges, and wait for one another in them.
        nums, num_ranks = numbers[: len(named)], dist.get_world_size(group)
        uneven = [
            name for (name, _), num in zip(named, nums, strict=True) if num not in (0, num_ranks)
        ]
        if uneven:
            raise ValueError(
                f"{', '.join(uneven[:5])}: only some ranks have a gradient, so no rank applied "
                "this optimizer step; use this parameter in the forward pass of all ranks, or of "
                "no rank"
            )
        return numbers[len(named) :]

    def plan(self, named: Named, layouts: WeightLayouts, map_state: MapState) -> "RankExchange":
        """The exchange of one spectral group's tensors, planned unless it is already. Collective.

        Raises ValueError, on every rank, if a rank cannot plan it or has another plan than the
        others.
        """
        # Planned once per set of tensors that step together; a plan costs a collective.
        tensors = [parameter for _, parameter in named]
        key = tuple(map(id, tensors))
        if exchange := self.exchanges.pop(key, None):
            self.exchanges[key] = exchange
            return exchange
        # A rank that cannot plan still takes part in the comparison below: otherwise the others
        # would wait for it in their first all-to-all.
        plan = problem = None
        dtypes = {map_dtype(parameter) for _, parameter in named}
        try:
            if len(dtypes) > 1:
                listed = ", ".join(sorted(map(str, dtypes)))
                raise ValueError(
                    f"the matrices of one parameter group have the dtypes {listed}; use one dtype "
                    "per group"
                )
            itemsize = next(iter(dtypes), torch.float32).itemsize
            plan = make_exchange_plan(
                split_weights(self.layout(named), layouts), self.bucket_mb, itemsize
            )
        except ValueError as error:
            problem = error
        group, device = self.ranks()
        # One all-reduce by maximum compares the plans of all ranks: that of the numbers and that of
        # their negatives agree only if all numbers are equal. A fingerprint has 63 bits, so that
        # its negative is an int64 too.
        number = 0 if plan is None else plan.fingerprint
        maxima = torch.tensor([int(plan is None), number, -number], device=device)
        all_reduce(maxima, group, dist.ReduceOp.MAX)
        failed, largest, minus_smallest = maxima.tolist()
        if problem is not None:
            raise problem
        if failed:
            raise ValueError(
                "the optimizer step failed on another rank before any weight changed; the error "
                "message of that rank has the cause"
            )
        if largest != -minus_smallest:
            raise ValueError(
                "the matrices or their shards differ between the ranks; load the same model on all "
                "ranks"
            )
        assert plan is not None
        # Kept only when all ranks have agreed, so that a later step finds it in the cache of every
        # rank or of none: a rank that plans anew alone would wait in the all-reduce above.
        self.exchanges[key] = exchange = self.exchange(plan, tensors, group, device, map_state)
        # The oldest plans go, the same ones on all ranks, which step in one order.
        while len(self.exchanges) > self.max_plans:
            del self.exchanges[next(iter(self.exchanges))]
        return exchange

    def exchange(self, *arguments: Any) -> "RankExchange":
        """The exchange that carries out a plan."""
        return RankExchange(*arguments)


def shards_on(
    rank: int, layout: Layout, tensors: Sequence[Tensor], state: Mapping[Tensor, dict[str, Tensor]]
) -> list[Shard]:
    """The shards of a layout on one rank, in the order of its weights; none has two there."""
    here = ((w, tensors[w.tensor], s) for w in layout.weights for s in w.shards if s.rank == rank)
    return [
        Shard(
            w.name,
            (w.shape[0], w.shape[1]),
            w.layout,
            tensor,
            s.start,
            s.offset,
            s.numel,
            state.get(tensor, {}),
        )
        for w, tensor, s in here
    ]


class RankExchange(Exchange):
    """Carries out `plan` between the ranks of `process_group`; collectives and maps run on
    `device`.

    tensors: of this rank, to which the layout refers by number. bytes_sent: to other ranks, by all
    steps. peak_bytes: the largest sum of the sizes of the buckets' buffers, at most 3 times the
    plan's limit for a bucket.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        tensors: Sequence[Tensor],
        process_group: dist.ProcessGroup,
        device: torch.device,
        map_state: MapState,
    ):
        self.plan, self.tensors, self.process_group, self.device = (
            plan,
            tensors,
            process_group,
            device,
        )
        self.rank, self.map_state = dist.get_rank(process_group), map_state
        self.bytes_sent = self.peak_bytes = self.buffer_bytes = 0
        weights = enumerate(plan.layout.weights)
        # Each weight has at most one shard per rank, so that weights here and shards here are
        # parallel lists.
        self.indices = [
            i for i, weight in weights for shard in weight.shards if shard.rank == self.rank
        ]

    def shards(self, state: Mapping[Tensor, dict[str, Tensor]]) -> Sequence[Shard]:
        """This rank's shards, with the state of their tensors."""
        return with_map_state(
            shards_on(self.rank, self.plan.layout, self.tensors, state), self.map_state
        )

    def whole_matrices(self, shards: Sequence[Shard], request: MapRequest) -> Iterator[Batch]:
        """Gather the weights bucket by bucket, each on its owner rank; see its base. Collective."""
        # Buckets allocate nothing before `gather`; all of them are described first, since the plan
        # alone decides how many there are, on a rank with work and on one without.
        here = dict(zip(self.indices, shards, strict=True))
        buckets = [_Bucket(self, indices, here, request) for indices in self.plan.buckets]
        # The first bucket is gathered while the matrices that need no communication are mapped.
        if buckets:
            buckets[0].gather()
        local = [here[i] for i in self.plan.local if self.plan.owners[i] == self.rank and i in here]
        yield from whole_batches(local, request, self.device)
        # Bucket i is mapped between the gather of i + 1 and the arrival of i - 1, so that a rank
        # waits only if a message takes longer than a bucket's maps. Three buckets exist at once.
        for number, current in enumerate(buckets):
            if number + 1 < len(buckets):
                buckets[number + 1].gather()
            yield from current.batches()
            if number > 0:
                yield Batch(torch.empty(0), LINEAR, [], buckets[number - 1].arrived)
        if buckets:
            yield Batch(torch.empty(0), LINEAR, [], buckets[-1].arrived)

    def states_of(self, index: int) -> dict[str, int]:
        """The numbers of the map's state for all matrices of a weight, by name."""
        weight = self.plan.layout.weights[index]
        return map_state_sizes(weight.shape, weight.layout, self.map_state)


@dataclass(frozen=True)
class _Place:
    """The place of some numbers in their weight, or in its map state, and in a buffer."""

    # Two slices of one length: a message is copied from the one to the other on both of its ways.
    whole: slice
    buffer: slice


@dataclass(frozen=True)
class _Message:
    """A shard's numbers between its rank and the owner: its elements, behind them its map state."""

    index: int
    """The weight's number in the layout."""
    shard: Shard | RankShard
    """A `Shard` if it lies here."""
    elements: _Place
    states: dict[str, _Place]


def _message(exchange: RankExchange, index: int, shard: Shard | RankShard, start: int) -> _Message:
    """The message of a shard that begins at `start` of a buffer."""
    shape = exchange.plan.layout.weights[index].shape
    end = start + shard.numel
    elements = _Place(slice(shard.offset, shard.offset + shard.numel), slice(start, end))
    states: dict[str, _Place] = {}
    # A number per row lies with the row's first element: a shard that begins within a row has none
    # of it, and sends none.
    for key, size in exchange.states_of(index).items():
        first, last = share_of_state(shape, shard.offset, shard.numel, size)
        states[key] = _Place(slice(first, last), slice(end, end + last - first))
        end += last - first
    return _Message(index, shard, elements, states)


class _Direction:
    """The messages one way, in the order of their buffer: by the other rank, and between two ranks
    in that of the plan, so that both ranks know the places of all.

    members: (the other rank, index of the weight, shard). numels: the buffer's numbers by rank.
    """

    def __init__(
        self, exchange: RankExchange, members: Sequence[tuple[int, int, Shard | RankShard]]
    ):
        self.numels = [0] * exchange.plan.layout.num_ranks
        self.messages: list[_Message] = []
        end = 0
        # all_to_all_single takes one buffer, ordered by rank. Python's sort is stable, so that the
        # messages between two ranks keep the order of the plan, by which the receiver finds them:
        # no header is sent.
        for rank, index, shard in sorted(members, key=lambda member: member[0]):
            message = _message(exchange, index, shard, end)
            start, end = (
                end,
                max(p.buffer.stop for p in (message.elements, *message.states.values())),
            )
            self.numels[rank] += end - start
            self.messages.append(message)


class _Bucket:
    """The weights of one bucket on this rank: gather, then batches, then arrived.

    Both buffers are used twice: outputs are sent to where the map inputs came from. With `adapt`
    all parts of outputs are returned on arrival, when the squares of all ranks can be added.
    """

    def __init__(
        self,
        exchange: RankExchange,
        indices: Sequence[int],
        here: Mapping[int, Shard],
        request: MapRequest,
    ):
        self.exchange, self.indices = exchange, indices
        self.here, self.request = here, request
        plan, rank = exchange.plan, exchange.rank
        # What this rank sends and what it receives follow from the plan alone, so that the sizes of
        # all messages are known on both sides without a word between the ranks.
        self.owned = [i for i in indices if plan.owners[i] == rank]
        self.sent = _Direction(
            exchange,
            [(plan.owners[i], i, here[i]) for i in indices if plan.owners[i] != rank and i in here],
        )
        self.received = _Direction(
            exchange,
            [
                (shard.rank, i, shard)
                for i in self.owned
                for shard in plan.layout.weights[i].shards
                if shard.rank != rank
            ],
        )
        self.incoming: dict[int, list[_Message]] = {i: [] for i in self.owned}
        for message in self.received.messages:
            self.incoming[message.index].append(message)
        self.dtype = map_dtype(exchange.tensors[0])
        self.num_bytes = sum(self.sent.numels + self.received.numels) * self.dtype.itemsize
        self.adapted: list[tuple[int, Shard, Tensor]] = []

    def gather(self) -> None:
        """Allocate the buffers and send the map inputs of the shards here to their owners."""
        exchange = self.exchange
        # Allocated here and not in __init__, so that the buffers of at most three buckets exist at
        # once. empty, not zeros: every number is written before it is read.
        self._out, self._in = (
            torch.empty(sum(way.numels), dtype=self.dtype, device=exchange.device)
            for way in (self.sent, self.received)
        )
        # In gather and scatter together, since received elements are sent back.
        exchange.bytes_sent += self.num_bytes
        exchange.buffer_bytes += self.num_bytes
        exchange.peak_bytes = max(exchange.peak_bytes, exchange.buffer_bytes)
        for message in self.sent.messages:
            shard = message.shard
            assert isinstance(shard, Shard)
            self._out[message.elements.buffer].copy_(self._map_input(shard))
            for key, place in message.states.items():
                self._out[place.buffer].copy_(self._state(shard, key))
        numels = self.received.numels, self.sent.numels
        self._work = all_to_all(self._in, self._out, *numels, exchange.process_group)

    def batches(self) -> Iterator[Batch]:
        """The weights owned here; outputs for shards on other ranks are written to the buffer, the
        others returned.

        The caller asks for the next batch when it has returned the last one. After all of them the
        outputs are sent.
        """
        # Its gather was started before the last bucket was mapped, so that it has usually arrived.
        self._work.wait()
        weights = [self.exchange.plan.layout.weights[i] for i in self.owned]
        kinds: list[WeightKind] = [
            ((w.shape[0], w.shape[1]), w.layout, self.dtype, self.exchange.device) for w in weights
        ]
        # Maps of equal weights in batches. Their inputs are put together from the buffer and from
        # the shard that lies here, which is never sent.
        for numbers in matrix_batches(kinds, self.request.workspace_mb):
            indices = [self.owned[number] for number in numbers]
            keys = self.exchange.states_of(indices[0])
            states = {key: [self._whole_state(i, key) for i in indices] for key in keys}
            # One at a time: `batch_of` copies each into its batch.
            inputs = (self._whole_input(i).view(self._shape(i)) for i in indices)

            def pairs(
                outputs: Sequence[Tensor], indices=indices, states=states
            ) -> Iterator[tuple[Shard, Tensor]]:
                for number, (index, output) in enumerate(zip(indices, outputs, strict=True)):
                    of_weight = {key: values[number] for key, values in states.items()}
                    yield from self._divide(index, output.reshape(-1), of_weight)

            members = [weights[number] for number in numbers]
            yield batch_of(kinds[numbers[0]], members, inputs, states, pairs)
        # Scatter: the all-to-all of `gather` with the directions exchanged, through the same
        # buffers. `_divide` has written each output over the input that it came from.
        numels = self.sent.numels, self.received.numels
        self._work = all_to_all(self._out, self._in, *numels, self.exchange.process_group)

    def arrived(self, _: Any) -> Iterator[tuple[Shard, Tensor]]:
        """The outputs that other ranks have sent, which a batch without matrices returns; frees the
        buffers.
        """
        self._work.wait()
        for message in self.sent.messages:
            shard = message.shard
            assert isinstance(shard, Shard)
            for key, place in message.states.items():
                shard.numbers_of(key).copy_(self._out[place.buffer])
            yield from self._adapted(message.index, shard, self._out[message.elements.buffer])
        self.exchange.buffer_bytes -= self.num_bytes
        del self._out, self._in, self._work  # which holds the buffers too
        if self.request.adapt is not None:
            yield from self._with_squares()

    def _adapted(self, index: int, shard: Shard, part: Tensor) -> Iterator[tuple[Shard, Tensor]]:
        """A shard's part of an output; with `adapt` it is kept until all have arrived."""
        if self.request.adapt is None:
            yield shard, part
        else:
            # These outputs wait for the sums of their squares: `planning.step` counts them beside
            # the buffers.
            self.adapted.append((index, shard, self.request.adapt(shard, part)))

    def _with_squares(self) -> Iterator[tuple[Shard, Tensor]]:
        """The adapted parts; the squares of their shards become those of whole matrices.
        Collective.
        """
        exchange = self.exchange
        # The sizes for all weights of the bucket, alike on every rank.
        sizes = [2 * exchange.plan.layout.weights[i].num_matrices for i in self.indices]
        sums = torch.zeros(sum(sizes), dtype=torch.float64, device=exchange.device)
        by_index = dict(zip(self.indices, sums.split(sizes), strict=True))
        for index, shard, _ in self.adapted:
            assert shard.squares is not None
            by_index[index] += shard.squares.view(-1).to(sums.device)
        # One all-reduce per bucket: the squares of a matrix are complete when all its shards have
        # added theirs.
        all_reduce(sums, exchange.process_group)
        exchange.bytes_sent += sums.nbytes
        for index, shard, part in self.adapted:
            shard.squares = by_index[index].view(2, -1)
            yield shard, part

    def _shape(self, index: int) -> tuple[int, ...]:
        return self.exchange.plan.layout.weights[index].shape

    def _map_input(self, shard: Shard) -> Tensor:
        """The map input of a shard here, flat, on the device of the exchange."""
        return staged(self.request.map_input(shard).reshape(-1), self.exchange.device)

    def _state(self, shard: Shard, key: str) -> Tensor:
        return staged(shard.numbers_of(key), self.exchange.device)

    def _whole_input(self, index: int) -> Tensor:
        """The map input of a weight owned here, flat."""
        numel = math.prod(self._shape(index))
        # The shards of all ranks cover the weight without overlap
        # (tests/sharding/test_geometry.py), so that nothing of `empty` remains.
        whole = torch.empty(numel, dtype=self.dtype, device=self.exchange.device)
        if index in self.here:
            shard = self.here[index]
            whole[shard.offset : shard.offset + shard.numel].copy_(self._map_input(shard))
        for message in self.incoming[index]:
            whole[message.elements.whole].copy_(self._in[message.elements.buffer])
        return whole

    def _whole_state(self, index: int, key: str) -> Tensor:
        """The map state `key` of a weight owned here, flat."""
        size = self.exchange.states_of(index)[key]
        whole = torch.empty(size, dtype=self.dtype, device=self.exchange.device)
        if index in self.here:
            place = _message(self.exchange, index, self.here[index], 0).states[key]
            whole[place.whole].copy_(self._state(self.here[index], key))
        for message in self.incoming[index]:
            place = message.states[key]
            whole[place.whole].copy_(self._in[place.buffer])
        return whole

    def _divide(
        self, index: int, output: Tensor, states: Mapping[str, Tensor]
    ) -> Iterator[tuple[Shard, Tensor]]:
        """Write a weight's output and map states to the buffer; yield the part of the shard that
        lies here.
        """
        for message in self.incoming[index]:
            self._in[message.elements.buffer].copy_(output[message.elements.whole])
            for key, place in message.states.items():
                self._in[place.buffer].copy_(states[key][place.whole])
        if index in self.here:
            shard = self.here[index]
            own = _message(self.exchange, index, shard, 0)
            for key, place in own.states.items():
                shard.numbers_of(key).copy_(states[key][place.whole])
            yield from self._adapted(index, shard, output[own.elements.whole])
