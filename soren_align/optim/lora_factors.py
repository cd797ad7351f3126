"""What PEFT's own objects say about a parameter: whether it is a LoRA factor, and if not, what it is.

Decided by the layers that PEFT has put into the model, never by shapes or names. peft is looked at only where it has
been imported, so that the optimizers do not need it.
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

FACTOR = "LoRA factor (extension, not in the paper)"


class Adapters:
    """The adapters of one model."""

    def __init__(self, model: nn.Module):
        """ValueError for an adapter that trains and is not LoRA."""
        self._factors: set[nn.Parameter] = set()
        self._others: dict[nn.Parameter, str] = {}
        if "peft" not in sys.modules:
            return
        from peft.tuners.lora import LoraLayer
        from peft.tuners.trainable_tokens import TrainableTokensLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
        from transformers.pytorch_utils import Conv1D

        for path, module in model.named_modules():
            if isinstance(module, AuxiliaryTrainingWrapper):
                for parameter in module.parameters():
                    self._others.setdefault(parameter, "trained whole beside the adapter")
            elif isinstance(module, BaseTunerLayer):
                is_linear = isinstance(module.get_base_layer(), nn.Linear | Conv1D)
                for kind, owner, parameter in _trained(module):
                    if isinstance(module, LoraLayer) and is_linear and _is_factor(kind, owner, parameter):
                        self._factors.add(parameter)
                    elif isinstance(module, LoraLayer | TrainableTokensLayer):
                        self._others[parameter] = f"{kind} of an adapter"
                    else:
                        raise ValueError(f"{path} is an adapter of PEFT's {type(module).__name__}; only LoRA is known")

    def is_factor(self, parameter: nn.Parameter) -> bool:
        """Whether it is A or B of what is added to a linear layer, B A."""
        return parameter in self._factors

    def obstacle(self, parameter: nn.Parameter) -> str | None:
        """Why a parameter of an adapter is not for a spectral map; None for a factor, and for what is no adapter's."""
        return self._others.get(parameter)

    def refuse_unknown(self, parameter: nn.Parameter, name: str) -> None:
        """ValueError for a parameter that is called like a LoRA factor, and that PEFT does not know."""
        if ".lora_" in name and parameter not in self._factors and parameter not in self._others:
            raise ValueError(f"{name} is called like a LoRA factor, but is none of PEFT's; such adapters are not known")


def _trained(layer: Any) -> Iterator[tuple[str, Any, nn.Parameter]]:
    """(PEFT's name of the kind, the module or None, the parameter) of all that trains in an adapter's layer."""
    for kind in layer.adapter_layer_names:
        container = getattr(layer, kind, None)
        for part in container.values() if isinstance(container, nn.ModuleDict | nn.ParameterDict) else ():
            owned = [(None, part)] if isinstance(part, nn.Parameter) else [(part, p) for p in part.parameters()]
            yield from ((kind, owner, p) for owner, p in owned if p.requires_grad)


def _is_factor(kind: str, owner: Any, parameter: nn.Parameter) -> bool:
    return kind in ("lora_A", "lora_B") and isinstance(owner, nn.Linear) and parameter is owner.weight
