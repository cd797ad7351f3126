"""Copies of the starting weights on the CPU, and the distance of the present weights from them.

Every rank copies only the tensors, or parts of tensors, that it alone measures; the ranks add their sums.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optim import Sums, chunks, copied_to_cpu, master_weights
from ..sharding import local
from ..sharding.ranks import Ranks
from .attached_optimizer import AttachedOptimizer


class StartingWeights:
    """The weights at the time of construction. tensors: (index of the parameter group, tensor updated here)."""

    def __init__(self, tensors: Sequence[tuple[int, Tensor]]):
        copies = compact_copies([local(tensor.detach()) for _, tensor in tensors])
        self._tensors = [(*pair, copy) for pair, copy in zip(tensors, copies, strict=True)]

    def pairs(self, optimizer: Any, most: int | None = None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (index of the group, present weights, starting weights), float32, in chunks that cover all tensors.

        With a compensation, the present weights are its sum with the parameter. Do not modify or keep them.
        most: number of elements from which on evenly spaced rows of every tensor are yielded instead of all.
        """
        stride = max(1, round(sum(copy.numel() for *_, copy in self._tensors) / most)) if most else 1
        for index, tensor, copy in self._tensors:
            rest = optimizer.state.get(tensor, {}).get("compensation")
            here = (local(tensor.detach()), None if rest is None else local(rest), copy)
            rows = (part if part is None or not part.ndim else part[::stride] for part in here)
            for weights, compensation, start in chunks(*rows):
                yield index, master_weights(weights, compensation).float(), start.to(weights.device).float()


def share_of_parameters(optimizer: torch.optim.Optimizer, ranks: Ranks) -> list[tuple[int, Tensor]]:
    """Return every num_ranks-th parameter with the index of its group: this rank's share where all ranks hold all."""
    parameters = [(index, p) for index, group in enumerate(optimizer.param_groups) for p in group["params"]]
    return parameters[ranks.rank :: ranks.num_ranks]


def relative_changes(start: StartingWeights, attached: AttachedOptimizer, most: int | None = None) -> dict[str, float]:
    """Return |W - W_0| / |W_0| (Frobenius) over all matrices, and over all other parameters. Collective.

    most: elements on this rank that are compared; of more, evenly spaced rows of every tensor.
    """
    squares = Sums(4)  # of the change and of the start: of the matrices, of the other parameters
    for index, weights, before in start.pairs(attached.optimizer, most):
        squares.add(2 * index, (weights - before).square_().sum(), before.square().sum())
    change, norm, aux_change, aux_norm = attached.ranks.sums(squares.totals())
    changes = {"relative_change": math.sqrt(change / norm) if norm else 0.0}
    if attached.has_other_parameters:
        changes["aux_relative_change"] = math.sqrt(aux_change / aux_norm) if aux_norm else 0.0
    return changes


def compact_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies on the CPU, in bfloat16 where that is exact, as it is for a checkpoint published in bfloat16."""
    inexact = Sums(len(tensors))
    for index, tensor in enumerate(tensors):
        for (part,) in chunks(tensor):
            inexact.add(index, (part.to(torch.bfloat16).to(part.dtype) != part).any())
    totals = inexact.totals()
    dtypes = [tensor.dtype if count else torch.bfloat16 for tensor, count in zip(tensors, totals, strict=True)]
    return [copied_to_cpu(tensor, None, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
