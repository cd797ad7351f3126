"""One AdamW step of one group, by torch's own functional AdamW, in buckets of at most CHUNK entries.

On CUDA it is torch's fused kernel, which makes no temporaries, elsewhere torch's loop over tensors, which makes two of
a chunk's size. Never foreach, torch's default on CUDA: its temporaries are as large as the group, and three times that
for bfloat16 with a compensation. AdamW is elementwise: a chunk takes the step that the whole would take.
"""

import sys
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

FUSED = ("cuda",)  # types of devices


class Stretch(NamedTuple):
    """A chunk of a parameter with its gradient and state; `step` counts the steps before this one."""

    name: str
    step: Tensor
    held: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    compensation: Tensor | None


def adamw_step_(optimizer: "SpectralOptimizer", named: Sequence[tuple[str, Tensor]], group: dict[str, Any]) -> None:
    """Step every parameter of `named`; all have a gradient."""
    observed = optimizer.observer is not None or optimizer.proposal_observer is not None
    makes_none = not observed and all(_steps_in_place(parameter, optimizer.state[parameter]) for _, parameter in named)
    numel = sys.maxsize if makes_none else CHUNK
    for bucket in _buckets(_stretches(optimizer, named, numel), numel):
        if observed:
            _take_and_show_(optimizer, bucket, group)
        else:
            _take_(bucket, group)


def workspace(numel: int, itemsize: int, compensated: bool, on_cpu: bool) -> int:
    """Bytes that a step of `numel` entries of `itemsize` bytes makes in passing (tests/optim/test_adamw_step.py).

    Weights and gradients narrower than float32 are copied; beside them stand the loop's two temporaries, or those that
    take the weights apart for a compensation.
    """
    return min(numel, CHUNK) * 8 * ((itemsize < 4) + (on_cpu or compensated))


def _steps_in_place(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Whether nothing is made in passing: then a chunk is as large as the tensor."""
    grad, wide = parameter.grad, state["exp_avg"].dtype
    return parameter.device.type in FUSED and parameter.dtype == wide and grad is not None and grad.dtype == wide


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
    fused = device.type in FUSED
    # torch adds to its step tensors in place, and the fused kernel reads them on the device.
    steps = torch.stack([stretch.step for stretch in bucket])
    steps = steps.to(device, non_blocking=True) if fused else steps
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


def _take_and_show_(optimizer: "SpectralOptimizer", bucket: Sequence[Stretch], group: dict[str, Any]) -> None:
    rests = [stretch.compensation for stretch in bucket]
    before = [(s.held.clone(), None if rest is None else rest.clone()) for s, rest in zip(bucket, rests, strict=True)]
    _take_(bucket, group)
    for stretch, (held, rest) in zip(bucket, before, strict=True):
        if optimizer.observer is not None:
            after = summed(stretch.held, stretch.compensation)
            optimizer.observer(Update(stretch.name, group, summed(held, rest), after))
            del after
        if optimizer.proposal_observer is not None:
            state = {"step": stretch.step + 1, "exp_avg": stretch.exp_avg, "exp_avg_sq": stretch.exp_avg_sq}
            optimizer.proposal_observer(Proposal(group, held, rest, adamw_direction(state, group)))
