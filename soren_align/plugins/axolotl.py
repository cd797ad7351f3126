"""Soren in Axolotl: `plugins: [soren_align.plugins.axolotl.SorenPlugin]`, with settings under
`soren_align:`.

Read at commit 067b021 and in release 0.19.0. Axolotl declares a hook `create_optimizer` and never
calls it; it calls `post_trainer_create(cfg, trainer)` after the trainer is constructed, and its
trainers call `factory()(model, args, **settings)` for `trainer.optimizer_cls_and_kwargs`.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel

from ..core.errors import UserError
from ..optim import OptimizerFactory, completed_settings
from .sharding_callback import ShardingCallback

IGNORED = ("lr_groups", "embedding_lr", "embedding_lr_scale", "loraplus_lr_ratio")
"""Axolotl's keys about parameter groups, which its trainers do not apply to the optimizer of a
factory."""


class SorenArgs(BaseModel):
    """The keys that the plug-in adds to Axolotl's YAML."""

    soren_align: str | dict[str, Any] | None = None
    """The optimizer's name, or keys of a recipe's section `optimizer`; learning_rate and the like
    are Axolotl's."""


class SorenPlugin(BasePlugin):
    """Gives the trainer a factory in place of its optimizer."""

    def get_input_args(self) -> str:
        """The path of the model of the added keys."""
        return f"{__name__}.{SorenArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Set the factory and its settings. Raises UserError for keys that would have no effect."""
        # Axolotl has chosen an optimizer of its own: ours would silently replace the one of
        # its YAML.
        if trainer.optimizer_cls_and_kwargs is not None:
            raise UserError(
                f"optimizer: is {cfg.optimizer}, which has no effect with SorenPlugin; remove this"
                " key, and name the optimizer with soren_align: {name: muon}"
            )
        if keys := [key for key in IGNORED if getattr(cfg, key) is not None]:
            raise UserError(
                f"{', '.join(keys)}: has no effect with SorenPlugin; remove this key. The learning"
                " rate of the parameters that AdamW updates is soren_align: {aux_lr: ...}"
            )
        settings = completed_settings(cfg.soren_align or {}, trainer.args)
        trainer.optimizer_cls_and_kwargs = (OptimizerFactory, settings)
        trainer.add_callback(ShardingCallback())
