"""How many rows make an optimizer step, on how many processes."""

from typing import Any

from ..errors import UserError
from . import trl_config
from .sections import Recipe


def accumulation(recipe: Recipe, num_ranks: int) -> int:
    """Micro-batches per optimizer step and process.

    With run.global_batch_size it follows from the number of processes; UserError if the rows cannot be dealt evenly.
    """
    wanted = recipe.run.global_batch_size
    if wanted is None:
        return trainer_value(recipe, "gradient_accumulation_steps")
    per_device = trainer_value(recipe, "per_device_train_batch_size")
    at_once = per_device * num_ranks
    if wanted % at_once:
        taken = f"{num_ranks} processes" if num_ranks > 1 else "one process"
        if wanted % num_ranks:
            remedy = f"choose a run.global_batch_size that {num_ranks} divides, or another number of processes"
        else:
            share = wanted // num_ranks
            fits = max(d for d in range(1, min(share, per_device) + 1) if share % d == 0)
            remedy = f"write trainer.per_device_train_batch_size: {fits}, or another divisor of {share}"
        raise UserError(
            f"run.global_batch_size: {wanted} rows cannot be made of {at_once} at a time ({taken} with "
            f"trainer.per_device_train_batch_size {per_device}); {remedy}"
        )
    return wanted // at_once


def rows_per_step(recipe: Recipe, num_ranks: int) -> tuple[int, str]:
    """Rows per optimizer step, and how they come about: (64, "2 processes x 16 rows x accumulation 2")."""
    steps, per_device = accumulation(recipe, num_ranks), trainer_value(recipe, "per_device_train_batch_size")
    processes = "1 process" if num_ranks == 1 else f"{num_ranks} processes"
    return num_ranks * per_device * steps, f"{processes} x {per_device} rows x accumulation {steps}"


def refuse_no_batch(recipe: Recipe, num_rows: int, num_ranks: int) -> None:
    """UserError if all rows together are less than a batch, and what is less than a batch is to be dropped."""
    at_once = trainer_value(recipe, "per_device_train_batch_size") * num_ranks
    if recipe.trainer.get("dataloader_drop_last") and not recipe.trainer.get("packing") and num_rows < at_once:
        raise UserError(
            f"trainer.dataloader_drop_last: {num_rows} rows make no whole batch of {at_once}; leave it out, or lower "
            "trainer.per_device_train_batch_size"
        )


def trainer_value(recipe: Recipe, key: str) -> Any:
    """What `trainer.key` is: the recipe's word, or TRL's default."""
    return recipe.trainer.get(key, trl_config.fields(recipe.task)[key].default)
