"""The global batch size: micro-batch size x gradient accumulation steps x processes."""

from typing import Any

from ..errors import UserError
from . import trl_config
from .sections import Recipe


def accumulation(recipe: Recipe, num_ranks: int) -> int:
    """Micro-batches per optimizer step and process.

    With run.global_batch_size it follows from the number of processes. Raises UserError if that number does not fit.
    """
    batch = recipe.run.global_batch_size
    if batch is None:
        return trainer_value(recipe, "gradient_accumulation_steps")
    per_device = trainer_value(recipe, "per_device_train_batch_size")
    micro_batch = per_device * num_ranks
    if batch % micro_batch:
        processes = f"{num_ranks} processes" if num_ranks > 1 else "one process"
        if batch % num_ranks:
            remedy = f"choose a run.global_batch_size that {num_ranks} divides, or another number of processes"
        else:
            share = batch // num_ranks
            largest = max(d for d in range(1, min(share, per_device) + 1) if share % d == 0)
            remedy = f"write trainer.per_device_train_batch_size: {largest}, or another divisor of {share}"
        raise UserError(
            f"run.global_batch_size: {batch} is no multiple of {micro_batch} ({processes} with "
            f"trainer.per_device_train_batch_size {per_device}); {remedy}"
        )
    return batch // micro_batch


def global_batch(recipe: Recipe, num_ranks: int) -> tuple[int, str]:
    """Examples per optimizer step, or packed sequences, also as a product: (64, "2 processes x 16 examples x
    accumulation 2")."""
    steps, per_device = accumulation(recipe, num_ranks), trainer_value(recipe, "per_device_train_batch_size")
    processes = "1 process" if num_ranks == 1 else f"{num_ranks} processes"
    return num_ranks * per_device * steps, f"{processes} x {per_device} {batch_unit(recipe)} x accumulation {steps}"


def batch_unit(recipe: Recipe) -> str:
    """The elements of a batch: examples, or packed sequences of them."""
    return "sequences" if recipe.trainer.get("packing") else "examples"


FEW_STEPS = 10
"""Optimizer steps of a whole run below which a notice is given."""


def few_steps(recipe: Recipe, num_steps: int, num_ranks: int) -> str | None:
    """A notice about a run of less than FEW_STEPS optimizer steps; None if there are more, or max_steps sets them."""
    if num_steps >= FEW_STEPS or trainer_value(recipe, "max_steps") > 0:
        return None
    size, _ = global_batch(recipe, num_ranks)
    key = "run.global_batch_size" if recipe.run.global_batch_size else "trainer.gradient_accumulation_steps"
    if not recipe.run.global_batch_size and trainer_value(recipe, "gradient_accumulation_steps") == 1:
        key = "trainer.per_device_train_batch_size"
    return (
        f"the whole run has {num_steps} optimizer step{'s' * (num_steps != 1)} of {size} {batch_unit(recipe)}, in "
        f"which a model hardly changes; for more steps lower {key}, or raise trainer.num_train_epochs"
    )


def refuse_no_batch(recipe: Recipe, num_examples: int, num_ranks: int) -> None:
    """Raise UserError if there is less than one batch of examples, or packed sequences, and incomplete batches are
    dropped."""
    micro_batch = trainer_value(recipe, "per_device_train_batch_size") * num_ranks
    if recipe.trainer.get("dataloader_drop_last") and num_examples < micro_batch:
        raise UserError(
            f"trainer.dataloader_drop_last: {num_examples} {batch_unit(recipe)} are less than one batch of "
            f"{micro_batch}; leave it out, or lower trainer.per_device_train_batch_size"
        )


def trainer_value(recipe: Recipe, key: str) -> Any:
    """The value of `trainer.key`: the recipe's, or TRL's default."""
    return recipe.trainer.get(key, trl_config.fields(recipe.task)[key].default)
