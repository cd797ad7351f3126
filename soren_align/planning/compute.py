"""What the passes of a step compute and hold, for the plan: activations, operations, and what settings save."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..data import Account
from ..recipe import Recipe, parallel, trainer_value
from ..trainers.build import as_trl_calls_it
from .passes import Passes, measure


@dataclass(frozen=True)
class Compute:
    """Of one process's batch, but the operations, which are those of a whole step on all processes."""

    length: int
    """Tokens of the longest row of a batch: activations are those of a batch full of such."""
    mean_length: float
    """Tokens of a mean row, by which operations are counted."""
    is_counted: bool
    """Whether both come from the data; otherwise they are max_length, the most that they can be."""
    activations: int
    """Bytes at the peak, beside weights, gradients and what the optimizer holds."""
    without_checkpointing: int
    flops_per_step: int

    def as_data(self, map_flops: dict[str, int] | None, steps: int) -> dict[str, Any]:
        """The plan's section "compute"."""
        maps = map_flops["all_ranks"] if map_flops else None
        return {
            "tokens_per_row": round(self.mean_length, 1),
            "tokens_counted": self.is_counted,
            "training_flops_per_step": self.flops_per_step,
            "training_flops": self.flops_per_step * steps,
            "map_share": maps and maps / (self.flops_per_step + maps),
        }


def compute(
    recipe: Recipe,
    build_model: Callable[[int], Any],
    num_blocks: int,
    counted: Account | None,
    batch: int,
    max_length: int | None,
) -> Compute:
    """Found by taking small models of recipe's architecture through a batch of fake tensors; see `passes`."""
    sides = 2 if recipe.task == "dpo" else 1
    longest = max_length or 1024
    mean = float(longest)
    if counted:
        longest = min(counted.lengths["max"], max_length or counted.lengths["max"])
        mean = counted.num_tokens / (counted.num_kept * sides)
    rows = trainer_value(recipe, "per_device_train_batch_size") * sides
    checkpointing = trainer_value(recipe, "gradient_checkpointing")
    half = recipe.trainer.get("bf16") is not False and not recipe.trainer.get("use_cpu")
    shares_half = parallel(recipe.run.parallel).kind != "ddp" and half  # ZeRO and FSDP2 compute with half weights
    arithmetic = torch.bfloat16 if half and not shares_half else None

    def run(checkpointing: bool, length: int, rows: int, backward: bool = True) -> Passes:
        def build(num_blocks: int) -> tuple[Any, Any]:
            model = build_model(num_blocks)
            if shares_half:
                model = model.to(torch.bfloat16)
            return model, as_trl_calls_it(model, checkpointing)

        return measure(build, num_blocks, rows=rows, length=length, arithmetic=arithmetic, backward=backward)

    at_the_longest = run(checkpointing, longest, rows)
    other = run(not checkpointing, longest, rows)
    flops = run(checkpointing, max(2, round(mean)), 1).num_flops
    if recipe.task == "dpo":  # the reference model's pass, at each step or once before
        flops += run(False, max(2, round(mean)), 1, backward=False).num_flops
    return Compute(
        length=longest,
        mean_length=mean,
        is_counted=counted is not None,
        activations=at_the_longest.num_bytes,
        without_checkpointing=other.num_bytes if checkpointing else at_the_longest.num_bytes,
        flops_per_step=flops * batch * sides,
    )
