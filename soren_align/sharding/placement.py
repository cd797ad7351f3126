"""What an optimizer on one of several ranks asks: is this tensor known, do all ranks agree, carry out the step.

The plan is made at the first step, from the tensors that step, since launchers swap a model's parameters late.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim import GroupStep
from .exchange import Exchange
from .geometry import Layout
from .plan import ROUND_MB, make_plan
from .replicas import ReplicaExchange

Named = Sequence[tuple[str, Tensor]]


class RankPlacement(ABC):
    """A `soren_align.optim.Placement` between the ranks of a process group.

    round_mb: MB (2^20 bytes) that a rank sends and receives in a round, one way; see `plan.ROUND_MB`.
    """

    def __init__(self, round_mb: float = ROUND_MB):
        self.round_mb = round_mb
        self.exchanges: dict[tuple[int, ...], Exchange | ReplicaExchange] = {}
        self._known: list[Tensor] = []  # holds the tensors whose identities are keys

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

    def step_(self, step: GroupStep, named: Named) -> None:
        """One step of one spectral group's tensors, every matrix mapped once on some rank."""
        parameters = [parameter for _, parameter in named]
        if not parameters:  # a launcher has emptied the group, on all ranks
            return
        key = tuple(map(id, parameters))
        if key not in self.exchanges:
            self.exchanges[key] = self._exchange(step, named)
            self._known += parameters
        self.exchanges[key].run_(step, parameters)

    def _exchange(self, step: GroupStep, named: Named) -> Exchange | ReplicaExchange:
        dtypes = {step.dtype(parameter) for _, parameter in named}
        if len(dtypes) > 1:
            raise ValueError(
                f"matrices of one group must share a dtype to travel together; found {sorted(map(str, dtypes))}"
            )
        plan = make_plan(self.layout(named), self.round_mb, dtypes.pop().itemsize)
        group, device = self.ranks()
        _refuse_different_plans(plan.fingerprint, group, device)
        return (ReplicaExchange if plan.layout.replicated else Exchange)(plan, group, device)


def _refuse_different_plans(fingerprint: int, group: dist.ProcessGroup, device: torch.device) -> None:
    seen = torch.tensor([fingerprint, -fingerprint], device=device)
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    most, least = seen.tolist()
    if most != -least:
        raise ValueError("the ranks found different matrices or shards; do all of them load the same model?")
