"""Optimizer steps and learning rates of a recipe, as transformers computes them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import get_scheduler

from ..errors import as_user_error
from ..recipe import Recipe, accumulation, global_batch
from .processes import steps_per_epoch


@dataclass(frozen=True)
class Schedule:
    """The steps of a training run."""

    global_batch_size: int
    per_epoch: int | None
    """None for a stream, whose examples are not counted."""
    total: int
    rates: list[dict[str, float]]
    """{"step", "lr", "aux_lr"} of every step, from 1."""

    def as_json(self, args: Any) -> dict[str, Any]:
        """The plan's section "steps". args: TRL's config."""
        return {
            "global_batch_size": self.global_batch_size,
            "per_epoch": self.per_epoch,
            "total": self.total,
            "num_epochs": self.per_epoch and round(self.total / self.per_epoch, 2),
            "lr_scheduler_type": str(args.lr_scheduler_type.value),
            "num_warmup_steps": args.get_warmup_steps(self.total),
        }

    def shown_rates(self, args: Any) -> list[dict[str, float]]:
        """Of the first step, the end of the warm-up, the middle and the last step."""
        shown = {1, args.get_warmup_steps(self.total) + 1, self.total // 2, self.total}
        return [rate for rate in self.rates if rate["step"] in shown]


def schedule(recipe: Recipe, args: Any, num_sequences: int, num_ranks: int) -> Schedule:
    """The schedule of a recipe on `num_ranks` processes. args: TRL's config. num_sequences: of an epoch."""
    batch_size, _ = global_batch(recipe, num_ranks)
    per_device, accumulated = args.per_device_train_batch_size, accumulation(recipe, num_ranks)
    if recipe.data.streaming:
        return Schedule(batch_size, None, args.max_steps, _rates(recipe, args, args.max_steps))
    per_epoch = steps_per_epoch(num_sequences, per_device, accumulated, num_ranks)
    total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    return Schedule(batch_size, per_epoch, total, _rates(recipe, args, total))


def _rates(recipe: Recipe, args: Any, num_steps: int) -> list[dict[str, float]]:
    peaks = [recipe.optimizer.lr, recipe.optimizer.aux_lr or recipe.optimizer.lr]
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in peaks], lr=peaks[0])
    with as_user_error("trainer.lr_scheduler_type", ValueError, TypeError, ArithmeticError):
        scheduler: Any = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            args.get_warmup_steps(num_steps),
            num_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs or {},
        )
    # One that follows the loss is planned without any decrease.
    follows_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    rates = []
    for step in range(1, num_steps + 1):
        lr, aux_lr = (group["lr"] for group in optimizer.param_groups)
        rates.append({"step": step, "lr": lr, "aux_lr": aux_lr})
        optimizer.step()
        if not follows_loss:
            scheduler.step()
    return rates
