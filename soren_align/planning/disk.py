"""The disk space of a run folder: the model, the checkpoints and random starting weights, without tokenizers."""

import math
from typing import Any

from ..recipe import Recipe, compute_dtype, parallel, trains_adapter
from .memory import FLOAT32, ITEMSIZE

_OF_THE_OPTIMIZER = ("optimizer states", "float32 master weights", "Kahan compensation")
"""Components of a rank's memory that a checkpoint contains beside the weights."""


def disk(recipe: Recipe, args: Any, model: Any, ranks: dict[str, Any], num_steps: int) -> dict[str, int]:
    """Return the bytes of the model, of one checkpoint and of the start, and how many checkpoints are left at the end.

    args: TRL's config. model: the outline. ranks: the plan's section "processes".
    """
    has_adapter = trains_adapter(recipe.model)
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad or not has_adapter)
    own_dtype = str(getattr(model.config, "dtype", None) or "float32").removeprefix("torch.")
    saved = FLOAT32 if has_adapter else ITEMSIZE[recipe.run.save_dtype or own_dtype]
    weights = numel * (FLOAT32 if has_adapter else ITEMSIZE[recipe.model.dtype])
    kind, stage = parallel(recipe.run.parallel).kind, parallel(recipe.run.parallel).stage
    if kind == "zero":  # DeepSpeed saves the weights that it computes with, twice unless they are sharded
        weights = numel * ITEMSIZE[compute_dtype(recipe)] * (1 if stage == 3 else 2)
    elif kind == "fsdp2":
        weights = numel * FLOAT32
    num_shards = 1 if kind == "ddp" else ranks["num_processes"]
    states = sum(part["num_bytes"] for part in ranks["memory"] if part["name"] in _OF_THE_OPTIMIZER)
    return {
        "model_bytes": numel * saved,
        "checkpoint_bytes": weights + num_shards * states,
        "num_checkpoints": _num_checkpoints(args, num_steps),
        "start_bytes": numel * FLOAT32 if recipe.model.init_seed is not None else 0,
    }


def _num_checkpoints(args: Any, num_steps: int) -> int:
    """Return the number of checkpoints that are left at the end; transformers saves the last step too."""
    strategy = str(args.save_strategy.value)
    if strategy == "no":
        return 0
    every = args.save_steps if args.save_steps >= 1 else max(1, math.ceil(args.save_steps * num_steps))
    number = math.ceil(num_steps / every) if strategy == "steps" else math.ceil(args.num_train_epochs)
    return min(number, args.save_total_limit or number)
