"""LoRA adapters: created or loaded for training, saved in float32, merged into whole models.

PEFT stores them and TRL trains them; which of their tensors are mapped is decided in optim/routing.py.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from ..errors import UserError, as_user_error
from ..files import remove, rename_durably, write
from ..quantized_weights import dequantized, quantization_of
from ..recipe import QUANTIZATION_RECORD, Recipe, adapter_config, is_local, load_resolved, recorded_quantization
from ..run_folder import MERGED_FROM, RunFolder
from ..weights import load_adapter, load_config, load_model, load_tokenizer, make_savable_, refuse_slow_patterns
from .disk_space import write_errors
from .freezing import frozen_layers

MAMBA_TYPES = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Whose out_proj, conv1d and dt_proj cannot be adapted: their weights are read without calling the layers."""


def base_model(start: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return (folder or hub name, revision) of the whole model to load: an adapter's base, or `start` itself.

    A folder is returned as an absolute path: adapters store it, and are loaded from other working directories.
    """
    config = adapter_config(start)
    name, revision = (config["base_model_name_or_path"], config.get("revision")) if config else (start, revision)
    return (str(Path(name).resolve()) if is_local(name) else name), revision


def lora_config(recipe: Recipe, model: PreTrainedModel) -> LoraConfig | None:
    """Return the recipe's new adapter as a config of PEFT; None if it has no `model.lora`."""
    lora = recipe.model.lora
    if lora is None:
        return None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha or lora.r,  # pyright: ignore[reportArgumentType] (PEFT declares int, and divides it by r)
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        exclude_modules=_layers_without_factors(recipe, model) or None,
        modules_to_save=lora.modules_to_save or None,
        # Otherwise an embedding that is tied to the head would be trained as embedding and not as head.
        ensure_weight_tying=bool(lora.modules_to_save) and bool(model.config.tie_word_embeddings),
        revision=getattr(model.config, "_commit_hash", None) or recipe.model.revision,
    )


def _layers_without_factors(recipe: Recipe, model: PreTrainedModel) -> list[str]:
    """The frozen layers, and of all linear ones those that PEFT cannot adapt: routers, and some of Mamba."""
    frozen = frozen_layers(model, recipe.model.freeze)
    if recipe.model.lora is None or recipe.model.lora.target_modules != "all-linear":
        return frozen
    names = [name for name, module in model.named_modules() if "Router" in type(module).__name__]
    if model.config.model_type in MAMBA_TYPES:
        names += [name for name, _ in model.named_modules() if name.endswith((".out_proj", ".conv1d", ".dt_proj"))]
    return [*frozen, *names]


def load_starting_adapter(model: PreTrainedModel, start: str) -> Any:
    """Return the model with the adapter in `start`, trainable; the model itself if `start` is no adapter."""
    if adapter_config(start) is None:
        return model
    adapted = load_adapter(model, start, is_trainable=True)
    adapted.peft_config["default"].base_model_name_or_path = base_model(start)[0]
    return adapted


def add_empty_adapter(model: PreTrainedModel, recipe: Recipe, start: str) -> Any:
    """Return the model with the adapter that training would add to it, without reading weights.

    For models on the meta device or of fake tensors, within their context.
    """
    config = LoraConfig.from_pretrained(start) if adapter_config(start) else lora_config(recipe, model)
    if config is None:
        return model
    refuse_slow_patterns(model, start)
    config.inference_mode = False  # as saved adapters are
    return get_peft_model(model, cast(LoraConfig, config))


def cast_trainable_to_float32(model: torch.nn.Module) -> None:
    """Cast the trainable parameters to float32, in place. Call it before an optimizer is made.

    With a 4-bit base, TRL casts the factors to bfloat16, where small updates would be lost to rounding
    (test_what_trl_makes_bfloat16_beside_a_quantised_base_is_float32_again).
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def save_adapter(model: PeftModel, folder: str, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Save the trained adapter, without TRL's frozen copy of the starting one, and the quantization of its base.

    weights: by the names of the model's parameters, if the model itself has no float32 ones.
    """
    model.save_pretrained(folder, selected_adapters=["default"], state_dict=weights)
    (Path(folder) / "README.md").unlink(missing_ok=True)  # PEFT's card has only paths of this machine
    if (quantization := quantization_of(model)) is not None:
        write(Path(folder) / QUANTIZATION_RECORD, json.dumps(quantization, indent=2) + "\n")


def merge(run: RunFolder) -> Path:
    """Write `run`/merged: the run's adapter merged with its base into one model, and its tokenizer. Return that folder.

    Merged in float32; saved in run.save_dtype, or else in the dtype of the base's config. If the base was quantized in
    training, it is quantized again and dequantized, to the weights that the adapter was trained on. An earlier merge of
    the same adapter is replaced. Raises UserError if anything else is in its place, or a file cannot be loaded.
    """
    target = run.merged
    if target.exists() and not run.is_merged():
        raise UserError(f"{target}: is not a merge of this run's adapter; remove it, or give it another name")
    name, revision = base_model(str(run.model))
    with as_user_error(f"{run}: cannot be merged"):
        config = load_config(name, revision)
        quantization = recorded_quantization(run.model)
        base = load_model(name, quantization, revision=revision, dtype=torch.float32)
        make_savable_(base.generation_config, name)
        base = base if quantization is None else dequantized(base)
        model: Any = load_adapter(base, str(run.model))
        tokenizer = load_tokenizer(str(run.model))
    merged = model.merge_and_unload(safe_merge=True)
    partial = target.with_name("merged.part")
    remove(partial)
    save_dtype = load_resolved(run.recipe).run.save_dtype
    dtype = getattr(torch, save_dtype) if save_dtype else getattr(config, "dtype", None) or torch.float32
    with write_errors(partial, "Make room there, then rerun the command"):
        merged.to(dtype).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write(partial / MERGED_FROM, json.dumps(run.adapter()) + "\n")
        remove(target)
        rename_durably(partial, target)
    return target
