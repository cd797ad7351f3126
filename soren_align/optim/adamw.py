"""One AdamW step of one group, by torch's own functional AdamW, in buckets of at most CHUNK
temporary elements.

It is torch's fused kernel, which allocates no temporaries, and is the default of transformers and
TRL. Only for layouts that the kernel does not support is it torch's loop over tensors, which
allocates two of a chunk's size. Never foreach, torch's default on CUDA: its temporaries are as
large as the group, and three times that for bfloat16 with a compensation. AdamW is elementwise, so
a chunk gets the same update as in the whole tensor.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .layout import Named, local
from .rounding import CHUNK, chunks, master_weights, store_master_weights_
from .step import PendingUpdate

FUSED = ("cuda", "cpu")  # types of devices


class Chunk(NamedTuple):
    """A chunk of a parameter with its gradient and state; `step` counts the steps before this
    one.
    """

    name: str
    step: Tensor
    parameter: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    compensation: Tensor | None
    start: Tensor | None
    fused: bool
    num_temporary: int
    """Elements of each temporary tensor."""


def adamw_step_(
    group: dict[str, Any],
    named: Named,
    state: Mapping[Tensor, dict[str, Tensor]],
    *,
    lr: float | Tensor,
    observers: Sequence[Callable[[PendingUpdate], None]] = (),
) -> None:
    """One step of every parameter of `named`; all have a gradient.
    The observers get every chunk's update.

    lr: the group's, on the host.
    """
    if not named:
        return
    # Buckets bound the temporaries; each is one call of torch's kernel, whatever it contains.
    for bucket in _buckets(_chunks(named, state, bool(observers))):
        before: list[tuple[Tensor, Tensor | None]] = []
        # Copies only for observers, as on logging steps: the kernel updates in place.
        for chunk in bucket if observers else ():
            before.append(
                (
                    chunk.parameter.clone(),
                    None if chunk.compensation is None else chunk.compensation.clone(),
                )
            )
        _update_(bucket, group, lr)
        for chunk, (parameter, compensation) in zip(bucket, before, strict=False):
            # torch's kernel does not return its update: for observers it is computed again, of the
            # moments.
            (beta1, beta2), step = group["betas"], float(chunk.step + 1)
            denominator = chunk.exp_avg_sq.div(1 - beta2**step).sqrt_().add_(group["eps"])
            direction = chunk.exp_avg.div(1 - beta1**step).div_(denominator)
            del denominator
            for observe in observers:
                observe(
                    PendingUpdate(
                        chunk.name,
                        group,
                        parameter,
                        compensation,
                        direction,
                        lr,
                        group["weight_decay"],
                        start=chunk.start,
                    )
                )


def workspace(numel: int, itemsize: int, compensated: bool) -> int:
    """Bytes of the fused step's temporaries for `numel` elements of `itemsize` bytes
    (tests/optim/test_adamw_step.py).

    Weights and gradients narrower than float32 are copied; in addition there are those that split
    the master weights.
    """
    return min(numel, CHUNK) * 8 * ((itemsize < 4) + compensated)


def _can_be_fused(*tensors: Tensor) -> bool:
    """Whether torch's fused kernel supports the layout of these tensors, which must be one, and
    dense.

    As in torch/include/ATen/native/ForeachUtils.h, check_fast_path_restrictions (torch 2.13).
    """
    if tensors[0].device.type not in FUSED:
        return False
    # Nearly always the case; to compare strides costs 0.01 ms per tensor.
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    # Strides of axes of length 1 are arbitrary, and do not count.
    layouts = {
        tuple(pair for pair in zip(t.stride(), t.shape, strict=True) if pair[1] > 1)
        for t in tensors
    }
    # Dense: each stride, from the smallest on, is the number of elements within it, so that there
    # are no gaps, such as a slice has.
    dense = 1
    for stride, length in sorted(next(iter(layouts))):
        if stride != dense:
            return False
        dense *= length
    return len(layouts) == 1


def _chunks(
    named: Named, states: Mapping[Tensor, dict[str, Tensor]], is_observed: bool
) -> Iterator[Chunk]:
    """Yield the chunks of the parameters."""
    # All step counts in two operations: thousands of norms and biases would need as many.
    steps = torch.stack([states[parameter]["step"] for _, parameter in named])
    for (name, parameter), step, next_step in zip(
        named, steps.unbind(), (steps + 1).unbind(), strict=True
    ):
        state = states[parameter]
        state["step"] = next_step  # a new tensor: a state dict may hold the old one
        tensors = (
            parameter.detach(),
            parameter.grad,
            *map(state.get, ("exp_avg", "exp_avg_sq", "compensation", "start")),
        )
        here = [None if tensor is None else local(tensor) for tensor in tensors]
        one_dtype = len({tensor.dtype for tensor in here[:4] if tensor is not None}) == 1
        in_place = one_dtype and not is_observed and _can_be_fused(*here[:4])  # pyright: ignore[reportArgumentType]
        # Where the kernel updates in place there are no temporaries to bound: the tensor is one
        # chunk.
        for parts in chunks(*here, numel=sys.maxsize if in_place else CHUNK):
            num_temporary = 0 if in_place else parts[0].numel()
            yield Chunk(
                name,
                step,
                *parts,
                fused=in_place or _can_be_fused(*parts[:4]),
                num_temporary=num_temporary,
            )


def _buckets(parts: Iterator[Chunk]) -> Iterator[list[Chunk]]:
    """Consecutive chunks of one device and kernel, together with at most CHUNK temporary
    elements.
    """
    # One call of the kernel per bucket: for thousands of norms and biases, launches take longer
    # than the arithmetic.
    bucket: list[Chunk] = []
    num_temporary = 0
    for chunk in parts:
        num_temporary += chunk.num_temporary
        kernel = (chunk.parameter.device, chunk.fused)
        if bucket and (
            num_temporary > CHUNK or kernel != (bucket[0].parameter.device, bucket[0].fused)
        ):
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
    # The kernel updates float32 weights in place; narrower ones are split and joined around it.
    weights = [master_weights(c.parameter, c.compensation).to(c.exp_avg.dtype) for c in bucket]
    averages = [chunk.exp_avg for chunk in bucket], [chunk.exp_avg_sq for chunk in bucket]
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    for weight, start in zip(weights, (chunk.start for chunk in bucket), strict=True):
        if start is not None:  # a group's parameters have one, or none has; the kernel's is zero
            weight.lerp_(start.to(weight.dtype), float(lr * group["weight_decay"]))
            decay = 0.0
    settings: dict[str, Any] = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": decay,
        "eps": group["eps"],
    }
    settings |= {"foreach": False, "fused": fused, "amsgrad": False, "maximize": False}
    # A generator: copies of narrower gradients live as long as the call.
    grads = (chunk.grad.to(chunk.exp_avg.dtype) for chunk in bucket)
    adamw(weights, [*grads], *averages, [], list(steps.unbind()), **settings)
    for chunk, updated in zip(bucket, weights, strict=True):
        store_master_weights_(chunk.parameter, chunk.compensation, updated)
