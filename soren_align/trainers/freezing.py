"""Parameters that are not trained: those that `model.freeze` names, and a remedy where others get no gradient."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn
from transformers import TrainerCallback

from ..errors import UserError
from .attached_optimizer import AttachedOptimizer


def freeze(model: nn.Module, globs: Sequence[str]) -> None:
    """Turn off the gradients of every parameter whose name matches one of `globs`, in place."""
    for name, parameter in model.named_parameters():
        if _matches(name, globs):
            parameter.requires_grad_(False)


def refuse_unmatched(model: nn.Module, globs: Sequence[str]) -> None:
    """Raise UserError for a glob that matches no parameter."""
    names = [name for name, _ in model.named_parameters()]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UserError(f"model.freeze: {glob!r} matches no parameter; the first one is called {names[0]}")


def frozen_layers(model: nn.Module, globs: Sequence[str]) -> list[str]:
    """The names of the modules whose `weight` matches one of `globs`: they get no LoRA factors."""
    names = (name for name, _ in model.named_parameters() if name.endswith(".weight") and _matches(name, globs))
    return [name.removesuffix(".weight") for name in names]


class GradientCheck(TrainerCallback):
    """Raises UserError after the first step if a matrix had no gradient. Collective.

    Not before it: a gradient with a NaN is the better reason. Only where gradients are attributes of the parameters,
    which they are not under ZeRO.
    """

    def __init__(self, attached: AttachedOptimizer):
        self.attached, self._pending = attached, attached.parallel != "zero"

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Look for a gradient of every trained parameter, once."""
        if not self._pending:
            return
        self._pending = False
        trained = [(name, p) for name, p in kwargs["model"].named_parameters() if p.requires_grad]
        missing = [name for name, parameter in trained if parameter.grad is None]
        matrices = set(missing).intersection(self.attached.names_of_mapped_parameters)
        if self.attached.ranks.any(bool(matrices)):
            reached = [name for name, parameter in trained if parameter.grad is not None]
            raise UserError(
                f"step 1: {len(missing)} of {len(trained)} trained parameters got no gradient, such as "
                f"{missing[0] if missing else 'on another process'}: the examples do not reach them, as text does not "
                f"reach a model's image encoder. Write `freeze: {common_globs(missing, reached)}` under model"
            )


def common_globs(missing: Iterable[str], reached: Iterable[str]) -> list[str]:
    """The shortest globs, "a.b.*", that match the names in `missing` and none in `reached`; names of a whole model."""
    others, globs = {_without_adapter(name) for name in reached}, []
    for name in map(_without_adapter, missing):
        if not _matches(name, globs):
            ends = [position for position, letter in enumerate(name) if letter == "."]
            prefixes = (name[: end + 1] for end in ends)
            prefix = next((p for p in prefixes if not any(other.startswith(p) for other in others)), None)
            globs.append(f"{prefix}*" if prefix else name)
    return globs


def _without_adapter(name: str) -> str:
    """The name of the weight that a LoRA factor belongs to, in the model without adapter; any other name itself."""
    return re.sub(r"\.lora_[AB]\.\w+", "", name.removeprefix("base_model.model."))


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
