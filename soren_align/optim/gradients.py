"""Gradients that an optimizer cannot use are refused before anything is changed.

A step updates every parameter or none: after an error weights, momentum and step counts are unchanged.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .group_settings import name_of
from .pieces import local


def refuse_unusable_gradients(
    groups: Sequence[dict[str, Any]], optimizer: str, is_known: Callable[[Tensor], bool] | None = None
) -> None:
    """Raise ValueError for shards in a spectral group and sparse gradients, FloatingPointError if one is not finite.

    The error names the parameters. optimizer: its name for the message.
    is_known: whether the layout of the matrices in a parameter is known; None: parameters must be whole matrices.
    """
    gradients: list[tuple[str, Tensor]] = []
    for group in groups:
        for position, parameter in enumerate(group["params"]):
            name, grad = name_of(group, position), parameter.grad
            if grad is None:
                continue
            if group["rule"] == "spectral" and not (is_known(parameter) if is_known else _is_a_matrix(parameter)):
                raise ValueError(
                    f"{optimizer} updates whole matrices; {name} has shape {tuple(parameter.shape)} at the step. "
                    "A shard has no singular values: set the optimizer's placement (soren_align.sharding)."
                )
            if grad.layout != torch.strided:
                raise ValueError(f"{optimizer} needs dense gradients; that of {name} is {grad.layout}")
            gradients.append((name, local(grad)))
    _refuse_non_finite(gradients)


def _is_a_matrix(parameter: Tensor) -> bool:
    # The tensor's own shape counts: under ZeRO 3 a flat shard still has a two-dimensional ds_shape.
    grad = parameter.grad
    return parameter.ndim == 2 and grad is not None and grad.ndim == 2 and local(parameter) is parameter


def _refuse_non_finite(gradients: Sequence[tuple[str, Tensor]]) -> None:
    by_kind = defaultdict(list)
    for name, grad in gradients:
        if grad.numel():  # the maximum of an empty shard is not defined
            by_kind[grad.device, grad.dtype].append((name, grad))
    broken = []
    for named in by_kind.values():
        # One host read for all gradients of a kind; the norm carries NaN as well as infinity.
        largest = torch.stack(torch._foreach_norm([grad for _, grad in named], ord=torch.inf))  # pyright: ignore
        broken += [name for (name, _), finite in zip(named, largest.isfinite().tolist(), strict=True) if not finite]
    if broken:
        shown = ", ".join(broken[:5]) + (f" and {len(broken) - 5} more" if len(broken) > 5 else "")
        raise FloatingPointError(f"NaN or infinity in the gradient of {shown}; nothing was changed by this step")
