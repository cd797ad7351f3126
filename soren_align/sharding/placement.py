"""What an optimizer on one of several ranks asks: is this tensor known, do all ranks agree, carry out the step.

The plan is made at the first step, from the tensors that step, since launchers swap a model's parameters late.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim import GroupStep, momentum_dtype
from .exchange import Exchange
from .geometry import Layout
from .replicas import ReplicaExchange
from .step_plan import ROUND_MB, Plan, make_plan

Named = Sequence[tuple[str, Tensor]]

# Subsets of a model's matrices that step together: one, unless some have no gradient at times, or ZeRO 3 steps part by
# part. A plan left out is made again when it is needed, at the price of one number from each rank.
MOST_PLANS = 256


class RankPlacement(ABC):
    """A `soren_align.optim.Placement` between the ranks of a process group.

    round_mb: MB (2^20 bytes) that a rank sends and receives in a round, one way; see `plan.ROUND_MB`.
    """

    def __init__(self, round_mb: float = ROUND_MB):
        self.round_mb, self.most_plans = round_mb, MOST_PLANS
        # By the identities of the tensors that step together, the last used last; with them the tensors, so that no
        # other takes such an identity.
        self.exchanges: dict[tuple[int, ...], Exchange | ReplicaExchange] = {}
        self._tensors: dict[tuple[int, ...], list[Tensor]] = {}

    @abstractmethod
    def holds(self, parameter: Tensor) -> bool:
        """Whether it is known which matrices `parameter` holds pieces of."""

    @abstractmethod
    def layout(self, named: Named) -> Layout:
        """The matrices in these tensors of one spectral group."""

    @abstractmethod
    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """The ranks that share the tensors, and the device on which they communicate and map."""

    def agree(self, named: Named, error: Exception | None) -> None:
        """Raise on every rank if any rank found an error, or if the ranks lack different gradients.

        Without it one rank would raise and the others wait for it in the next collective.
        """
        kind = 0 if error is None else 2 if isinstance(error, ValueError) else 1
        has_grad = [int(p.grad is not None) for _, p in named]
        group, device = self.ranks()
        most = torch.tensor([kind, *has_grad, *(-has for has in has_grad)], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        kind, *seen = most.tolist()
        if error is not None:
            raise error
        if kind:
            raise (ValueError if kind == 2 else FloatingPointError)(
                "another rank found a gradient that cannot be used, and names it; nothing was changed by this step"
            )
        somewhere, nowhere = seen[: len(named)], seen[len(named) :]
        uneven = [name for (name, _), some, none in zip(named, somewhere, nowhere, strict=True) if some != -none]
        if uneven:
            raise ValueError(
                f"{', '.join(uneven[:5])}: a gradient on some ranks and none on others; nothing was changed"
            )

    def prepare(self, named: Named) -> None:
        """Plan a step of one spectral group's tensors, unless that has been done.

        ValueError, on every rank, where a rank has no plan or another one than the others.
        """
        if not named:  # a launcher has emptied the group, on all ranks
            return
        key = _key(named)
        self.exchanges[key] = self.exchanges.pop(key, None) or self._exchange(named)
        self._tensors[key] = [parameter for _, parameter in named]
        while len(self.exchanges) > self.most_plans:  # the same ones on all ranks, which ask for the same in one order
            oldest = next(iter(self.exchanges))
            del self.exchanges[oldest], self._tensors[oldest]

    def step_(self, step: GroupStep, named: Named) -> None:
        """One step of one spectral group's tensors, every matrix mapped once on some rank."""
        if not named:
            return
        self.prepare(named)  # again, in case that other groups have pushed it out
        self.exchanges[_key(named)].run_(step, [parameter for _, parameter in named])

    def _exchange(self, named: Named) -> Exchange | ReplicaExchange:
        plan = problem = None
        try:
            plan = self._plan(named)
        except ValueError as error:
            problem = error
        group, device = self.ranks()
        _refuse_different_plans(None if plan is None else plan.fingerprint, group, device, problem)
        assert plan is not None
        return (ReplicaExchange if plan.layout.replicated else Exchange)(plan, group, device)

    def _plan(self, named: Named) -> Plan:
        dtypes = {momentum_dtype(parameter) for _, parameter in named}
        if len(dtypes) > 1:
            raise ValueError(
                f"matrices of one group must share a dtype to travel together; found {sorted(map(str, dtypes))}"
            )
        return make_plan(self.layout(named), self.round_mb, dtypes.pop().itemsize)


def _key(named: Named) -> tuple[int, ...]:
    return tuple(id(parameter) for _, parameter in named)


def _refuse_different_plans(
    fingerprint: int | None, group: dist.ProcessGroup, device: torch.device, problem: Exception | None
) -> None:
    """Collective. `problem`: why this rank has no fingerprint."""
    here = 0 if fingerprint is None else fingerprint
    seen = torch.tensor([int(fingerprint is None), here, -here], device=device)
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    failed, most, least = seen.tolist()
    if problem is not None:
        raise problem
    if failed:
        raise ValueError("another rank cannot plan this step, and says why; nothing was changed by it")
    if most != -least:
        raise ValueError("the ranks found different matrices or shards; do all of them load the same model?")
