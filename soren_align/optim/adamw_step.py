"""One AdamW step of one group, by torch's own functional AdamW, in buckets of at most CHUNK temporary elements.

It is torch's fused kernel, which allocates no temporaries, and is the default of transformers and TRL. Only for layouts
that the kernel does not support is it torch's loop over tensors, which allocates two of a chunk's size. Never foreach,
torch's default on CUDA: its temporaries are as large as the group, and three times that for bfloat16 with a
compensation. AdamW is elementwise, so a chunk gets the same update as in the whole tensor.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .chunks import CHUNK, chunks
from .eight_bits import SharedBlocks, Span, decoded, encode_, spans_of
from .pieces import local
from .rounding import master_weights, store_master_weights_
from .update_records import AppliedUpdate, PendingUpdate

FUSED = ("cuda", "cpu")  # types of devices


class Chunk(NamedTuple):
    """A chunk of a parameter with its gradient and state; `step` counts the steps before this one."""

    name: str
    step: Tensor
    parameter: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    compensation: Tensor | None
    fused: bool
    num_temporary: int
    """Elements of each temporary tensor."""
    encoded: tuple[dict[str, Tensor], Span] | None = None
    """The state in 8 bits, and the chunk's span of it; exp_avg and exp_avg_sq are then copies."""

    def encode_(self, shared_blocks: SharedBlocks | None) -> None:
        """Store the moments, if they are copies."""
        if self.encoded is not None:
            state, span = self.encoded
            encode_(state, "exp_avg", span, self.exp_avg, shared_blocks)
            encode_(state, "exp_avg_sq", span, self.exp_avg_sq, shared_blocks)


def adamw_step_(
    named: Sequence[tuple[str, Tensor]],
    group: dict[str, Any],
    lr: float | Tensor,
    state: Mapping[Tensor, dict[str, Tensor]],
    pending_observer: Callable[[PendingUpdate], None] | None = None,
    observer: Callable[[AppliedUpdate], None] | None = None,
    shared_blocks: SharedBlocks | None = None,
) -> None:
    """One step of every parameter of `named`; all have a gradient. The observers get every chunk's update.

    lr: the group's, on the host. shared_blocks: of 8-bit states; then the step is collective.
    """
    if not named:
        return
    is_observed = observer is not None or pending_observer is not None
    for bucket in _buckets(_chunks(named, state, is_observed)):
        before = [_copied(chunk) for chunk in bucket] if is_observed else []
        _update_(bucket, group, lr)
        for chunk in bucket:
            chunk.encode_(shared_blocks)
        for chunk, (parameter, compensation) in zip(bucket, before, strict=False):
            if observer is not None:
                after = master_weights(chunk.parameter, chunk.compensation)
                observer(AppliedUpdate(chunk.name, group, master_weights(parameter, compensation), after))
                del after
            if pending_observer is not None:
                pending_observer(PendingUpdate(group, parameter, compensation, _direction(chunk, group)))
    if shared_blocks is not None:
        shared_blocks.encode_()


def workspace(numel: int, itemsize: int, compensated: bool, in_8_bits: bool = False) -> int:
    """Bytes of the fused step's temporaries for `numel` elements of `itemsize` bytes (tests/optim/test_adamw_step.py).

    Weights and gradients narrower than float32 are copied, and so are moments in 8 bits; in addition there are those
    that split the master weights.
    """
    return min(numel, CHUNK) * 8 * ((itemsize < 4) + compensated + in_8_bits)


def _can_be_fused(*tensors: Tensor) -> bool:
    """Whether torch's fused kernel supports the layout of these tensors, which must be one, and dense.

    As in torch/include/ATen/native/ForeachUtils.h, check_fast_path_restrictions (torch 2.13).
    """
    if tensors[0].device.type not in FUSED:
        return False
    if all(tensor.is_contiguous() for tensor in tensors):  # nearly always; the strides cost 0.01 ms per tensor
        return True
    layouts = {tuple(pair for pair in zip(t.stride(), t.shape, strict=True) if pair[1] > 1) for t in tensors}
    dense = 1
    for stride, length in sorted(next(iter(layouts))):
        if stride != dense:
            return False
        dense *= length
    return len(layouts) == 1


def _chunks(
    named: Sequence[tuple[str, Tensor]], states: Mapping[Tensor, dict[str, Tensor]], is_observed: bool
) -> Iterator[Chunk]:
    steps = torch.stack([states[parameter]["step"] for _, parameter in named])
    for (name, parameter), step, next_step in zip(named, steps.unbind(), (steps + 1).unbind(), strict=True):
        state = states[parameter]
        state["step"] = next_step  # a new tensor: a state dict may hold the old one
        if "spans" in state:
            yield from _encoded_chunks(name, step, state, parameter)
            continue
        tensors = (parameter.detach(), parameter.grad, *map(state.get, ("exp_avg", "exp_avg_sq", "compensation")))
        here = [None if tensor is None else local(tensor) for tensor in tensors]
        one_dtype = len({tensor.dtype for tensor in here[:4] if tensor is not None}) == 1
        in_place = one_dtype and not is_observed and _can_be_fused(*here[:4])  # pyright: ignore[reportArgumentType]
        for parts in chunks(*here, numel=sys.maxsize if in_place else CHUNK):
            num_temporary = 0 if in_place else parts[0].numel()
            yield Chunk(name, step, *parts, fused=in_place or _can_be_fused(*parts[:4]), num_temporary=num_temporary)


def _encoded_chunks(name: str, step: Tensor, state: dict[str, Tensor], parameter: Tensor) -> Iterator[Chunk]:
    """The chunks of a parameter with a state in 8 bits: one per span, with copies of its moments in float32."""
    assert parameter.grad is not None
    flat, grad, compensation = parameter.detach().view(-1), parameter.grad.reshape(-1), state.get("compensation")
    for span in spans_of(state):
        here = slice(span.start, span.stop)
        moments = decoded(state, "exp_avg", span), decoded(state, "exp_avg_sq", span)
        rest = None if compensation is None else compensation.view(-1)[here]
        fused, numel = flat.device.type in FUSED, span.stop - span.start
        yield Chunk(name, step, flat[here], grad[here], *moments, rest, fused, numel, (state, span))


def _buckets(parts: Iterator[Chunk]) -> Iterator[list[Chunk]]:
    """Consecutive chunks of one device and kernel, together with at most CHUNK temporary elements."""
    bucket: list[Chunk] = []
    num_temporary = 0
    for chunk in parts:
        num_temporary += chunk.num_temporary
        kernel = (chunk.parameter.device, chunk.fused)
        if bucket and (num_temporary > CHUNK or kernel != (bucket[0].parameter.device, bucket[0].fused)):
            yield bucket
            bucket, num_temporary = [], chunk.num_temporary
        bucket.append(chunk)
    if bucket:
        yield bucket


def _update_(bucket: Sequence[Chunk], group: dict[str, Any], lr: float | Tensor) -> None:
    device, fused = bucket[0].parameter.device, bucket[0].fused
    # torch adds to its step tensors in place, and the fused kernel reads them on the device.
    steps = torch.stack([chunk.step for chunk in bucket])
    steps = steps.to(device, non_blocking=True) if fused else steps
    weights = [master_weights(c.parameter, c.compensation).to(c.exp_avg.dtype) for c in bucket]
    adamw(
        weights,
        [chunk.grad.to(chunk.exp_avg.dtype) for chunk in bucket],
        [chunk.exp_avg for chunk in bucket],
        [chunk.exp_avg_sq for chunk in bucket],
        [],
        list(steps.unbind()),
        foreach=False,
        fused=fused,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=lr,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for chunk, updated in zip(bucket, weights, strict=True):
        store_master_weights_(chunk.parameter, chunk.compensation, updated)


def _copied(chunk: Chunk) -> tuple[Tensor, Tensor | None]:
    return chunk.parameter.clone(), None if chunk.compensation is None else chunk.compensation.clone()


def _direction(chunk: Chunk, group: dict[str, Any]) -> Tensor:
    """The direction of the step that has just updated the chunk's state."""
    beta1, beta2 = group["betas"]
    step = float(chunk.step + 1)
    denominator = chunk.exp_avg_sq.div(1 - beta2**step).sqrt_().add_(group["eps"])
    return chunk.exp_avg.div(1 - beta1**step).div_(denominator)
