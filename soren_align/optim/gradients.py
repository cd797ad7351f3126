"""Gradients that an optimizer cannot use are refused before anything is changed.

A step updates every parameter or none: after an error weights, momentum and step counts are unchanged. On a GPU a read
by the host waits for all that is queued, so a step makes one, of all the numbers that it needs: `checked_numbers`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .eight_bits import ROUNDED_NORM, norm
from .group_settings import names_of
from .pieces import local
from .placement import Placement

# Up to it a bound of a norm serves as well as the norm: no map distinguishes matrices with |N|_F below it.
LOOSE_NORM = 1.5


class StepNumbers(NamedTuple):
    """The numbers of one step that the host needs.

    max_norm: at least |N|_F of every map input N, on all ranks. lrs: of each group; a tensor is on the CPU.
    bound: at least max_norm and the norm of all gradients together.
    """

    max_norm: float
    lrs: list[float | Tensor]
    bound: float


class Gradient(NamedTuple):
    """The gradient of one parameter, and the rule of its group."""

    name: str
    parameter: Tensor
    grad: Tensor
    rule: str


def checked_numbers(
    groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Tensor]],
    optimizer: str,
    placement: Placement | None,
    gradient_norm: Tensor | None = None,
    previous_bound: float = math.inf,
) -> StepNumbers:
    """The numbers of a step whose gradients can be used, by one host read. With a placement collective.

    optimizer: its name. gradient_norm: see `SpectralOptimizer`; previous_bound: of the last step. While both are at
    most LOOSE_NORM, neither gradients nor momenta are read: a momentum is a weighted mean of gradients.
    Raises ValueError for a shard in a spectral group and for a sparse gradient, and FloatingPointError if a gradient
    has a NaN or an infinity; the error names the parameters. With a placement every rank raises.
    """
    named = [pair for group in groups for pair in zip(names_of(group), group["params"], strict=True)]
    gradients = _gradients(groups)
    known_norm = gradient_norm if previous_bound <= LOOSE_NORM else None
    problem: Exception | None = None
    numbers = torch.zeros(2, dtype=torch.float64)
    try:
        _refuse_unusable_layouts(gradients, optimizer, placement.has_layout if placement else None)
        if known_norm is None:
            numbers = _squared_norms(gradients, state)
        else:
            square = known_norm.detach().double().square()
            numbers = torch.stack([square, square.clamp(min=previous_bound**2)])
    except ValueError as error:
        if placement is None:
            raise
        problem = error
    tensors = [group["lr"] for group in groups if isinstance(group["lr"], Tensor)]
    rates = [lr.detach().reshape(1).to(numbers.device, torch.float64) for lr in tensors]
    if placement is None:
        total, largest, *rates = torch.cat([numbers, *rates]).tolist()
    else:
        total, largest = placement.check_gradients(named, problem, numbers)
        rates = torch.cat(rates).tolist() if rates else []
    if known_norm is not None and not largest <= LOOSE_NORM**2:  # a NaN too
        return checked_numbers(groups, state, optimizer, placement)
    if not math.isfinite(total):
        _refuse_non_finite_on_all_ranks(gradients, named, placement)  # or the sum has overflowed
    # Of a tensor's own dtype, in which torch computes with it.
    on_host = iter([torch.tensor(rate, dtype=lr.dtype) for rate, lr in zip(rates, tensors, strict=True)])
    lrs = [next(on_host) if isinstance(group["lr"], Tensor) else group["lr"] for group in groups]
    max_norm, bound = (math.sqrt(n) if math.isfinite(n) else math.inf for n in (largest, max(largest, total)))
    return StepNumbers(max_norm, lrs, bound)


def _gradients(groups: Sequence[dict[str, Any]]) -> list[Gradient]:
    return [
        Gradient(name, parameter, parameter.grad, group["rule"])
        for group in groups
        for name, parameter in zip(names_of(group), group["params"], strict=True)
        if parameter.grad is not None
    ]


def _refuse_non_finite_on_all_ranks(
    gradients: Sequence[Gradient], named: Sequence[tuple[str, Tensor]], placement: Placement | None
) -> None:
    problem: Exception | None = None
    try:
        _refuse_non_finite(gradients)
    except FloatingPointError as error:
        if placement is None:
            raise
        problem = error
    if placement is not None:
        placement.check_gradients(named, problem, torch.zeros(2, dtype=torch.float64))


def _refuse_unusable_layouts(
    gradients: Sequence[Gradient], optimizer: str, is_known: Callable[[Tensor], bool] | None
) -> None:
    """Raise ValueError for a shard in a spectral group or a sparse gradient, naming the parameter. Reads no gradient.

    optimizer: its name for the message.
    is_known: whether the layout of the matrices in a parameter is known; None: parameters must be whole matrices.
    """
    for name, parameter, grad, rule in gradients:
        if rule == "spectral" and not (is_known(parameter) if is_known else _is_a_matrix(parameter)):
            raise ValueError(
                f"{optimizer} updates whole matrices; {name} has shape {tuple(parameter.shape)} at the step. "
                "A shard has no singular values: set the optimizer's placement (soren_align.sharding)."
            )
        if grad.layout != torch.strided:
            raise ValueError(f"{optimizer} needs dense gradients; that of {name} is {grad.layout}")


def _refuse_non_finite(gradients: Sequence[Gradient]) -> None:
    """Raise FloatingPointError, naming the parameters, if a gradient has a NaN or an infinity. Reads every gradient."""
    broken = [
        name
        for name, _, grad, _ in gradients
        if grad.numel() and not local(grad).abs().amax().isfinite()  # amax: NaN too
    ]
    if broken:
        shown = ", ".join(broken[:5]) + (f" and {len(broken) - 5} more" if len(broken) > 5 else "")
        raise FloatingPointError(f"NaN or infinity in the gradient of {shown}; nothing was changed by this step")


def _squared_norms(gradients: Sequence[Gradient], state: Mapping[Tensor, dict[str, Tensor]]) -> Tensor:
    """Two sums on the device: of the squares of all gradients, and the largest over the inputs of maps; float64.

    The first is finite only if all gradients are. The second is at least |N|_F^2 of every matrix in one tensor, since
    N is a weighted mean of its gradient and its momentum (`update`).
    """
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    bound = 1.0
    for _, parameter, grad, rule in gradients:
        if rule == "adamw":
            others.append(local(grad))
        else:
            momentum = state[parameter].get("exp_avg") if parameter in state else None
            if momentum is not None and "spans" in state[parameter]:
                momentum, bound = norm(state[parameter], "exp_avg"), ROUNDED_NORM
            matrices += [local(grad)] + ([] if momentum is None else [local(momentum)])
    device = next((t.device for t in (*matrices, *others) if t.device.type != "cpu"), torch.device("cpu"))
    of_matrices, of_others = (_squares(tensors, device) for tensors in (matrices, others))
    return torch.stack([of_matrices.sum() + of_others.sum(), of_matrices.amax() * bound**2])


def _squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Squared norms of `tensors`, and a zero, on `device`."""
    by_kind = defaultdict(list)
    for tensor in tensors:
        by_kind[tensor.device, tensor.dtype].append(tensor)
    # In float32, whatever the dtype: float16's squares overflow from 256 on.
    norms = [
        torch.stack(torch._foreach_norm(same, 2, torch.promote_types(dtype, torch.float32)))
        for (_, dtype), same in by_kind.items()
    ]  # pyright: ignore
    zero = torch.zeros(1, dtype=torch.float64, device=device)
    return torch.cat([zero, *(norm.to(device, torch.float64) for norm in norms)]).square()


def _is_a_matrix(parameter: Tensor) -> bool:
    """Whether it is a whole matrix, or all experts of a layer."""
    # The tensor's own shape counts: under ZeRO 3 a flat shard still has a two-dimensional ds_shape.
    grad = parameter.grad
    return parameter.ndim in (2, 3) and grad is not None and grad.ndim > 1 and local(parameter) is parameter
