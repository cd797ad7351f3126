"""What one pass forward and backward holds and computes, found out on tensors that have shapes and no contents.

A model of two blocks and one of three are taken through a batch as TRL would take them; all the others lie on the line
through these. No formula of an architecture is needed, and activation checkpointing, autocast and the head's chunks
are what they are. tests/planning/test_passes.py holds the result against real tensors.
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

FEW = (2, 3)
"""Blocks of the models that are measured; at one, another tensor than with many may make the peak."""

# The head adds its gradients up in place, which torch does not count.
_MORE_FLOPS = {torch.ops.aten.addmm_: lambda _, a, b, **kwargs: 2 * a[0] * a[1] * b[1]}


@dataclass(frozen=True)
class Passes:
    """How a model is taken through a batch.

    build: a model with so many blocks, and a function of token ids [rows, length] that takes them through it and
        returns an output with a `loss`; called for FEW blocks, on the meta device.
    num_blocks: of the whole model.
    autocast: to which dtype; None where the weights' own is computed in.
    """

    build: Callable[[int], tuple[Any, Callable[[Tensor], Any]]]
    num_blocks: int
    autocast: torch.dtype | None

    def num_bytes(self, rows: int, length: int) -> int:
        """The peak of a pass, beside weights and gradients (a batch before this one has left some)."""
        few, more = (self._peaks(number, rows, length) for number in FEW)
        return max(self._on_the_line(a, b) for a, b in zip(few, more, strict=True))

    def num_flops(self, rows: int, length: int, backward: bool = True) -> int:
        """Of all products of a pass, attention's among them as if nothing were masked."""
        return self._on_the_line(*(self._flops(number, rows, length, backward) for number in FEW))

    def _on_the_line(self, few: int, more: int) -> int:
        return few + (more - few) * (self.num_blocks - FEW[0])

    def _peaks(self, num_blocks: int, rows: int, length: int) -> tuple[int, int]:
        """Forward and backward: each grows by the same with every block, but one may overtake the other."""
        with self._taken(num_blocks, rows, length) as forward, Meter() as meter:
            loss = forward()
            on_the_way, meter.peak = meter.peak, 0
            loss.backward()
            return on_the_way, meter.peak

    def _flops(self, num_blocks: int, rows: int, length: int, backward: bool) -> int:
        counter = FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS)
        # The CPU's fused attention has no formula in torch; written out, it is two products.
        with sdpa_kernel(SDPBackend.MATH), self._taken(num_blocks, rows, length) as forward, counter:
            with torch.set_grad_enabled(backward):
                loss = forward()
            if backward:
                loss.backward()
        return counter.get_total_flops()

    @contextlib.contextmanager
    def _taken(self, num_blocks: int, rows: int, length: int) -> Iterator[Callable[[], Tensor]]:
        """Under fake tensors, a function that goes forward to the loss."""
        gc.collect()
        gc.freeze()  # so that the collections of `_forget` look at young objects only
        try:
            with torch.device("meta"):
                model, call = self.build(num_blocks)
            with FakeTensorMode():
                _give_shapes(model)
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(_forget)
                tokens = torch.zeros(rows, length, dtype=torch.long)

                def forward() -> Tensor:
                    dtype = self.autocast or torch.bfloat16
                    with torch.autocast("cpu", dtype=dtype, enabled=self.autocast is not None):
                        return call(tokens).loss

                yield forward
        finally:
            gc.unfreeze()


def _give_shapes(model: torch.nn.Module) -> None:
    """Put fake tensors in the place of those of the meta device, which computes on no CPU; what is tied stays so.

    Not by Module.to_empty, which swaps tensors where they are, and cannot do so with these.
    """
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (cast(dict[str, Any], module._parameters), module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    if tensor not in made:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        made[tensor] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    held[name] = made[tensor]


def _forget(parameter: Tensor) -> None:
    """As if the gradient had been added to the one of the batch before. Fake tensors leave cycles behind: collected."""
    parameter.grad = None
    gc.collect()
