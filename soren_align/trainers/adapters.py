"""LoRA adapters: made or gone on with, kept in float32, and merged into whole models.

PEFT holds them and TRL trains them; which of them is mapped is optim's to say.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from ..errors import UserError
from ..files import remove, write
from ..recipe import Lora, Recipe, adapter_config, is_local, load_resolved
from ..run_folder import MERGED_FROM, RunFolder
from ..weights import load_adapter, load_model, refuse_slow_patterns

REFERENCE = "ref"  # TRL's name for the frozen copy of an adapter that DPO goes on with


def base_of(start: str, revision: str | None = None) -> tuple[str, str | None]:
    """(folder or hub name, revision) of the weights under what training starts from: itself, or an adapter's base.

    A folder is written out to its root: adapters remember it, and are looked at from elsewhere.
    """
    said = adapter_config(start)
    name, revision = (said["base_model_name_or_path"], said.get("revision")) if said else (start, revision)
    return (str(Path(name).resolve()) if is_local(name) else name), revision


def quantization(lora: Lora | None, on_cpu: bool) -> BitsAndBytesConfig | None:
    """NF4, doubly quantised, computed in bfloat16 where there is a GPU; None where nothing is quantised."""
    if lora is None or lora.quantize is None:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32 if on_cpu else torch.bfloat16,
    )


def lora_config(recipe: Recipe, model: PreTrainedModel) -> LoraConfig | None:
    """The new adapter that the recipe asks for, as PEFT says it; None if it asks for none."""
    lora = recipe.model.lora
    if lora is None:
        return None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha or lora.r,  # pyright: ignore[reportArgumentType] (PEFT's word is int, it divides it by r)
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        modules_to_save=lora.modules_to_save or None,
        # Without it an embedding that is the head too would be trained as the one and left as it was as the other.
        ensure_weight_tying=bool(lora.modules_to_save) and bool(model.config.tie_word_embeddings),
        revision=getattr(model.config, "_commit_hash", None) or recipe.model.revision,
    )


def go_on(model: PreTrainedModel, start: str) -> Any:
    """The model with the adapter that lies in `start`, to be trained further; itself, if none lies there."""
    if adapter_config(start) is None:
        return model
    adapted = load_adapter(model, start, is_trainable=True)
    adapted.peft_config["default"].base_model_name_or_path = base_of(start)[0]
    return adapted


def outlined(model: PreTrainedModel, recipe: Recipe, start: str) -> Any:
    """A model with the adapter that training would give it, to be counted: no weights are read.

    For models on the meta device or of fake tensors, within their context.
    """
    config = LoraConfig.from_pretrained(start) if adapter_config(start) else lora_config(recipe, model)
    if config is None:
        return model
    refuse_slow_patterns(model, start)
    config.inference_mode = False  # an adapter's folder says that it is
    return get_peft_model(model, cast(LoraConfig, config))


def keep_float32(model: torch.nn.Module) -> None:
    """Cast what is trained to float32, before an optimizer is made: TRL makes the factors beside a 4-bit base bfloat16,
    and small updates would be rounded away (test_what_trl_makes_bfloat16_beside_a_quantised_base_is_float32_again)."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def save_trained(model: PeftModel, folder: str, weights: dict[str, torch.Tensor] | None = None) -> None:
    """The adapter that was trained, without TRL's frozen copy of the one that it started as.

    weights: by the names of the model's parameters, where the model itself has no float32 ones.
    """
    model.save_pretrained(folder, selected_adapters=["default"], state_dict=weights)
    (Path(folder) / "README.md").unlink(missing_ok=True)  # PEFT's card: nothing but paths of this machine


def merge(run: RunFolder) -> Path:
    """Make `run`/merged, the whole model that the run's adapter and its base are together, and its tokenizer.

    Computed in float32, saved in the dtype that the base's config names, unless run.save_dtype says another. A merge of
    the same adapter is made again; UserError for anything else in its place.
    """
    target = run.merged
    if target.exists() and not run.is_merged():
        raise UserError(f"{target}: is not a merge of this run's adapter; remove it, or give it another name")
    name, revision = base_of(str(run.model))
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        dtype = getattr(config, "dtype", None) or torch.float32
        base = load_model(name, revision=revision, dtype=torch.float32)
        adapted: Any = load_adapter(base, str(run.model))
        tokenizer = AutoTokenizer.from_pretrained(run.model, trust_remote_code=False)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{run}: cannot be merged: {' '.join(str(error).split())[:400]}") from error
    whole = adapted.merge_and_unload(safe_merge=True)
    aside = target.with_name("merged.part")
    remove(aside)
    save_dtype = load_resolved(run.recipe).run.save_dtype
    whole.to(getattr(torch, save_dtype) if save_dtype else dtype).save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    write(aside / MERGED_FROM, json.dumps(run.adapter()) + "\n")
    remove(target)
    aside.rename(target)
    return target
