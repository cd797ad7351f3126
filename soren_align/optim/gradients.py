"""Gradients that an optimizer cannot use are refused before anything is changed.

A step updates every parameter or none: after an error weights, momentum and step counts are
unchanged. On a GPU a read by the host waits for all that is queued, so a step makes one, of all the
numbers that it needs: `checked_numbers`.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spectral.coefficients import NORM_LIMIT
from .exchange import ShardingStrategy
from .group_settings import names_of
from .layout import local

# Up to it a bound of a norm serves as well as the norm: no map distinguishes matrices with |N|_F
# below it.
LOOSE_NORM = NORM_LIMIT


class StepNumbers(NamedTuple):
    """The numbers of one step that the host needs.

    max_norm: at least |N|_F of every map input N, on all ranks. lrs: of each group; a tensor is on
    the CPU.
    bound: at least max_norm and the norm of all gradients together.
    """

    max_norm: float
    lrs: list[float | Tensor]
    bound: float


def checked_numbers(
    groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Tensor]],
    optimizer: str,
    strategy: ShardingStrategy,
    gradient_norm: Tensor | None = None,
    previous_bound: float = math.inf,
) -> StepNumbers:
    """The numbers of a step whose gradients can be used, by one host read. Collective.

    optimizer: its name. gradient_norm: see `SpectralOptimizer`; previous_bound: of the last step.
    While both are at most LOOSE_NORM, neither gradients nor momenta are read: a momentum is a
    weighted mean of gradients. Raises ValueError for a shard of unknown layout in a spectral group
    and for a sparse gradient, FloatingPointError if a gradient has a NaN or an infinity, and names
    the parameters, or if gradient_norm has overflowed. Every rank raises.
    """
    with_rules = [
        (*pair, g["rule"]) for g in groups for pair in zip(names_of(g), g["params"], strict=True)
    ]
    named = [(name, parameter) for name, parameter, _ in with_rules]
    known_norm = gradient_norm if previous_bound <= LOOSE_NORM else None
    # An error is kept until the ranks have met: who raises alone leaves the others waiting.
    problem: Exception | None = None
    numbers = torch.zeros(2, dtype=torch.float64)
    try:
        for name, parameter, rule in with_rules:
            if (
                parameter.grad is not None
                and rule == "spectral"
                and not strategy.has_layout(parameter)
            ):
                raise ValueError(
                    f"{optimizer} updates whole matrices, but {name} is a shard of shape "
                    f"{tuple(parameter.shape)}; set the optimizer's sharding strategy "
                    "(soren_align.sharding). FSDP1 is not supported; use FSDP2"
                )
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"{optimizer} needs dense gradients, but the gradient of {name} is "
                    f"{parameter.grad.layout}; create the embedding with sparse=False"
                )
        if known_norm is None:
            numbers = _squared_norms(with_rules, state)
        else:
            square = known_norm.detach().double().square()
            numbers = torch.stack([square, square.clamp(min=previous_bound**2)])
    except ValueError as error:
        problem = error
    # Learning rates that are tensors are read by the same host read as the norms.
    rates = [group["lr"] for group in groups if isinstance(group["lr"], Tensor)]
    on_device = [lr.detach().reshape(1).to(numbers.device, torch.float64) for lr in rates]
    if gradient_norm is not None and known_norm is None:
        # Clipping by an infinite norm has made all gradients zero: 0 x infinity is a NaN.
        numbers[0] += 0 * gradient_norm.detach().to(numbers.device)
    total, largest, *on_host = strategy.check_gradients(named, problem, numbers, *on_device)
    # The bound was too loose after all: the gradients themselves are read.
    if known_norm is not None and not largest <= LOOSE_NORM**2:  # a NaN too
        return checked_numbers(groups, state, optimizer, strategy, gradient_norm)
    if not math.isfinite(total):
        # A gradient has a NaN or an infinity, on some rank, or the sum has overflowed: every
        # gradient is read.
        with_grad = [
            (name, local(parameter.grad)) for name, parameter in named if parameter.grad is not None
        ]
        # amax: NaN too
        broken = [name for name, g in with_grad if g.numel() and not g.abs().amax().isfinite()]
        finding = f"NaN or infinity in the gradient of {first_names(broken)}"
        if not broken:
            finding = "the norm of the gradients overflows, so that clipping would make them zero"
        problem = FloatingPointError(f"{finding}; the optimizer did not apply this step")
        is_refused = broken or gradient_norm is not None
        # The ranks meet again, since only the rank with a broken gradient knows its name.
        strategy.check_gradients(
            named, problem if is_refused else None, torch.zeros(2, dtype=torch.float64)
        )
    # Of a tensor's own dtype, in which torch computes with it.
    read = iter(
        [torch.tensor(rate, dtype=lr.dtype) for rate, lr in zip(on_host, rates, strict=True)]
    )
    lrs = [next(read) if isinstance(group["lr"], Tensor) else group["lr"] for group in groups]
    max_norm, bound = (
        math.sqrt(n) if math.isfinite(n) else math.inf for n in (largest, max(largest, total))
    )
    return StepNumbers(max_norm, lrs, bound)


def first_names(names: Sequence[str], most: int = 5) -> str:
    """The first names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _squared_norms(
    with_rules: Sequence[tuple[str, Tensor, str]], state: Mapping[Tensor, dict[str, Tensor]]
) -> Tensor:
    """Two sums on the device: of the squares of all gradients, and the largest over the inputs of
    maps; float64.

    The first is finite only if all gradients are. The second is at least |N|_F^2 of every matrix in
    one tensor, since N is a weighted mean of its gradient and its momentum.
    """
    # Matrices apart: only their norms bound the inputs of maps.
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    bound = 1.0
    # A momentum that is rounded to bfloat16 may be larger than the gradients that it averages.
    for _, parameter, rule in with_rules:
        if parameter.grad is None:
            continue
        grad = local(parameter.grad)
        if rule == "adamw":
            others.append(grad)
        else:
            momentum = state[parameter].get("exp_avg") if parameter in state else None
            if momentum is not None and momentum.dtype == torch.bfloat16:
                bound = 1 + torch.finfo(torch.bfloat16).eps
            matrices += [grad] + ([] if momentum is None else [local(momentum)])
    # One device for all norms, so that the host reads once.
    device = next(
        (t.device for t in (*matrices, *others) if t.device.type != "cpu"), torch.device("cpu")
    )
    squares = []  # on `device`, each with a zero
    for tensors in (matrices, others):
        by_kind = defaultdict(list)
        for tensor in tensors:
            by_kind[tensor.device, tensor.dtype].append(tensor)
        norms = [torch.zeros(1, dtype=torch.float64, device=device)]
        for (_, dtype), same in by_kind.items():
            # In float32, whatever the dtype: float16's squares overflow from 256 on.
            of_kind = torch._foreach_norm(same, 2, torch.promote_types(dtype, torch.float32))
            norms.append(torch.stack(of_kind).to(device, torch.float64))  # pyright: ignore
        squares.append(torch.cat(norms).square())
    of_matrices, of_others = squares
    return torch.stack([of_matrices.sum() + of_others.sum(), of_matrices.amax() * bound**2])
