"""Read the inputs of a plan: config, tokenizer and examples."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from ..core.errors import OutOfReach
from ..data import DatasetStats
from ..recipe import Recipe
from ..run.folder import RunFolder
from ..training.adapters import add_empty_adapter, refuse_unmatched
from ..training.model import load_config
from ..training.setup import TrainingSetup, set_up_training
from . import offline
from .flops import build_model


@dataclass(frozen=True)
class Inputs:
    """The recipe's model config and examples. `ready` is None without access to the hub."""

    config: Any
    start: str
    ready: TrainingSetup | None
    num_examples: int
    """The number of examples that are trained on, or the published one."""
    num_sequences: int
    """Sequences of an epoch: packed ones, where examples are packed and can be read; otherwise
    examples."""
    notices: tuple[str, ...] = ()
    seconds: float = 0.0
    """Of reading and tokenizing, now."""

    @property
    def account(self) -> DatasetStats | None:
        """The counts of the tokenized examples."""
        return self.ready.account if self.ready else None


def load_inputs(
    recipe: Recipe, folder: RunFolder, on_examples: Callable[[int, int], object] | None
) -> Inputs:
    """Read files, the hub or its cache; where the hub is out of reach, what the package ships.

    recipe: as `on_this_machine` returns it. Raises OutOfReach if the package ships nothing about
    model or dataset.
    """
    name, sources = recipe.model.name_or_path, recipe.data.sources
    # The real preparation, not a copy of it: what it refuses stops `plan` as it would stop
    # training.
    start = time.monotonic()
    try:
        ready = set_up_training(recipe, folder, on_examples)
        config = load_config(recipe)
    except OutOfReach:
        config_folder, num_published = offline.model_config(name), offline.num_examples(recipe.data)
        if config_folder is None or num_published is None:
            raise
    else:
        num_kept = ready.account.num_kept
        num_sequences = ready.packing.num_sequences if ready.packing else num_kept
        seconds = time.monotonic() - start
        return Inputs(config, ready.start, ready, num_kept, num_sequences, ready.notices, seconds)
    # Out of reach: sizes are known from the package, tokens are not.
    paths = " and ".join([name, *dict.fromkeys(source.path for source in sources)])
    notice = (
        f"the hub is out of reach, and a part of {paths} is not cached. The plan uses published"
        " numbers of parameters and examples, counts no tokens, and checks neither the chat"
        " template nor the evaluation"
    )
    config = AutoConfig.from_pretrained(config_folder)
    return Inputs(config, name, None, num_published, num_published, (notice,))


def outline(
    recipe: Recipe,
    config: Any,
    start: str,
    blocks: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The recipe's model without weights, with frozen parameters and adapter.
    blocks: see `build_model`.

    start: folder or hub name of the starting checkpoint. Call it on the meta device.
    """
    frozen = () if recipe.model.lora else recipe.model.freeze
    model = build_model(config, blocks, dtype, frozen, recipe.model.attn_implementation)
    if blocks is None:
        refuse_unmatched(model, recipe.model.freeze)
    return add_empty_adapter(model, recipe, start)


def on_this_machine(recipe: Recipe) -> Recipe:
    """The recipe for one process on this machine: with or without a GPU, with the attention that it
    has, and without random weights to create."""
    trainer = recipe.trainer
    # A laptop plans a run for GPUs: TRL's config would refuse bf16 and tf32 without one.
    if not (trainer.get("use_cpu") or torch.accelerator.is_available()):
        trainer = {**trainer, "use_cpu": True, "bf16": False, "fp16": False, "tf32": None}
    model = recipe.model.model_copy(update={"init_seed": None, "attn_implementation": None})
    run = recipe.run.model_copy(update={"parallel": "ddp"})
    return recipe.model_copy(update={"model": model, "trainer": trainer, "run": run})


def count_frozen(recipe: Recipe, model: Any) -> tuple[int, int]:
    """Numbers and bytes of the parameters of a model that are not trained, in bitsandbytes' formats
    if quantized.
    """
    # bitsandbytes quantizes linear layers, and transformers leaves the head out.
    linear = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    head = model.get_output_embeddings()
    itemsize = getattr(torch, recipe.model.dtype).itemsize
    numel = num_bytes = 0
    for parameter in (p for p in model.parameters() if not p.requires_grad):
        quantize = (
            recipe.model.quantize
            if id(parameter) in linear and parameter is not head.weight
            else None
        )
        number = parameter.numel()
        numel += number
        if quantize == "8bit":  # LLM.int8: a scale of 32 bits per row
            num_bytes += number + 4 * parameter.shape[0]
        elif quantize:  # NF4: a scale of 8 bits per 64 weights, and 32 bits per 256 scales
            num_scales = -(-number // 64)
            num_bytes += -(-number // 2) + num_scales + 4 * -(-num_scales // 256)
        else:
            num_bytes += number * itemsize
    return numel, num_bytes
