"""What one pass forward and backward holds and computes, found out on tensors that have shapes and no contents.

A model of one block and one of two are taken through a batch as TRL would take them; all the others lie on the line
through these. No formula of an architecture is needed, and activation checkpointing, autocast and the head's chunks
are what they are. tests/planning/test_passes.py holds the result against real tensors.
"""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ..sharding.meter import Meter


class Passes(NamedTuple):
    """Of one batch. num_bytes: the peak, beside weights and gradients (a batch before this one has left some)."""

    num_bytes: int
    num_flops: int


def measure(
    build: Callable[[int], tuple[Any, Callable[[torch.Tensor], Any]]],
    num_blocks: int,
    *,
    rows: int,
    length: int,
    arithmetic: torch.dtype | None,
    backward: bool = True,
) -> Passes:
    """One pass of `rows` sequences of `length` tokens through a model of `num_blocks` blocks.

    build: a model with so many blocks, and a function of token ids [rows, length] that takes them through it and returns
        an output with a `loss`; called here for one block and for two, under fake tensors.
    arithmetic: of autocast; None where the weights' own dtype is computed in.
    """
    one, two = (_measure(build, number, rows, length, arithmetic, backward) for number in (1, 2))
    *peaks, flops = (a + (b - a) * (num_blocks - 1) for a, b in zip(one, two, strict=True))
    return Passes(max(peaks), flops)


def _measure(
    build: Callable[[int], tuple[Any, Callable[[torch.Tensor], Any]]],
    num_blocks: int,
    rows: int,
    length: int,
    arithmetic: torch.dtype | None,
    backward: bool,
) -> tuple[int, int, int]:
    """Peak forward, peak backward, operations."""
    gc.collect()
    gc.freeze()  # so that the collections below look at young objects only
    try:
        with FakeTensorMode():
            model, call = build(num_blocks)
            tokens = torch.zeros(rows, length, dtype=torch.long)
            for parameter in model.parameters():
                if backward and parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_forget)
            with Meter() as meter, FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
                with torch.autocast("cpu", dtype=arithmetic or torch.bfloat16, enabled=arithmetic is not None):
                    loss = call(tokens).loss
                forward, meter.peak = meter.peak, 0
                if backward:
                    loss.backward()
            return forward, meter.peak, counter.get_total_flops()
    finally:
        gc.unfreeze()


def _forget(parameter: torch.Tensor) -> None:
    """As if the gradient had been added to the one of the batch before. Fake tensors leave cycles behind: collected."""
    parameter.grad = None
    if parameter.ndim == 1:  # a norm: a few times per block
        gc.collect()
