"""The optimizer state of a parameter: zeros before the first step, or a checkpoint's tensors.

step: a float32 on the CPU. exp_avg: the momentum, and exp_avg_sq AdamW's second moment, of the
parameter's shape; of a matrix exp_avg_sq is the second moment of its map's output, if the group has
that of elements. compensation: see `rounding`. With 8-bit states the moments are codes, with a
float32 scale for each of their blocks in exp_avg_scale and exp_avg_sq_scale, and the blocks
themselves: see `eight_bits`. A map's state, and the second moments of the rows, are
flat: see `layout.with_map_state`. Under FSDP2 they are a DTensor, which is divided as the
parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .eight_bits import CODES, Part, decoded_range, new_blocks
from .group_settings import names_of
from .rounding import COMPENSATION_DTYPE

MOMENTS = {"spectral": ("exp_avg",), "adamw": ("exp_avg", "exp_avg_sq")}


class StateForm(NamedTuple):
    """dtypes: of the tensors of a parameter's shape, by name.
    shapes: of the others. blocks: of 8-bit states.
    """

    dtypes: dict[str, torch.dtype]
    shapes: dict[str, tuple[int, ...]]
    blocks: Tensor | None


def state_form(
    parameter: Tensor,
    group: dict[str, Any],
    parts: Sequence[Part] | None = None,
    map_state: Mapping[str, tuple[int, ...]] = {},
) -> StateForm:
    """The form of a parameter's state, but for the step.

    parts: of the parameters in a flat shard; None: it is one whole parameter. map_state: the shapes
    of the map's state by name: on this rank, or of a DTensor. Raises ValueError for 8-bit states of
    a DTensor.
    """
    is_sharded_by_rows, in_8_bits = hasattr(parameter, "to_local"), group.get("states") == "8bit"
    if is_sharded_by_rows and in_8_bits:
        raise ValueError(
            "8-bit optimizer states are not supported under FSDP2; use float32 states, DDP or ZeRO"
        )
    # Not of float64 and of weights with other strides, which are rare.
    in_8_bits = in_8_bits and parameter.dtype != torch.float64 and parameter.is_contiguous()
    moments = MOMENTS["adamw" if group.get("second_moment") == "elements" else group["rule"]]
    dtypes = {key: CODES[key] if in_8_bits else momentum_dtype(parameter) for key in moments}
    # float32 is as wide as its update
    if group.get("compensation") == "kahan" and parameter.dtype == torch.bfloat16:
        dtypes["compensation"] = COMPENSATION_DTYPE
    if not in_8_bits:
        return StateForm(dtypes, dict(map_state), None)
    blocks, number = new_blocks(
        [(0, parameter.numel(), parameter.numel())] if parts is None else parts
    )
    return StateForm(
        dtypes, {**{f"{key}_scale": (number,) for key in moments}, **map_state}, blocks
    )


def new_state(parameter: Tensor, form: StateForm) -> dict[str, Tensor]:
    """The state of a parameter before its first step."""
    # float32 by name: under a default dtype of bfloat16 a step count would stay at 256.
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for key, dtype in form.dtypes.items():
        state[key] = torch.zeros_like(parameter, dtype=dtype)
    settings: dict[str, Any] = {"dtype": momentum_dtype(parameter), "device": parameter.device}
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
    return state if form.blocks is None else {**state, "blocks": form.blocks}


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
                f"the checkpoint has no {', '.join(missing)} of {name}; resume from another checkpoint"
            )
        step = (
            torch.as_tensor(s, dtype=torch.float32)
            if isinstance(s := state["step"], int | float | Tensor)
            else None
        )
        if step is None or step.numel() != 1:
            raise ValueError(
                f"the checkpoint's optimizer state has no valid step count for {name}; resume from another checkpoint"
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
                    f"the checkpoint has a {noun} of {shape} for {name} of shape {tuple(parameter.shape)}; "
                    "load a checkpoint of this model"
                )
            # Without torch's own cast to the parameter's dtype, which would round bfloat16's
            # float32 momentum. A tensor that is on the GPU already is not copied: on resuming, a
            # copy would take the state's memory twice.
            value = value.detach().to(parameter.device, dtype, copy=parameter.device.type == "cpu")
            # the weight had other strides when the checkpoint was made
            if value.stride() != parameter.stride():
                value = torch.empty_like(parameter, dtype=dtype).copy_(value)
            loaded[parameter][key] = value
        wrong = [
            key
            for key, shape in form.shapes.items()
            if getattr(state.get(key), "shape", None) != shape
        ]
        saved_blocks = torch.as_tensor(state.get("blocks", -1)).cpu()
        has_scales = not any(key.endswith("_scale") for key in wrong)
        if form.blocks is not None and not (has_scales and torch.equal(saved_blocks, form.blocks)):
            raise ValueError(
                f"the 8-bit states of {name} in the checkpoint are quantized in other blocks than in this optimizer; "
                "resume from another checkpoint"
            )
        if wrong:
            raise ValueError(
                f"the checkpoint lacks this rank's part of the state {wrong[0]} of {name}; resume from another "
                "checkpoint"
            )
        dtype = momentum_dtype(parameter)
        loaded[parameter] |= {
            key: state[key].detach().to(parameter.device, dtype, copy=True) for key in form.shapes
        }
        if form.blocks is not None:
            loaded[parameter]["blocks"] = form.blocks
    return loaded


def momentum_of(state: dict[str, Any]) -> Tensor:
    """The momentum of a whole matrix, decoded from 8 bits if it is stored so.
    state: of a parameter, or saved.
    """
    codes = state["exp_avg"]
    return (
        decoded_range(state, "exp_avg", 0, codes.numel()).view(codes.shape)
        if "blocks" in state
        else codes
    )


def momentum_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's momentum, and of a map's input and output."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
