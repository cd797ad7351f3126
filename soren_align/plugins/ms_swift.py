"""Soren in ms-swift: `--external_plugins FILE --optimizer soren`, where FILE imports this module.

Read at commit 3602360 and in release 4.6.0: the trainer constructs `optimizers_map[name](args,
trainer)` and calls its `create_optimizer(model=None)`. `--optim_args name=muon,aux_lr=1e-5` has
keys of a recipe's section `optimizer`.
"""

from copy import copy
from typing import Any

from swift.optimizers import OptimizerCallback, optimizers_map  # pyright: ignore[reportMissingImports]
from torch import nn

from ..core.errors import UserError
from ..core.yaml import parse_yaml
from ..optim import OptimizerFactory, SpectralOptimizer
from .sharding_callback import ShardingCallback


class SorenCallback(OptimizerCallback):
    """Builds the optimizer over the trainable parameters; learning_rate and the like are those of
    ms-swift.
    """

    def create_optimizer(self, model: nn.Module | None = None) -> SpectralOptimizer:
        """Return the optimizer of the trainer's model.

        Raises UserError for a setting that is no `key=value`, and ValueError for an unknown one.
        """
        trainer: Any = self.trainer
        trainer.add_callback(ShardingCallback())
        # Here alone optim_args have an effect: ours.
        args = copy(self.args)
        args.optim_args = None
        settings = settings_of(self.args.optim_args)
        return OptimizerFactory()(model or trainer.model, args, **settings)


def settings_of(text: str | None) -> dict[str, Any]:
    """The settings in `key=value,key=value`; a value is read as YAML, so that 1e-5 is a number."""
    parts = [part.partition("=") for part in (text or "").replace(" ", "").split(",") if part]
    for key, sign, _ in parts:
        if not sign:
            raise UserError(f"optim_args: found {key!r}; write key=value,key=value")
    return (
        parse_yaml("\n".join(f"{key}: {value}" for key, _, value in parts), "optim_args")[0] or {}
    )


optimizers_map["soren"] = SorenCallback
