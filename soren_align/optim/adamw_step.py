"""One AdamW step of one group, by torch's own functional AdamW, in buckets of at most CHUNK entries.

On CUDA it is torch's fused kernel, which makes no temporaries. Elsewhere, and for tensors of a layout that the kernel
refuses, it is torch's loop over tensors, which makes two of a chunk's size. Never foreach, torch's default on CUDA: its
temporaries are as large as the group, and three times that for bfloat16 with a compensation. AdamW is elementwise: a
chunk takes the step that the whole would take.
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
    fused: bool
    num_made: int
    """Entries of what is made in passing."""


def adamw_step_(optimizer: "SpectralOptimizer", named: Sequence[tuple[str, Tensor]], group: dict[str, Any]) -> None:
    """Step every parameter of `named`; all have a gradient."""
    observed = optimizer.observer is not None or optimizer.proposal_observer is not None
    for bucket in _buckets(_stretches(optimizer, named, observed)):
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


def _can_be_fused(*tensors: Tensor) -> bool:
    """Whether torch's fused kernel takes tensors of this layout, which must be one, and dense.

    As in torch/include/ATen/native/ForeachUtils.h, check_fast_path_restrictions (torch 2.13).
    """
    if tensors[0].device.type not in FUSED:
        return False
    layouts = {tuple(pair for pair in zip(t.stride(), t.shape, strict=True) if pair[1] > 1) for t in tensors}
    dense = 1
    for stride, length in sorted(next(iter(layouts))):
        if stride != dense:
            return False
        dense *= length
    return len(layouts) == 1


def _stretches(
    optimizer: "SpectralOptimizer", named: Sequence[tuple[str, Tensor]], observed: bool
) -> Iterator[Stretch]:
    for name, parameter in named:
        state = optimizer.state[parameter]
        step, state["step"] = state["step"], state["step"] + 1  # a new tensor: a state dict may hold the old one
        tensors = (parameter.detach(), parameter.grad, *map(state.get, ("exp_avg", "exp_avg_sq", "compensation")))
        here = [None if tensor is None else local(tensor) for tensor in tensors]
        one_dtype = len({tensor.dtype for tensor in here[:4] if tensor is not None}) == 1
        in_place = one_dtype and not observed and _can_be_fused(*here[:4])  # pyright: ignore[reportArgumentType]
        for parts in chunks(*here, numel=sys.maxsize if in_place else CHUNK):
            num_made = 0 if in_place else parts[0].numel()
            yield Stretch(name, step, *parts, fused=_can_be_fused(*parts[:4]), num_made=num_made)


def _buckets(stretches: Iterator[Stretch]) -> Iterator[list[Stretch]]:
    """Consecutive stretches of one device and kernel, as many together as make CHUNK entries in passing."""
    bucket: list[Stretch] = []
    num_made = 0
    for stretch in stretches:
        num_made += stretch.num_made
        kernel = (stretch.held.device, stretch.fused)
        if bucket and (num_made > CHUNK or kernel != (bucket[0].held.device, bucket[0].fused)):
            yield bucket
            bucket, num_made = [], stretch.num_made
        bucket.append(stretch)
    if bucket:
        yield bucket


def _take_(bucket: Sequence[Stretch], group: dict[str, Any]) -> None:
    device, fused = bucket[0].held.device, bucket[0].fused
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
