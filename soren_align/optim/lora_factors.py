"""The LoRA factors of a model, and the other parameters of its PEFT adapters.

They are recognized by PEFT's layers in the model, not by shapes or names. peft is used only if it has been imported, so
that the optimizers do not need it.
"""

import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import nn

FACTOR = "LoRA factor (extension, not in the paper)"


def adapter_parameters(model: nn.Module) -> "AdapterParameters":
    """The parameters of the model's adapters. Raises ValueError for a trainable adapter that is not LoRA."""
    factors: set[nn.Parameter] = set()
    others: dict[nn.Parameter, str] = {}
    if "peft" not in sys.modules:
        return AdapterParameters(factors, others)
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper
    from transformers.pytorch_utils import Conv1D

    for path, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            for parameter in module.parameters():
                others.setdefault(parameter, "trained whole beside the adapter")
        elif isinstance(module, BaseTunerLayer):
            is_linear = isinstance(module.get_base_layer(), nn.Linear | Conv1D)
            for kind, owner, parameter in _trainable(module):
                if isinstance(module, LoraLayer) and is_linear and _is_factor(kind, owner, parameter):
                    factors.add(parameter)
                elif isinstance(module, LoraLayer | TrainableTokensLayer):
                    others[parameter] = f"{kind} of an adapter"
                else:
                    raise ValueError(f"{path} is an adapter of PEFT's {type(module).__name__}; only LoRA is supported")
    return AdapterParameters(factors, others)


@dataclass(frozen=True)
class AdapterParameters:
    """The LoRA factors of linear layers, A and B, and the other parameters of adapters with the kind of each."""

    factors: Set[nn.Parameter]
    others: Mapping[nn.Parameter, str]

    def is_factor(self, parameter: nn.Parameter) -> bool:
        """Whether it is A or B of an update B A to a linear layer."""
        return parameter in self.factors

    def obstacle(self, parameter: nn.Parameter) -> str | None:
        """The reason why a parameter of an adapter is not for the spectral rule; None for all other parameters."""
        return self.others.get(parameter)

    def refuse_unknown(self, parameter: nn.Parameter, name: str) -> None:
        """Raise ValueError for a parameter that has a LoRA factor's name and is in none of PEFT's layers."""
        if ".lora_" in name and parameter not in self.factors and parameter not in self.others:
            raise ValueError(f"{name} is called like a LoRA factor, but is none of PEFT's; such adapters are not known")


def _trainable(layer: Any) -> Iterator[tuple[str, Any, nn.Parameter]]:
    """(PEFT's name of the kind, the module or None, the parameter) of every trainable parameter of an adapter layer."""
    for kind in layer.adapter_layer_names:
        container = getattr(layer, kind, None)
        for part in container.values() if isinstance(container, nn.ModuleDict | nn.ParameterDict) else ():
            owned = [(None, part)] if isinstance(part, nn.Parameter) else [(part, p) for p in part.parameters()]
            yield from ((kind, owner, p) for owner, p in owned if p.requires_grad)


def _is_factor(kind: str, owner: Any, parameter: nn.Parameter) -> bool:
    return kind in ("lora_A", "lora_B") and isinstance(owner, nn.Linear) and parameter is owner.weight
