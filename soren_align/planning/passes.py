"""Memory and FLOPs of one forward and backward pass, measured on fake tensors, which have shapes and no contents.

Models of two and of three blocks run a batch as TRL would run it; larger models are extrapolated linearly from these,
with a pair of models for each kind of block.
No formula of an architecture is needed, and activation checkpointing, autocast and the head's chunks are included as
they are. tests/planning/test_passes.py compares the result with real tensors.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.integrations import moe

from .meter import Meter

MEASURED_BLOCKS = (2, 3)
"""Numbers of blocks that are measured; with one block, the peak may come from another tensor than with many."""

_CUSTOM_FLOPS = {
    # The head accumulates its gradients in place, which torch does not count.
    torch.ops.aten.addmm_: lambda _, a, b, **kwargs: 2 * a[0] * a[1] * b[1],
    # Products of each token with the weights of its experts, which have one row per pair of token and expert.
    torch.ops.transformers.grouped_mm_fallback: lambda x, w, *_, **kwargs: 2 * x[0] * w[1] * w[2],
    torch.ops.transformers.grouped_mm_fallback_backward: lambda x, w, *_, **kwargs: 4 * x[0] * w[1] * w[2],
}


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of a model.

    build: returns a model of the given blocks, and a function of token ids [batch_size, length] that runs it and
        returns an output with a `loss`; called for MEASURED_BLOCKS of each kind, on the meta device.
    kinds: for each kind of block, the positions of its blocks in the whole model.
    autocast: its dtype; None to compute in the dtype of the weights.
    """

    build: Callable[[Sequence[int]], tuple[Any, Callable[[Tensor], Any]]]
    kinds: Sequence[Sequence[int]]
    autocast: torch.dtype | None

    def num_bytes(self, batch_size: int, length: int) -> int:
        """Peak of one pass, without weights and gradients (those of an earlier micro-batch exist already)."""
        forward, backward = self._totals(lambda blocks: self._peaks(blocks, batch_size, length))
        return max(forward, backward)

    def num_flops(self, batch_size: int, length: int, backward: bool = True) -> int:
        """Of all matrix products of one pass; attention is counted without its mask."""
        return self._totals(lambda blocks: (self._flops(blocks, batch_size, length, backward),))[0]

    def _totals(self, measure: Callable[[Sequence[int]], tuple[int, ...]]) -> list[int]:
        """For the whole model, the numbers that `measure` returns for few blocks."""
        of_kinds = []
        for positions in self.kinds:
            # Several kinds: each alone, by one of its blocks.
            choices = [0] * max(MEASURED_BLOCKS) if len(self.kinds) > 1 else range(max(MEASURED_BLOCKS))
            blocks = [positions[choice % len(positions)] for choice in choices]
            of_kinds.append([measure(blocks[:number]) for number in MEASURED_BLOCKS])
        totals = []
        for numbers in zip(*(zip(fewer, more, strict=True) for fewer, more in of_kinds), strict=True):
            slopes = [more - fewer for fewer, more in numbers]
            rest = max(fewer - MEASURED_BLOCKS[0] * slope for (fewer, _), slope in zip(numbers, slopes, strict=True))
            totals.append(rest + sum(slope * len(k) for slope, k in zip(slopes, self.kinds, strict=True)))
        return totals

    def _peaks(self, blocks: Sequence[int], batch_size: int, length: int) -> tuple[int, int]:
        """Of the forward and of the backward pass: each is linear in the blocks, their maximum may not be."""
        with self._fake_model(blocks, batch_size, length) as forward, Meter() as meter:
            loss = forward()
            forward_peak, meter.peak = meter.peak, 0
            loss.backward()
            return forward_peak, meter.peak

    def _flops(self, blocks: Sequence[int], batch_size: int, length: int, backward: bool) -> int:
        counter = FlopCounterMode(display=False, custom_mapping=_CUSTOM_FLOPS)
        # torch has no formula for the CPU's fused attention; unfused, it is two products.
        with sdpa_kernel(SDPBackend.MATH), self._fake_model(blocks, batch_size, length) as forward, counter:
            with torch.set_grad_enabled(backward):
                loss = forward()
            if backward:
                loss.backward()
        return counter.get_total_flops()

    @contextlib.contextmanager
    def _fake_model(self, blocks: Sequence[int], batch_size: int, length: int) -> Iterator[Callable[[], Tensor]]:
        """A function that computes the loss; the backward pass must run within this context too."""
        gc.collect()
        gc.freeze()  # so that the collections of `_drop_gradient` visit young objects only
        try:
            with torch.device("meta"):
                model, call = self.build(blocks)
            with FakeTensorMode(), _experts_on_fake_tensors():
                _replace_meta_tensors(model)
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(_drop_gradient)
                tokens = torch.zeros(batch_size, length, dtype=torch.long)

                def forward() -> Tensor:
                    dtype = self.autocast or torch.bfloat16
                    with torch.autocast("cpu", dtype=dtype, enabled=self.autocast is not None):
                        return call(tokens).loss

                yield forward
        finally:
            gc.unfreeze()


@contextlib.contextmanager
def _experts_on_fake_tensors() -> Iterator[None]:
    """Within this context, transformers multiplies by experts with its own operation, of the same inputs and outputs.

    torch's grouped_mm takes fake tensors of bfloat16 only.
    """
    can_use_grouped_mm = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *tensors: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = can_use_grouped_mm


def _replace_meta_tensors(model: torch.nn.Module) -> None:
    """Replace tensors on the meta device by fake ones on the CPU; tied parameters stay tied.

    Not by Module.to_empty, which swaps tensors in place and cannot do so with fake ones.
    """
    fakes: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (cast(dict[str, Any], module._parameters), module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if tensor not in fakes:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        fakes[tensor] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    tensors[name] = fakes[tensor]


def _drop_gradient(parameter: Tensor) -> None:
    """Free a gradient, as if it had been added to that of an earlier micro-batch. Fake tensors leave cycles behind."""
    parameter.grad = None
    gc.collect()
