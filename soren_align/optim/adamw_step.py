"""One AdamW step of one group, by torch's own functional AdamW, in buckets of at most CHUNK entries.

On CUDA it is torch's fused kernel, which makes no temporaries of its own; elsewhere torch's loop over tensors, whose
two are of a chunk's size. Never foreach, torch's default on CUDA: its temporaries are as large as the group, and three
times that for bfloat16 with a compensation. AdamW is elementwise: a chunk takes the step that the whole would take.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .chunks import CHUNK, chunks
from .rounding import Proposal, adamw_direction, put_, summed
from .spectral_step import Update, local

if TYPE_CHECKING:
    from .spectral_optimizer import SpectralOptimizer


class Stretch(NamedTuple):
    """A chunk of a parameter with its gradient and state; `step` counts the steps before this one."""

    name: str
    step: Tensor
    held: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    compensation: Tensor | None


def adamw_step_(
    optimizer: "SpectralOptimizer", named: Sequence[tuple[str, Tensor]], group: dict[str, Any], numel: int = CHUNK
) -> None:
    """Step every parameter of `named`; all have a gradient. numel: entries that are stepped at a time, at most."""
    for bucket in _buckets(_stretches(optimizer, named, numel), numel):
        observed = optimizer.observer is not None or optimizer.proposal_observer is not None
        before = [(s.held.clone(), _clone(s.compensation)) if observed else None for s in bucket]
        _take_(bucket, group)
        for stretch, kept in zip(bucket, before, strict=True):
            if kept is not None:
                _show(optimizer, stretch, *kept, group)


def workspace(numel: int, itemsize: int, compensated: bool, on_cpu: bool) -> int:
    """Bytes that the step of a group of `numel` entries of `itemsize` bytes makes in passing.

    Counted by tests/optim/test_adamw_step.py: the loop's two temporaries, and of narrower weights the wide copy, the
    wide gradient, and what a compensation is taken apart with.
    """
    bytes_per_entry = 8 * on_cpu + (8 if itemsize < 4 else 0)
    return min(numel, CHUNK) * max(bytes_per_entry, 20 if compensated else 0)


def _stretches(optimizer: "SpectralOptimizer", named: Sequence[tuple[str, Tensor]], numel: int) -> Iterator[Stretch]:
    for name, parameter in named:
        state = optimizer.state[parameter]
        step, state["step"] = state["step"], state["step"] + 1  # a new tensor: a state dict may hold the old one
        tensors = (parameter.detach(), parameter.grad, *map(state.get, ("exp_avg", "exp_avg_sq", "compensation")))
        here = [None if tensor is None else local(tensor) for tensor in tensors]
        for parts in chunks(*here, numel=numel):
            yield Stretch(name, step, *parts)


def _buckets(stretches: Iterator[Stretch], numel: int) -> Iterator[list[Stretch]]:
    """Consecutive stretches of one device, as many together as have `numel` entries."""
    bucket: list[Stretch] = []
    for stretch in stretches:
        total = sum(s.held.numel() for s in bucket) + stretch.held.numel()
        if bucket and (total > numel or stretch.held.device != bucket[0].held.device):
            yield bucket
            bucket = []
        bucket.append(stretch)
    if bucket:
        yield bucket


def _take_(bucket: Sequence[Stretch], group: dict[str, Any]) -> None:
    device = bucket[0].held.device
    fused = device.type == "cuda"
    # torch adds to its step tensors in place, and the fused kernel reads them on the device.
    steps = torch.stack([stretch.step for stretch in bucket]).to(device if fused else "cpu", non_blocking=True)
    wide = [summed(s.held, s.compensation).to(s.exp_avg.dtype) for s in bucket]
    adamw(
        wide,
        [s.grad.to(s.exp_avg.dtype) for s in bucket],
        [s.exp_avg for s in bucket],
        [s.exp_avg_sq for s in bucket],
        [],
        list(steps.unbind()),
        foreach=False,
        fused=fused,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for stretch, updated in zip(bucket, wide, strict=True):
        put_(stretch.held, stretch.compensation, updated)


def _show(
    optimizer: "SpectralOptimizer",
    stretch: Stretch,
    held: Tensor,
    compensation: Tensor | None,
    group: dict[str, Any],
) -> None:
    """Let the observers see the stretch's step; `held` and `compensation` are copies from before it."""
    if optimizer.observer is not None:
        after = summed(stretch.held, stretch.compensation)
        optimizer.observer(Update(stretch.name, group, summed(held, compensation), after))
    if optimizer.proposal_observer is not None:
        state = {"step": stretch.step + 1, "exp_avg": stretch.exp_avg, "exp_avg_sq": stretch.exp_avg_sq}
        optimizer.proposal_observer(Proposal(group, held, compensation, adamw_direction(state, group)))


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
