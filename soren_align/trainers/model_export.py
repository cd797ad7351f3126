"""The weights to save: unsharded, in the dtype of the model folder, from the weights that the optimizer updates."""

import collections
import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..files import write
from ..optim import chunks, copied_to_cpu, master_weights

CHANGED_BY_TRAINING = ("use_cache", "output_router_logits")
"""Settings of a model's config that transformers and TRL change, and that no training should save."""
_MISSING = object()
Weight = tuple[str, Tensor, Tensor | None]
"""Name as in `state_dict`, tensor, compensation."""


def export_weights(weights: Iterable[Weight], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return a state dict in `dtype` (None: unchanged) on the CPU. Raises UserError if a weight does not fit in it.

    `weights` is always read to its end, also after an error: it may be collective, and the other ranks would wait.
    """
    try:  # one tensor at a time, so that each wider copy is freed before the next tensor is gathered
        return {name: export_weight(name, tensor, compensation, dtype) for name, tensor, compensation in weights}
    finally:
        collections.deque(weights, maxlen=0)


def export_weight(name: str, tensor: Tensor, compensation: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Return one weight, its compensation added, in `dtype` on the CPU; rounded in chunks on its own device."""
    if dtype is None or not tensor.is_floating_point():
        return tensor
    if compensation is None and tensor.dtype == dtype:
        return tensor.cpu()
    rounded = copied_to_cpu(tensor, compensation, dtype)
    if dtype == torch.float16:
        for here, part, rest in chunks(rounded, tensor, compensation):
            if not torch.equal(here.isfinite(), master_weights(part, rest).isfinite().cpu()):
                raise UserError(f"run.save_dtype: float16 ends at 65504, {name} exceeds it; write bfloat16 or float32")
    return rounded


def unsharded_weights(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Weight]:
    """Yield the parameters of an unsharded model, each once, with their compensation, and its buffers."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach(), optimizer.state.get(parameter, {}).get("compensation")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name not in parameters:
            yield name, tensor, None


def changeable_settings(config: Any) -> list[tuple[Any, str, Any]]:
    """(config, key, value) of the settings that training changes for itself, of a model's config and its parts."""
    configs = [] if config is None else [config, config.get_text_config()]
    return [(c, key, getattr(c, key, _MISSING)) for c in configs for key in CHANGED_BY_TRAINING]


@contextlib.contextmanager
def restored_settings(settings: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within this context, the configs have these values again."""
    settings = list(settings)
    changed = [(config, key, getattr(config, key, _MISSING)) for config, key, _ in settings]
    _set(settings)
    try:
        yield
    finally:
        _set(changed)


def _set(settings: Iterable[tuple[Any, str, Any]]) -> None:
    for config, key, value in settings:
        if value is not _MISSING:
            setattr(config, key, value)
        elif hasattr(config, key):
            delattr(config, key)


def write_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Set the dtype in a model folder's config.json: transformers writes that of the model in memory."""
    file = folder / "config.json"
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        write(file, json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")
