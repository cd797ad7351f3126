"""The base of the placements: checks that all ranks agree, plans the exchange, and carries out the step.

The plan is made at the first step, from the tensors that step, since launchers replace a model's parameters late.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim import GroupUpdate, Segment, SharedBlocks, momentum_dtype
from ..optim.storage import Storages
from .exchange import Exchange
from .exchange_plan import ROUND_MB, ExchangePlan, make_exchange_plan
from .geometry import Layout, slabs
from .replica_exchange import ReplicaExchange

Named = Sequence[tuple[str, Tensor]]

# Plans are kept per subset of a model's matrices that step together: one, unless some have no gradient at times, or
# ZeRO 3 steps sub-group by sub-group. A plan beyond this number is made again when it is needed, for one all-reduce.
MAX_PLANS = 256


class RankPlacement(ABC):
    """A `soren_align.optim.Placement` over the ranks of a process group.

    round_mb: MB (2^20 bytes) that a rank sends and receives in a round, one way; see `exchange_plan.ROUND_MB`.
    """

    def __init__(self, round_mb: float = ROUND_MB):
        self.round_mb, self.max_plans = round_mb, MAX_PLANS
        # By the identities of the tensors that step together, the last used last. The tensors are kept too, so that no
        # other tensor gets such an identity.
        self.exchanges: dict[tuple[int, ...], Exchange | ReplicaExchange] = {}
        self._tensors: dict[tuple[int, ...], list[Tensor]] = {}

    @abstractmethod
    def has_layout(self, parameter: Tensor) -> bool:
        """Whether the layout of the matrices in `parameter` is known."""

    @abstractmethod
    def layout(self, named: Named) -> Layout:
        """The parameters in these tensors of one spectral group."""

    @abstractmethod
    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """The ranks that share the tensors, and the device for communication and maps."""

    def segments(self, parameter: Tensor) -> Sequence[Segment] | None:
        """The parameters' segments in a flat shard; None: it is one parameter."""
        return None

    def shared_blocks(self, named: Named) -> SharedBlocks | None:
        """The blocks of these tensors' 8-bit states that lie on several ranks; None: there are none."""
        return None

    def check_gradients(self, named: Named, error: Exception | None, squares: Tensor) -> tuple[float, ...]:
        """The sums of `squares` over the ranks, by one host read. Collective.

        Raises on every rank if `error` is set on any rank, or if the ranks lack different gradients: otherwise one rank
        would raise, and the others would wait for it in the next collective.
        """
        counts = [error is not None, isinstance(error, ValueError), *(p.grad is not None for _, p in named)]
        group, device = self.ranks()
        here = torch.tensor(counts, dtype=torch.float64, device=device)
        sums = torch.cat([here, squares.to(device)])
        dist.all_reduce(sums, group=group)
        num_errors, num_value_errors, *rest = sums.tolist()
        if error is not None:
            raise error
        if num_errors:
            raise (ValueError if num_value_errors else FloatingPointError)(
                "another rank has a gradient that cannot be used, and names it; nothing was changed by this step"
            )
        nums, num_ranks = rest[: len(named)], dist.get_world_size(group)
        uneven = [name for (name, _), num in zip(named, nums, strict=True) if num not in (0, num_ranks)]
        if uneven:
            raise ValueError(
                f"{', '.join(uneven[:5])}: a gradient on some ranks and none on others; nothing was changed"
            )
        return tuple(rest[len(named) :])

    def prepare(self, named: Named, storages: Storages) -> None:
        """Plan a step of one spectral group's tensors, unless it is planned already. Collective.

        Raises ValueError, on every rank, if a rank cannot plan it or has another plan than the others.
        """
        if not named:  # a launcher has emptied the group, on all ranks
            return
        key = _key(named)
        self.exchanges[key] = self.exchanges.pop(key, None) or self._exchange(named, storages)
        self._tensors[key] = [parameter for _, parameter in named]
        while len(self.exchanges) > self.max_plans:  # the same on all ranks, which step in one order
            oldest = next(iter(self.exchanges))
            del self.exchanges[oldest], self._tensors[oldest]

    def step_(self, update: GroupUpdate, named: Named) -> None:
        """One step of one spectral group's tensors; every matrix is mapped once, on its owner rank. Collective."""
        if not named:
            return
        self.prepare(named, update.storages)  # again: other groups may have displaced it
        update.update_momenta_(named)
        if update.shared_blocks is not None:
            update.shared_blocks.encode_()
        self.exchanges[_key(named)].run_(update, [parameter for _, parameter in named])

    def _exchange(self, named: Named, storages: Storages) -> Exchange | ReplicaExchange:
        plan = problem = None
        try:
            plan = self._plan(named, storages)
        except ValueError as error:
            problem = error
        group, device = self.ranks()
        _refuse_different_plans(None if plan is None else plan.fingerprint, group, device, problem)
        assert plan is not None
        return (ReplicaExchange if plan.layout.replicated else Exchange)(plan, group, device)

    def _plan(self, named: Named, storages: Storages) -> ExchangePlan:
        dtypes = {momentum_dtype(parameter) for _, parameter in named}
        if len(dtypes) > 1:
            raise ValueError(
                f"matrices of one group must share a dtype to be sent together; found {sorted(map(str, dtypes))}"
            )
        return make_exchange_plan(slabs(self.layout(named), storages), self.round_mb, dtypes.pop().itemsize)


def _key(named: Named) -> tuple[int, ...]:
    return tuple(id(parameter) for _, parameter in named)


def _refuse_different_plans(
    fingerprint: int | None, group: dist.ProcessGroup, device: torch.device, problem: Exception | None
) -> None:
    """Raise ValueError, on every rank, unless all fingerprints are equal. Collective.

    problem: the reason why this rank has no fingerprint.
    """
    number = 0 if fingerprint is None else fingerprint
    maxima = torch.tensor([int(fingerprint is None), number, -number], device=device)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    failed, largest, minus_smallest = maxima.tolist()
    if problem is not None:
        raise problem
    if failed:
        raise ValueError("another rank cannot plan this step, and names the reason; nothing was changed by it")
    if largest != -minus_smallest:
        raise ValueError("the ranks found different matrices or shards; do all of them load the same model?")
