"""What the passes of a step compute and hold, for the plan: activations, operations, and what settings save."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..data import Account
from ..recipe import Recipe, parallel, trainer_value
from ..silence import log_level
from ..trainers.build import as_trl_calls_it
from .passes import Passes

UNCUT = 4096
"""Tokens of a row where nothing cuts it and none is at hand to be counted: a guess."""


@dataclass(frozen=True)
class Compute:
    """Of one process's batch, but the operations, which are those of a whole step on all processes."""

    length: int
    """Tokens of the longest row of a batch: activations are those of a batch full of such."""
    mean_length: float
    """Tokens of a mean row, by which operations are counted."""
    is_counted: bool
    """Whether both come from the data; otherwise they are max_length, the most that they can be."""
    activations: int | None
    """Bytes at the peak, beside weights, gradients and what the optimizer holds."""
    without_checkpointing: int | None
    flops_per_step: int | None
    unknown: str | None = None
    """Why these three are not known: what the architecture's pass on tensors without contents ended in."""

    def as_data(self, map_flops: dict[str, int] | None, steps: int) -> dict[str, Any]:
        """The plan's section "compute"."""
        maps = map_flops["all_ranks"] if map_flops else None
        return {
            "tokens_per_row": round(self.mean_length, 1),
            "tokens_counted": self.is_counted,
            "training_flops_per_step": self.flops_per_step,
            "training_flops": self.flops_per_step and self.flops_per_step * steps,
            "map_share": maps and self.flops_per_step and maps / (self.flops_per_step + maps),
        }


def arithmetic(recipe: Recipe) -> str:
    """The dtype of the passes' products."""
    if recipe.trainer.get("fp16"):
        return "float16"
    return "float32" if recipe.trainer.get("bf16") is False else "bfloat16"  # null: TRL takes bfloat16


def compute(
    recipe: Recipe,
    build_model: Callable[[int, torch.dtype], Any],
    num_blocks: int,
    counted: Account | None,
    batch: int,
    max_length: int | None,
) -> Compute:
    """Found by taking small models of recipe's architecture through a batch of fake tensors; see `passes`."""
    sides = 2 if recipe.task == "dpo" else 1
    longest = max_length or UNCUT
    mean = float(longest)
    if counted and not (recipe.trainer.get("packing") and max_length):  # packed rows are full
        longest = min(counted.lengths["max"], max_length or counted.lengths["max"])
        mean = counted.num_tokens / (counted.num_kept * sides)
    rows = trainer_value(recipe, "per_device_train_batch_size") * sides
    checkpointing = trainer_value(recipe, "gradient_checkpointing")
    dtype = getattr(torch, arithmetic(recipe))
    shared = parallel(recipe.run.parallel).kind != "ddp"  # ZeRO and FSDP2 compute with weights of that dtype
    autocast = None if shared or dtype == torch.float32 else dtype

    def passes(checkpointing: bool) -> Passes:
        def build(num_blocks: int) -> tuple[Any, Any]:
            model = build_model(num_blocks, dtype if shared else getattr(torch, recipe.model.dtype))
            return model, as_trl_calls_it(model, checkpointing)

        return Passes(build, num_blocks, autocast)

    def counts() -> tuple[int, int, int]:
        if num_blocks < 1:
            raise ValueError("its config does not say how many blocks it has (num_hidden_layers)")
        activations = passes(checkpointing).num_bytes(rows, longest)
        length = max(2, round(mean))
        flops = passes(checkpointing).num_flops(1, length)
        if recipe.task == "dpo":  # the reference model's pass, at each step or once before
            flops += passes(False).num_flops(1, length, backward=False)
        without = passes(False).num_bytes(rows, longest) if checkpointing else activations
        return activations, without, flops * batch * sides

    about = {"length": longest, "mean_length": mean, "is_counted": counted is not None}
    try:
        # Without torch's own traceback of an operation that fails on fake tensors.
        with log_level(logging.CRITICAL, "torch._subclasses.fake_tensor"):
            return Compute(**about, **dict(zip(_COUNTS, counts(), strict=True)))
    except Exception as error:  # an architecture's code, which need not work without contents; training may
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        return Compute(**about, **dict.fromkeys(_COUNTS), unknown=reason)


_COUNTS = ("activations", "without_checkpointing", "flops_per_step")
