"""Gather sharded matrices on their owner ranks, and scatter the outputs (ZeRO, FSDP2).

    gather(i + 1)  |  map(i)  |  scatter(i - 1)

Momentum stays where its shard is; only N is sent: each bucket is one all-to-all of N to the owners,
and one of O back. Only the plan decides what is communicated: every rank takes part in every
bucket, even if it has nothing to send. The plan is made at the first step, from the tensors that
step, since launchers replace a model's parameters late.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim.layout import (
    Batch,
    Exchange,
    MapRequest,
    MapState,
    Named,
    Shard,
    ShardingStrategy,
    WeightKind,
    WeightLayouts,
    batch_of,
    map_state_sizes,
    matrix_batches,
    share_of_state,
    staged,
    whole_batches,
    with_map_state,
)
from ..optim.state import map_dtype
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
        counts = [
            error is not None,
            isinstance(error, ValueError),
            *(p.grad is not None for _, p in named),
        ]
        group, device = self.ranks()
        here = torch.tensor(counts, dtype=torch.float64, device=device)
        sums = torch.cat([here, squares.to(device)])
        dist.all_reduce(sums, group=group)
        num_errors, num_value_errors, *numbers = torch.cat(
            [sums, *(t.to(device) for t in others)]
        ).tolist()
        if error is not None:
            raise error
        if num_errors:
            raise (ValueError if num_value_errors else FloatingPointError)(
                "another rank has an invalid gradient or map, so no rank applied this optimizer step; the message of "
                "that rank names the parameter"
            )
        nums, num_ranks = numbers[: len(named)], dist.get_world_size(group)
        uneven = [
            name for (name, _), num in zip(named, nums, strict=True) if num not in (0, num_ranks)
        ]
        if uneven:
            raise ValueError(
                f"{', '.join(uneven[:5])}: only some ranks have a gradient, so no rank applied this optimizer "
                "step; use this parameter in the forward pass of all ranks, or of no rank"
            )
        return numbers[len(named) :]

    def plan(self, named: Named, layouts: WeightLayouts, map_state: MapState) -> "RankExchange":
        """The exchange of one spectral group's tensors, planned unless it is already. Collective.

        Raises ValueError, on every rank, if a rank cannot plan it or has another plan than the
        others.
        """
        tensors = [parameter for _, parameter in named]
        key = tuple(map(id, tensors))
        if exchange := self.exchanges.pop(key, None):
            self.exchanges[key] = exchange
            return exchange
        plan = problem = None
        dtypes = {map_dtype(parameter) for _, parameter in named}
        try:
            if len(dtypes) > 1:
                listed = ", ".join(sorted(map(str, dtypes)))
                raise ValueError(
                    f"the matrices of one parameter group have the dtypes {listed}; use one dtype per group"
                )
            itemsize = next(iter(dtypes), torch.float32).itemsize
            plan = make_exchange_plan(
                split_weights(self.layout(named), layouts), self.bucket_mb, itemsize
            )
        except ValueError as error:
            problem = error
        group, device = self.ranks()
        number = 0 if plan is None else plan.fingerprint
        maxima = torch.tensor([int(plan is None), number, -number], device=device)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        failed, largest, minus_smallest = maxima.tolist()
        if problem is not None:
            raise problem
        if failed:
            raise ValueError(
                "the optimizer step failed on another rank before any weight changed; the error message of that rank "
                "has the cause"
            )
        if largest != -minus_smallest:
            raise ValueError(
                "the matrices or their shards differ between the ranks; load the same model on all ranks"
            )
        assert plan is not None
        self.exchanges[key] = exchange = self.exchange(plan, tensors, group, device, map_state)
        # the same on all ranks, which step in one order
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
        here = dict(zip(self.indices, shards, strict=True))
        buckets = [_Bucket(self, indices, here, request) for indices in self.plan.buckets]
        if buckets:
            buckets[0].gather()
        local = [here[i] for i in self.plan.local if self.plan.owners[i] == self.rank and i in here]
        yield from whole_batches(local, request, self.device)
        for number, current in enumerate(buckets):
            if number + 1 < len(buckets):
                buckets[number + 1].gather()
            yield from current.batches()
            if number > 0:
                yield Batch(torch.empty(0), "linear", [], buckets[number - 1].arrived)
        if buckets:
            yield Batch(torch.empty(0), "linear", [], buckets[-1].arrived)


class _Bucket:
    """The weights of one bucket and their buffers on this rank: gather, then batches, then arrived.

    The buffers have the same order in both directions: outgoing shards by owner, incoming ones by
    rank, and between two ranks that of the plan. Behind each shard's elements lie its numbers of
    the map's state. With `adapt` all parts of outputs are returned on arrival, when the squares of
    all ranks can be added.
    """

    def __init__(
        self,
        exchange: RankExchange,
        indices: Sequence[int],
        here: Mapping[int, Shard],
        request: MapRequest,
    ):
        self.exchange, self.indices, self.here = exchange, indices, here
        self.request, self.adapt = request, request.adapt
        self.adapted: list[tuple[int, Shard, Tensor]] = []
        weights, owners, rank = exchange.plan.layout.weights, exchange.plan.owners, exchange.rank
        self.owned = [i for i in indices if owners[i] == rank]
        self.num_sent, self.num_received = ([0] * exchange.plan.layout.num_ranks for _ in range(2))
        self.outgoing: list[tuple[int, Shard, int]] = []  # with its place in the buffer
        for index in sorted(
            (i for i in indices if owners[i] != rank and i in here), key=lambda i: owners[i]
        ):
            place = sum(self.num_sent)
            self.outgoing.append((index, here[index], place))
            self.num_sent[owners[index]] += (
                self._places(index, here[index], place)[-1][-1].stop - place
            )
        self.incoming: dict[int, list[tuple[RankShard, int]]] = {i: [] for i in self.owned}
        arriving = [
            (i, shard) for i in self.owned for shard in weights[i].shards if shard.rank != rank
        ]
        for index, shard in sorted(arriving, key=lambda pair: pair[1].rank):
            place = sum(self.num_received)
            self.incoming[index].append((shard, place))
            self.num_received[shard.rank] += self._places(index, shard, place)[-1][-1].stop - place
        self.dtype = map_dtype(exchange.tensors[0])
        self.num_bytes = (sum(self.num_sent) + sum(self.num_received)) * self.dtype.itemsize

    def _places(
        self, index: int, shard: RankShard | Shard, place: int
    ) -> list[tuple[str, slice, slice]]:
        """("", a shard's interval of its weight, the same in a buffer from `place` on); then of
        each map state.
        """
        weight = self.exchange.plan.layout.weights[index]
        places = [
            ("", slice(shard.offset, shard.offset + shard.numel), slice(place, place + shard.numel))
        ]
        for key, size in map_state_sizes(
            weight.shape, weight.layout, self.exchange.map_state
        ).items():
            first, last = share_of_state(weight.shape, shard.offset, shard.numel, size)
            place = places[-1][-1].stop
            places.append((key, slice(first, last), slice(place, place + last - first)))
        return places

    def gather(self) -> None:
        """Allocate the buffers and send the map inputs of the shards here to their owners."""
        exchange = self.exchange
        self._out = torch.empty(sum(self.num_sent), dtype=self.dtype, device=exchange.device)
        self._in = torch.empty(sum(self.num_received), dtype=self.dtype, device=exchange.device)
        # in gather and scatter together: received elements are sent back
        exchange.bytes_sent += self.num_bytes
        exchange.buffer_bytes += self.num_bytes
        exchange.peak_bytes = max(exchange.peak_bytes, exchange.buffer_bytes)
        for index, shard, start in self.outgoing:
            for key, _, place in self._places(index, shard, start):
                self._out[place].copy_(self._values(shard, key))
        self._work = self._all_to_all(self._in, self._out, self.num_received, self.num_sent)

    def batches(self) -> Iterator[Batch]:
        """The weights owned here; outputs for shards on other ranks are written to the buffer, the
        others returned.

        The caller asks for the next batch when it has returned the last one. After all of them the
        outputs are sent.
        """
        self._work.wait()
        weights = [self.exchange.plan.layout.weights[i] for i in self.owned]
        kinds: list[WeightKind] = [
            ((w.shape[0], w.shape[1]), w.layout, self.dtype, self.exchange.device) for w in weights
        ]
        for numbers in matrix_batches(kinds, self.request.workspace_mb):
            indices = [self.owned[number] for number in numbers]
            sizes = map_state_sizes(*kinds[numbers[0]][:2], self.exchange.map_state)
            states = {key: [self._assembled(i, key) for i in indices] for key in sizes}
            inputs = (
                self._assembled(i, "").view(self.exchange.plan.layout.weights[i].shape)
                for i in indices
            )

            def pairs(
                outputs: Sequence[Tensor], indices=indices, states=states
            ) -> Iterator[tuple[Shard, Tensor]]:
                for number, (index, output) in enumerate(zip(indices, outputs, strict=True)):
                    whole = {"": output.reshape(-1)} | {k: v[number] for k, v in states.items()}
                    for shard, part in self._split(index, whole):
                        if self.adapt is None:
                            yield shard, part
                        else:
                            self.adapted.append((index, shard, self.adapt(shard, part)))

            yield batch_of(
                kinds[numbers[0]], [weights[number] for number in numbers], inputs, states, pairs
            )
        self._work = self._all_to_all(self._out, self._in, self.num_sent, self.num_received)

    def arrived(self, _: Any) -> Iterator[tuple[Shard, Tensor]]:
        """The outputs that other ranks have sent, which a batch without matrices returns; frees the
        buffers.
        """
        self._work.wait()
        for index, shard, start in self.outgoing:
            (_, _, elements), *of_state = self._places(index, shard, start)
            for key, _, place in of_state:
                shard.numbers_of(key).copy_(self._out[place])
            if self.adapt is None:
                yield shard, self._out[elements]
            else:
                self.adapted.append((index, shard, self.adapt(shard, self._out[elements])))
        self.exchange.buffer_bytes -= self.num_bytes
        del self._out, self._in, self._work  # which holds the buffers too
        if self.adapt is not None:
            # The squares of the shards here become those of their whole matrices. Collective.
            sizes = [2 * self.exchange.plan.layout.weights[i].num_matrices for i in self.indices]
            sums = torch.zeros(sum(sizes), dtype=torch.float64, device=self.exchange.device)
            by_index = dict(zip(self.indices, sums.split(sizes), strict=True))
            for index, shard, _ in self.adapted:
                assert shard.squares is not None
                by_index[index] += shard.squares.view(-1).to(sums.device)
            dist.all_reduce(sums, group=self.exchange.process_group)
            self.exchange.bytes_sent += sums.nbytes
            for index, shard, part in self.adapted:
                shard.squares = by_index[index].view(2, -1)
                yield shard, part

    def _values(self, shard: Shard, key: str) -> Tensor:
        """The map input of a shard here, or its numbers of a map state, flat and on the device of
        the exchange.
        """
        values = shard.numbers_of(key) if key else self.request.map_input(shard).reshape(-1)
        return staged(values, self.exchange.device)

    def _assembled(self, index: int, key: str) -> Tensor:
        """The whole map input of a weight owned here, or its map state `key`, flat."""
        weight = self.exchange.plan.layout.weights[index]
        sizes = map_state_sizes(weight.shape, weight.layout, self.exchange.map_state) | {
            "": weight.numel
        }
        whole = torch.empty(sizes[key], dtype=self.dtype, device=self.exchange.device)
        if index in self.here:
            shard = self.here[index]
            (target,) = (target for name, target, _ in self._places(index, shard, 0) if name == key)
            whole[target].copy_(self._values(shard, key))
        for shard, start in self.incoming[index]:
            for name, target, place in self._places(index, shard, start):
                if name == key:
                    whole[target].copy_(self._in[place])
        return whole

    def _split(self, index: int, whole: Mapping[str, Tensor]) -> Iterator[tuple[Shard, Tensor]]:
        """Write a weight's output and map states to the buffer; yield the part of the shard that
        lies here.
        """
        for shard, start in self.incoming[index]:
            for key, source, place in self._places(index, shard, start):
                self._in[place].copy_(whole[key][source])
        if index in self.here:
            shard = self.here[index]
            (_, elements, _), *of_state = self._places(index, shard, 0)
            for key, source, _ in of_state:
                shard.numbers_of(key).copy_(whole[key][source])
            yield shard, whole[""][elements]

    def _all_to_all(
        self, into: Tensor, from_: Tensor, num_into: list[int], num_from: list[int]
    ) -> dist.Work:
        group = self.exchange.process_group
        return dist.all_to_all_single(into, from_, num_into, num_from, group=group, async_op=True)  # type: ignore
