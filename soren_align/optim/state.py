"""The optimizer state of a parameter: zeros before the first step, or a checkpoint's tensors.

step: a float32 on the CPU. exp_avg: the momentum, and exp_avg_sq AdamW's second moment, of the
parameter's shape; of a matrix exp_avg_sq is the second moment of its map's output, if the group has
that of elements. compensation: see `rounding`. start: the parameter itself before the first step,
in its dtype, if weight decay moves towards it. A map's state, and the second moments of the rows,
are flat: see `layout.with_map_state`. Under FSDP2 they are a DTensor, which is divided as the
parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .group_settings import names_of
from .rounding import COMPENSATION_DTYPE

MOMENTS = {"spectral": ("exp_avg",), "adamw": ("exp_avg", "exp_avg_sq")}


class StateForm(NamedTuple):
    """The tensors of a parameter's state: those of its shape by dtype, the others by shape."""

    dtypes: dict[str, torch.dtype]
    shapes: dict[str, tuple[int, ...]]


def state_form(
    parameter: Tensor, group: dict[str, Any], map_state: Mapping[str, tuple[int, ...]] = {}
) -> StateForm:
    """The form of a parameter's state, but for the step.

    map_state: the shapes of the map's state by name: on this rank, or of a DTensor.
    """
    # The names are Adam's, whatever they hold: DeepSpeed's universal checkpoints carry these alone
    # (test_the_state_is_tensors_under_the_names_of_adam).
    moments = MOMENTS["adamw" if group.get("second_moment") == "elements" else group["rule"]]
    dtypes = dict.fromkeys(moments, map_dtype(parameter))
    if group.get("momentum_dtype") == "bfloat16" and parameter.dtype != torch.float64:
        dtypes["exp_avg"] = torch.bfloat16
    # float32 is as wide as its update
    if group.get("compensation") == "kahan" and parameter.dtype == torch.bfloat16:
        dtypes["compensation"] = COMPENSATION_DTYPE
    if group.get("weight_decay_to") == "start" and group["weight_decay"]:
        dtypes["start"] = parameter.dtype
    return StateForm(dtypes, dict(map_state))


def new_state(parameter: Tensor, form: StateForm) -> dict[str, Tensor]:
    """The state of a parameter before its first step."""
    # float32 by name: under a default dtype of bfloat16 a step count would stay at 256.
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for key, dtype in form.dtypes.items():
        zeros = torch.zeros_like(parameter, dtype=dtype)
        state[key] = zeros.copy_(parameter.detach()) if key == "start" else zeros
    settings: dict[str, Any] = {"dtype": map_dtype(parameter), "device": parameter.device}
    sharded: Any = parameter
    for key, shape in form.shapes.items():
        if not hasattr(parameter, "to_local"):
            state[key] = torch.zeros(shape, **settings)
            continue
        # Beside a DTensor the zeros are those of its rows, of which each rank has as many.
        here = torch.zeros(len(sharded.to_local()), *shape[1:], **settings)
        whole = {
            "shape": torch.Size(shape),
            "stride": torch.empty(shape, device="meta").stride(),
            "run_check": False,
        }
        state[key] = sharded.from_local(here, sharded.device_mesh, sharded.placements, **whole)
    return state


def loaded_state(
    saved: dict[str, Any],
    current: Sequence[dict],
    form_of: Callable[[str, Tensor, dict[str, Any]], StateForm],
) -> dict[Tensor, dict[str, Tensor]]:
    """Copies of a checkpoint's state, by parameter, in the optimizer's dtypes and on its devices.

    A checkpoint from before the first step has no state; then the result is empty. form_of: name,
    parameter, group -> the form. Raises ValueError if some parameters have a state and others lack
    it or have it in another form.
    """
    if not saved["state"]:
        return {}
    # All of the checkpoint is read and checked before the optimizer changes: by position, as torch
    # does, since names may have wrappers' prefixes.
    loaded: dict[Tensor, dict[str, Tensor]] = {}
    entries = [
        (*entry, new)
        for old, new in zip(saved["param_groups"], current, strict=True)
        for entry in zip(old["params"], new["params"], names_of(new), strict=True)
    ]
    for number, parameter, name, group in entries:
        state, form = saved["state"].get(number, {}), form_of(name, parameter, group)
        missing = [key for key in ("step", *form.dtypes) if key not in state]
        if missing:
            raise ValueError(
                f"the checkpoint has no {', '.join(missing)} of {name}; resume from another "
                "checkpoint"
            )
        step = (
            torch.as_tensor(s, dtype=torch.float32)
            if isinstance(s := state["step"], int | float | Tensor)
            else None
        )
        if step is None or step.numel() != 1:
            raise ValueError(
                f"the checkpoint's optimizer state has no valid step count for {name}; resume from "
                "another checkpoint"
            )
        loaded[parameter] = {"step": step.detach().reshape(()).to("cpu", copy=True)}
        for key, dtype in form.dtypes.items():
            value = state[key]
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                noun = "momentum" if key == "exp_avg" else key
                shape = (
                    f"shape {tuple(value.shape)}"
                    if isinstance(value, Tensor)
                    else f"type {type(value).__name__}"
                )
                raise ValueError(
                    f"the checkpoint has a {noun} of {shape} for {name} of shape "
                    f"{tuple(parameter.shape)}; load a checkpoint of this model"
                )
            # Without torch's own cast to the parameter's dtype, which would round bfloat16's
            # float32 momentum. A tensor that is on the GPU already is not copied: on resuming, a
            # copy would take the state's memory twice.
            value = value.detach().to(parameter.device, dtype, copy=parameter.device.type == "cpu")
            # The weight had other strides when the checkpoint was made: the momentum gets those of
            # today.
            if value.stride() != parameter.stride():
                value = torch.empty_like(parameter, dtype=dtype).copy_(value)
            loaded[parameter][key] = value
        wrong = [
            key
            for key, shape in form.shapes.items()
            if getattr(state.get(key), "shape", None) != shape
        ]
        if wrong:
            raise ValueError(
                f"the checkpoint lacks this rank's part of the state {wrong[0]} of {name}; "
                "resume from another checkpoint"
            )
        dtype = map_dtype(parameter)
        loaded[parameter] |= {
            key: state[key].detach().to(parameter.device, dtype, copy=True) for key in form.shapes
        }
    return loaded


def map_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a map's input and output for a parameter, and of its moments."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
