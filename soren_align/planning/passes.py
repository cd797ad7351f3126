"""Memory and FLOPs of one forward and backward pass, measured on fake tensors, which have shapes and no contents.

Models of two and of three blocks run a batch as TRL would run it; larger models are extrapolated linearly from these.
No formula of an architecture is needed, and activation checkpointing, autocast and the head's chunks are included as
they are. tests/planning/test_passes.py compares the result with real tensors.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .meter import Meter

MEASURED_BLOCKS = (2, 3)
"""Numbers of blocks that are measured; with one block, the peak may come from another tensor than with many."""

# The head accumulates its gradients in place, which torch does not count.
_CUSTOM_FLOPS = {torch.ops.aten.addmm_: lambda _, a, b, **kwargs: 2 * a[0] * a[1] * b[1]}


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of a model.

    build: returns a model with the given number of blocks, and a function of token ids [batch_size, length] that runs
        it and returns an output with a `loss`; called for MEASURED_BLOCKS, on the meta device.
    num_blocks: of the whole model.
    autocast: its dtype; None to compute in the dtype of the weights.
    """

    build: Callable[[int], tuple[Any, Callable[[Tensor], Any]]]
    num_blocks: int
    autocast: torch.dtype | None

    def num_bytes(self, batch_size: int, length: int) -> int:
        """Peak of one pass, without weights and gradients (those of an earlier micro-batch exist already)."""
        fewer, more = (self._peaks(number, batch_size, length) for number in MEASURED_BLOCKS)
        return max(self._extrapolate(a, b) for a, b in zip(fewer, more, strict=True))

    def num_flops(self, batch_size: int, length: int, backward: bool = True) -> int:
        """Of all matrix products of one pass; attention is counted without its mask."""
        return self._extrapolate(*(self._flops(number, batch_size, length, backward) for number in MEASURED_BLOCKS))

    def _extrapolate(self, fewer: int, more: int) -> int:
        return fewer + (more - fewer) * (self.num_blocks - MEASURED_BLOCKS[0])

    def _peaks(self, num_blocks: int, batch_size: int, length: int) -> tuple[int, int]:
        """Of the forward and of the backward pass: each is linear in the blocks, their maximum may not be."""
        with self._fake_model(num_blocks, batch_size, length) as forward, Meter() as meter:
            loss = forward()
            forward_peak, meter.peak = meter.peak, 0
            loss.backward()
            return forward_peak, meter.peak

    def _flops(self, num_blocks: int, batch_size: int, length: int, backward: bool) -> int:
        counter = FlopCounterMode(display=False, custom_mapping=_CUSTOM_FLOPS)
        # torch has no formula for the CPU's fused attention; unfused, it is two products.
        with sdpa_kernel(SDPBackend.MATH), self._fake_model(num_blocks, batch_size, length) as forward, counter:
            with torch.set_grad_enabled(backward):
                loss = forward()
            if backward:
                loss.backward()
        return counter.get_total_flops()

    @contextlib.contextmanager
    def _fake_model(self, num_blocks: int, batch_size: int, length: int) -> Iterator[Callable[[], Tensor]]:
        """A function that computes the loss; the backward pass must run within this context too."""
        gc.collect()
        gc.freeze()  # so that the collections of `_drop_gradient` visit young objects only
        try:
            with torch.device("meta"):
                model, call = self.build(num_blocks)
            with FakeTensorMode():
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
