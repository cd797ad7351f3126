"""What a step refuses, found before anything is changed.

A step either happens for every parameter or for none: weights, momentum and step counts stay as they are.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .settings import name_of


def refuse_unusable_gradients(groups: Sequence[dict[str, Any]], optimizer: str) -> None:
    """ValueError for flat shards in a spectral group and for sparse gradients; FloatingPointError for NaN and infinity.

    The error names the parameters. `optimizer` is the name that it speaks of.
    """
    gradients: list[tuple[str, Tensor]] = []
    for group in groups:
        for position, parameter in enumerate(group["params"]):
            name, grad = name_of(group, position), parameter.grad
            if grad is None:
                continue
            # Here the tensor's own shape counts: under ZeRO 3 a flat shard still has a two-dimensional ds_shape.
            if group["rule"] == "spectral" and (parameter.ndim != 2 or grad.ndim != 2):
                raise ValueError(
                    f"{optimizer} updates whole matrices; {name} has shape {tuple(parameter.shape)} at the step. "
                    "A flat shard has no singular values: keep the parameters whole (no ZeRO stage above 0)."
                )
            if grad.layout != torch.strided:
                raise ValueError(f"{optimizer} needs dense gradients; that of {name} is {grad.layout}")
            gradients.append((name, grad))
    _refuse_non_finite(gradients)


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
