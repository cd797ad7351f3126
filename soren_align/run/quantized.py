"""Describe the weights of models whose linear layers bitsandbytes has quantized."""

from collections.abc import Iterator
from typing import Any

import torch

_BITS = {"Params4bit": "4bit", "Int8Params": "8bit"}
"""bitsandbytes' classes of weights, by name: it is not imported where nothing is quantized."""


def weight_numel(parameter: torch.Tensor) -> int:
    """Return how many weights a parameter holds: 4-bit ones are packed in pairs, and ZeRO 3 empties
    the tensor.
    """
    # Read from the tensor: numel() of a 4-bit weight is that of its bytes.
    state = getattr(parameter, "quant_state", None)
    return (
        state.shape.numel()
        if state is not None
        else getattr(parameter, "ds_numel", parameter.numel())
    )


def quantization_of(model: torch.nn.Module) -> dict[str, Any] | None:
    """Return what the model's layers hold, for run.json; None if none is quantized.

    All is read from the loaded tensors: a `Quantization` (its dtype: of the frozen weights that are
    not quantized), and the type, number of layers and weights, and bytes.
    """
    layers = list(quantized_layers(model))
    if not layers:
        return None
    names = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
    others = [p for p in model.parameters() if id(p) not in names and not p.requires_grad]
    kinds = [_describe(layer) for layer in layers]
    # One record stands for all layers: what loads the adapter later quantizes every layer in one
    # way.
    assert all(kind == kinds[0] for kind in kinds), "layers that are quantized differently"
    return {
        **kinds[0],
        "dtype": _name(others[0].dtype),
        "num_layers": len(layers),
        "num_weights": sum(weight_numel(layer.weight) for layer in layers),
        "num_bytes": sum(_num_bytes(layer) for layer in layers),
    }


def quantized_layers(model: torch.nn.Module) -> Iterator[Any]:
    """Yield each layer whose weight is quantized, under an adapter too."""
    for module in model.modules():
        if type(module._parameters.get("weight")).__name__ in _BITS:
            yield module


def _describe(layer: Any) -> dict[str, Any]:
    """Return bits and types of one layer."""
    weight = layer.weight
    bits = _BITS[type(weight).__name__]
    if bits == "8bit":
        return {"quantize": bits, "type": _name(weight.dtype), "compute_dtype": "float16"}
    kind = weight.quant_state.quant_type + ", double quantization" * weight.quant_state.nested
    return {"quantize": bits, "type": kind, "compute_dtype": _name(layer.compute_dtype)}


def _num_bytes(layer: Any) -> int:
    """Return the bytes of a layer's codes and scales; constant tables, which are small, are not
    counted.
    """
    weight = layer.weight
    scales = (
        [weight.SCB if weight.SCB is not None else layer.state.SCB]
        if weight.dtype == torch.int8
        else []
    )
    if (state := getattr(weight, "quant_state", None)) is not None:
        scales = [state.absmax, *([state.state2.absmax] if state.nested else [])]
    return sum(tensor.numel() * tensor.element_size() for tensor in (weight, *scales))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
