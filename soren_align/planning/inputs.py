"""What a plan is computed from: the model's config always, tokenizer and examples where they are available."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from ..data import Account
from ..errors import OutOfReach
from ..recipe import Recipe
from ..run_folder import RunFolder
from ..trainers import adapters
from ..trainers.library_errors import as_user_error
from ..trainers.training_setup import TrainingSetup, set_up_training
from . import offline
from .processes import Frozen


@dataclass(frozen=True)
class Inputs:
    """The recipe's model config and examples. `ready` is None without access to the hub."""

    config: Any
    start: str
    ready: TrainingSetup | None
    num_examples: int
    """Those that are trained on, or the published number."""
    notices: tuple[str, ...] = ()

    @property
    def account(self) -> Account | None:
        """Of the tokenized examples."""
        return self.ready.account if self.ready else None


def load_inputs(recipe: Recipe, folder: RunFolder, on_examples: Callable[[int], object] | None) -> Inputs:
    """From files, the hub or its cache; from what the package ships where the hub is out of reach.

    recipe: as `on_this_machine` returns it. Raises OutOfReach if the package ships nothing about model or dataset.
    """
    name, sources = recipe.model.name_or_path, recipe.data.sources
    try:
        ready = set_up_training(recipe, folder, on_examples)
        base, revision = adapters.base_model(ready.start, recipe.model.revision)
        with as_user_error(f"model {name}"):
            config = AutoConfig.from_pretrained(base, trust_remote_code=False, revision=revision)
    except OutOfReach:
        config_folder, num_published = offline.model_config(name), offline.num_examples(recipe.data)
        if config_folder is None or num_published is None:
            raise
    else:
        return Inputs(config, ready.start, ready, ready.account.num_kept, ready.notices)
    paths = " and ".join([name, *dict.fromkeys(source.path for source in sources)])
    notice = (
        f"the hub is out of reach, and not all of {paths} is cached: the plan uses published numbers of parameters and "
        "examples; tokens are not counted, and neither chat template nor evaluation is checked"
    )
    return Inputs(AutoConfig.from_pretrained(config_folder), name, None, num_published, (notice,))


def on_this_machine(recipe: Recipe) -> Recipe:
    """The recipe for one process on this machine, with or without a GPU, and without random weights to create."""
    trainer = recipe.trainer
    if not (trainer.get("use_cpu") or torch.accelerator.is_available()):
        trainer = {**trainer, "use_cpu": True, "bf16": False, "fp16": False, "tf32": None}
    model, run = recipe.model, recipe.run
    return recipe.model_copy(
        update={
            "model": model.model_copy(update={"init_seed": None}),
            "trainer": trainer,
            "run": run.model_copy(update={"parallel": "ddp"}),
        }
    )


def count_frozen(recipe: Recipe, model: Any) -> Frozen:
    """The parameters of a model that are not trained.

    Four bits of NF4 come with a scale of 8 bits per 64 numbers, and 32 bits per 256 scales.
    """
    linear = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    head = model.get_output_embeddings()
    is_quantized = recipe.model.lora is not None and recipe.model.lora.quantize == "4bit"
    itemsize, quantized_itemsize = getattr(torch, recipe.model.dtype).itemsize, 0.5 + 1 / 64 + 4 / (64 * 256)
    numel, num_bytes = 0, 0.0
    for parameter in (p for p in model.parameters() if not p.requires_grad):
        is_narrow = is_quantized and id(parameter) in linear and parameter is not head.weight
        numel += parameter.numel()
        num_bytes += parameter.numel() * (quantized_itemsize if is_narrow else itemsize)
    return Frozen(numel, round(num_bytes))
