"""TRL's SFTConfig and DPOConfig, from a recipe."""

from pathlib import Path
from typing import Any

import torch
from trl import DPOConfig, SFTConfig

from ..errors import UserError, as_user_error
from ..recipe import Parallel, Recipe, accumulation, parallel
from ..run_folder import RunFolder
from ..sharding import start_deepspeed
from ..sharding.ranks import Ranks

CONFIGS = {"sft": SFTConfig, "dpo": DPOConfig, "pretrain": SFTConfig}


def trl_arguments(recipe: Recipe, output_dir: Path, ranks: Ranks) -> SFTConfig | DPOConfig:
    """Return TRL's config object for one of `ranks`: the recipe's `trainer` section, and the keys derived from others.

    Raises UserError if TRL refuses a value, if there is no GPU and no `use_cpu`, and if the launcher started another
    number of processes than accelerate sees.
    """
    on_cpu = bool(recipe.trainer.get("use_cpu"))
    if not (on_cpu or torch.accelerator.is_available()):
        raise UserError(
            "trainer.use_cpu: this machine has no GPU; write `use_cpu: true` and `bf16: false` under trainer"
        )
    shared = parallel(recipe.run.parallel) if ranks.launched else Parallel("ddp")
    derived: dict[str, Any] = {
        "output_dir": str(output_dir),
        "learning_rate": recipe.optimizer.lr,  # only for TRL's logs: the optimizer gets the recipe's section
        "weight_decay": recipe.optimizer.weight_decay,
        "disable_tqdm": True,
        "gradient_accumulation_steps": accumulation(recipe, ranks.num_ranks),
        **_sharding_arguments(shared, on_cpu),
    }
    if recipe.data_task == "sft":
        derived["assistant_only_loss"] = False  # the tokens have their labels; TRL would ask for conversations
    # transformers would have DDP search the graph for parameters without a gradient at every step.
    defaults: dict[str, Any] = {"ddp_find_unused_parameters": False}
    defaults["log_level_replica"] = "passive"  # the other ranks' libraries are as quiet as those of the first
    defaults["run_name"] = RunFolder(recipe.run.output_dir).name
    if recipe.run.early_stopping:
        defaults["metric_for_best_model"] = "loss"  # as transformers, but only with load_best_model_at_end
    if shared.kind == "fsdp2":
        # Otherwise FSDP2 keeps whole gradients until the last micro-batch of a step, instead of 1/N of them.
        defaults["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    with as_user_error("trainer", ValueError, TypeError, ImportError):
        config = CONFIGS[recipe.task](**{**defaults, **recipe.trainer, **derived})
    if config.world_size != ranks.num_ranks:
        # Such as under `accelerate launch --cpu`: each process would train alone on all examples, without a warning.
        raise UserError(
            f"the launcher started {ranks.num_ranks} processes, but the trainer sees {config.world_size}; "
            "start them with --processes N or torchrun"
        )
    return config


def _sharding_arguments(shared: Parallel, on_cpu: bool) -> dict[str, Any]:
    if shared.kind == "zero":
        with as_user_error("run.parallel", ImportError):
            start_deepspeed(on_cpu)
        return {"deepspeed": shared.config}
    if shared.kind == "fsdp2":
        # transformers has another name for accelerate's fsdp_offload_params
        return {"fsdp": True, "fsdp_config": {**shared.config, "cpu_offload": shared.config.get("offload_params")}}
    return {}
