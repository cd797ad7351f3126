"""The state of a parameter: tensors of zeros before the first step, or copies of a checkpoint's."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .group_settings import names_of
from .rounding import COMPENSATION_DTYPE, is_compensated

STATE_KEYS = {"spectral": ("step", "exp_avg"), "adamw": ("step", "exp_avg", "exp_avg_sq")}


def new_state(parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """The state of a parameter before its first step."""
    # float32 by name: under a default dtype of bfloat16 a step count would stay at 256.
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for key in _state_keys(parameter, group)[1:]:
        state[key] = torch.zeros_like(parameter, dtype=_state_dtype(parameter, key))
    return state


def loaded_state(saved: dict[str, Any], current: Sequence[dict]) -> dict[Tensor, dict[str, Tensor]]:
    """Copies of a checkpoint's state, by parameter, in the optimizer's dtypes and on its devices.

    A checkpoint from before the first step has no state; then the result is empty. Raises ValueError if some parameters
    have a state and others lack it or have it in another shape.
    """
    if not saved["state"]:
        return {}
    loaded = {}
    for old, new in zip(saved["param_groups"], current, strict=True):
        for number, parameter, name in zip(old["params"], new["params"], names_of(new), strict=True):
            state = saved["state"].get(number, {})
            keys = _state_keys(parameter, new)
            missing = [key for key in keys if key not in state]
            if missing:
                raise ValueError(f"the checkpoint lacks {', '.join(missing)} of {name}; it cannot be resumed from")
            loaded[parameter] = {key: _loaded(state[key], key, name, parameter) for key in keys}
    return loaded


def momentum_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's momentum, and of a map's input and output."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _loaded(value: Any, key: str, name: str, parameter: Tensor) -> Tensor:
    """A copy, without torch's own cast to the parameter's dtype, which would round bfloat16's float32 momentum."""
    if key == "step":
        count = torch.as_tensor(value, dtype=torch.float32) if isinstance(value, int | float | Tensor) else None
        if count is None or count.numel() != 1:
            raise ValueError(f"the checkpoint has no number for the step of {name}; it cannot be resumed from")
        return count.detach().reshape(()).to("cpu", copy=True)
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        noun = "momentum" if key == "exp_avg" else key
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        raise ValueError(
            f"the checkpoint has a {noun} of {shape} for {name} of shape {tuple(parameter.shape)}; "
            "it belongs to another model"
        )
    dtype, on_cpu = _state_dtype(parameter, key), parameter.device.type == "cpu"
    # A tensor that is on the GPU already is not copied: on resuming, a copy would take the state's memory twice.
    loaded = value.detach().to(parameter.device, dtype, copy=on_cpu)
    if loaded.stride() != parameter.stride():  # the weight had other strides when the checkpoint was made
        loaded = torch.empty_like(parameter, dtype=dtype).copy_(loaded)
    return loaded


def _state_keys(parameter: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
    return STATE_KEYS[group["rule"]] + (("compensation",) if is_compensated(parameter, group) else ())


def _state_dtype(parameter: Tensor, key: str) -> torch.dtype:
    return COMPENSATION_DTYPE if key == "compensation" else momentum_dtype(parameter)
