"""The state of a parameter: tensors of zeros before the first step, or copies of a checkpoint's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .eight_bits import CODES, Blocks, Segment, decoded_range
from .group_settings import names_of
from .rounding import COMPENSATION_DTYPE, is_compensated

STATE_KEYS = {"spectral": ("step", "exp_avg"), "adamw": ("step", "exp_avg", "exp_avg_sq")}


def new_state(parameter: Tensor, group: dict[str, Any], segments: Sequence[Segment] | None = None) -> dict[str, Tensor]:
    """The state of a parameter before its first step.

    segments: of the parameters in a flat shard; None: it is one whole parameter. Raises ValueError for 8-bit states of
    a DTensor.
    """
    # float32 by name: under a default dtype of bfloat16 a step count would stay at 256.
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for key in _state_keys(parameter, group)[1:]:
        state[key] = torch.zeros_like(parameter, dtype=_state_dtype(parameter, key, group))
    if _is_in_8_bits(parameter, group):
        blocks = Blocks.of(parameter, segments)
        for key in state.keys() & CODES.keys():
            state[f"{key}_scale"] = torch.zeros(blocks.total, dtype=torch.float32, device=parameter.device)
        state["spans"] = blocks.spans
    return state


def loaded_state(
    saved: dict[str, Any],
    current: Sequence[dict],
    segments_of: Callable[[Tensor], Sequence[Segment] | None] = lambda parameter: None,
) -> dict[Tensor, dict[str, Tensor]]:
    """Copies of a checkpoint's state, by parameter, in the optimizer's dtypes and on its devices.

    A checkpoint from before the first step has no state; then the result is empty. segments_of: see `new_state`. Raises
    ValueError if some parameters have a state and others lack it or have it in another shape.
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
            dtypes = {key: _state_dtype(parameter, key, new) for key in keys}
            loaded[parameter] = {key: _loaded(state[key], key, name, parameter, dtypes[key]) for key in keys}
            if _is_in_8_bits(parameter, new):
                loaded[parameter] |= _loaded_blocks(
                    state, name, parameter, Blocks.of(parameter, segments_of(parameter))
                )
    return loaded


def momentum_of(state: dict[str, Any]) -> Tensor:
    """The momentum of a whole matrix, decoded from 8 bits if it is stored so. state: of a parameter, or saved."""
    codes = state["exp_avg"]
    return decoded_range(state, "exp_avg", 0, codes.numel()).view(codes.shape) if "spans" in state else codes


def momentum_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's momentum, and of a map's input and output."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _is_in_8_bits(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether the moments are codes. Not of float64 and of weights with other strides, which are rare."""
    if group.get("states") != "8bit":
        return False
    if hasattr(parameter, "to_local"):
        raise ValueError("8-bit states of FSDP2's shards are not supported; use float32 states, DDP or ZeRO")
    return parameter.dtype != torch.float64 and parameter.is_contiguous()


def _loaded_blocks(state: dict[str, Any], name: str, parameter: Tensor, expected: Blocks) -> dict[str, Tensor]:
    """Copies of the scales and spans of a checkpoint. Raises ValueError if it has other blocks: another sharding."""
    keys = [f"{key}_scale" for key in STATE_KEYS["adamw"] if f"{key}_scale" in state]
    is_equal = torch.equal(torch.as_tensor(state.get("spans", -1)).cpu(), expected.spans)
    if not is_equal or not keys or any(state[key].shape != (expected.total,) for key in keys):
        raise ValueError(f"the checkpoint has 8-bit states of {name} in other blocks; it cannot be resumed from")
    scales = {key: state[key].detach().to(parameter.device, torch.float32, copy=True) for key in keys}
    return scales | {"spans": expected.spans}


def _loaded(value: Any, key: str, name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
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
    # A tensor that is on the GPU already is not copied: on resuming, a copy would take the state's memory twice.
    loaded = value.detach().to(parameter.device, dtype, copy=parameter.device.type == "cpu")
    if loaded.stride() != parameter.stride():  # the weight had other strides when the checkpoint was made
        loaded = torch.empty_like(parameter, dtype=dtype).copy_(loaded)
    return loaded


def _state_keys(parameter: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
    return STATE_KEYS[group["rule"]] + (("compensation",) if is_compensated(parameter, group) else ())


def _state_dtype(parameter: Tensor, key: str, group: dict[str, Any]) -> torch.dtype:
    if key == "compensation":
        return COMPENSATION_DTYPE
    return CODES[key] if key in CODES and _is_in_8_bits(parameter, group) else momentum_dtype(parameter)
