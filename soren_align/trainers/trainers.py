"""TRL's SFTTrainer and DPOTrainer, stepping with our optimizers.

TRL offers no common way in: SFTTrainer takes `optimizer_cls_and_kwargs`, DPOTrainer does not, and DeepSpeed calls
`create_optimizer` itself. So that one method is overridden, in a mixin for both, and calls the one factory.
"""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import DPOTrainer, SFTTrainer

from ..optim import build_optimizer
from ..recipe import UserError
from . import checkpoints
from .watch import Watch


class SorenTrainerMixin(Trainer):
    """Put before a TRL trainer: builds the optimizer, seals checkpoints, measures."""

    def __init__(
        self,
        *args: Any,
        optimizer_settings: dict[str, Any],
        origin: dict[str, Any] | None = None,
        metrics: Path | None = None,
        **kwargs: Any,
    ):
        """optimizer_settings: keywords of `soren_align.optim.build_optimizer` (name, lr, aux_lr, ...).

        origin: what checkpoints belong to; written into each and compared on resuming.
        metrics: a .jsonl file that gets a line per log.
        """
        self.optimizer_settings = optimizer_settings
        self.origin = origin or {}
        super().__init__(*args, **kwargs)
        # Built once to look at: a model that the optimizer cannot take is refused before training, and what really
        # steps is compared with it then.
        trained: Any = self.model
        reference = build_optimizer(trained, **optimizer_settings)
        self.reference_groups = reference.param_groups
        self.watch = Watch(self, type(reference), metrics)
        self.watch.remember_start(trained)
        self.add_callback(self.watch)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """The recipe's optimizer over every trainable parameter."""
        if self.optimizer is None:
            whole: Any = self.model if model is None else model
            self.optimizer = build_optimizer(whole, **self.optimizer_settings)
        return self.optimizer

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # transformers looks for the end only after a step: resumed at its last one, it would take one too many.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's, with the tokens counted."""
        mask = inputs.get("attention_mask")
        self.watch.tokens += mask.sum() if mask is not None else inputs["input_ids"].numel()
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's, with our measurements beside the loss; collective, as TRL's is."""
        if "loss" in logs:
            tokens: Any = torch.as_tensor(int(self.watch.tokens), device=self.args.device)
            logs.update(self.watch.measures(int(self.accelerator.reduce(tokens, "sum"))))  # pyright: ignore
            self._refuse_drift(logs["relative_change"])
        super().log(logs, *args, **kwargs)

    def _refuse_drift(self, change: float) -> None:
        # DDP averages gradients only where the loss is computed through its wrapper. Where something goes around it,
        # each rank trains a model of its own and the first one's is saved. 1e-6: GPUs of two kinds may sum differently.
        everywhere: Any = self.accelerator.gather(torch.tensor([change], device=self.args.device))
        least, most = float(everywhere.min()), float(everywhere.max())
        if not math.isclose(least, most, rel_tol=1e-6):
            raise UserError(
                f"step {self.state.global_step}: the ranks' weights have walked apart (relative_change {least:g} to "
                f"{most:g}): their gradients were not averaged. A loss that goes around DDP does this; run it in one "
                "process"
            )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None per checkpoint: run.json says more than TRL's card."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Rotation waits for the seal: transformers deletes the old checkpoint before anyone knows that the new one
        # is complete, so that a kill between the two leaves none.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()  # each rank writes the state of its random numbers
        if not self.args.should_save:
            return
        folder = Path(str(self.args.output_dir))
        checkpoints.seal(folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}", self.origin)
        rotate_checkpoints(
            output_dir=str(folder),
            save_total_limit=limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=False,
        )


class SorenSFTTrainer(SorenTrainerMixin, SFTTrainer):
    """trl.SFTTrainer with an optimizer of ours; see SorenTrainerMixin for the added arguments."""


class SorenDPOTrainer(SorenTrainerMixin, DPOTrainer):
    """trl.DPOTrainer with an optimizer of ours; see SorenTrainerMixin for the added arguments."""
