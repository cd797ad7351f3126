"""Load models and adapters completely: every weight comes from a file, or loading is refused.

transformers initializes missing weights at random, and PEFT leaves zeros; both only warn. Training,
evaluation and `merge` load with the two functions here.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from accelerate.utils.memory import should_reduce_batch_size
from peft import PeftModel
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.quantizers import AutoHfQuantizer

from ..core.errors import UserError, as_user_error, in_one_line
from ..core.patches import patched
from ..recipe.model import Quantization, refuse_unquantizable
from .quantized import quantized_layers

FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""The files that determine a model's responses: weights (the first pattern; no pickled ones),
configs, tokenizer, chat template."""
_MASK = re.compile(r"(^|\.)attn(\.attention)?\.(masked_)?bias$")
"""Causal masks, which old checkpoints of GPT-2 and GPT-Neo contain among their weights."""
NO_PATTERN = "{}: a pattern in config.json is not a regular expression; correct the pattern"
_ADAPTER = "default"  # PEFT's name for a single adapter
SAMPLING = [
    "temperature",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "top_k",
    "epsilon_cutoff",
    "eta_cutoff",
]
"""The settings of a generation config that have no effect without do_sample."""


def load_config(name: str, revision: str | None = None, place: str | None = None) -> Any:
    """Load a model's config from a folder or the hub.
    place: what messages call it, by default `name`.

    Raises UserError if transformers cannot, whatever it raises, or if the config names code.
    """
    with as_user_error(f"{place or name}: the model cannot be loaded", Exception):
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        method = getattr(config, "quantization_config", None)
        if isinstance(method, dict) and not AutoHfQuantizer.supports_quant_method(method):
            # transformers would load the quantized numbers as weights.
            raise UserError(
                f"{place or name}: config.json has a quantization_config of an unknown method, "
                f"{method['quant_method']!r:.40}; remove it if the weights are not quantized"
            )
    # transformers would download "owner/kernel" from the hub and run it, at a stranger's wish.
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        for key in ("_attn_implementation", "_experts_implementation"):
            if "/" in (value := str(getattr(part, key, None))):
                raise UserError(
                    f"{place or name}: config.json names code on the hub ({key[1:]}: {value}),"
                    " which is not run; remove this key from config.json"
                )
    return config


def load_tokenizer(
    name: str, revision: str | None = None, place: str | None = None
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub. place: what messages call it, by default `name`.

    Raises UserError if transformers cannot, whatever it raises.
    """
    with as_user_error(f"{place or name}: the tokenizer cannot be loaded", Exception):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


def load_model(
    name: str, quantization: Quantization | None = None, *, place: str | None = None, **options: Any
) -> PreTrainedModel:
    """Load a causal language model from a folder or the hub, with every parameter from its files.

    quantization: of its linear layers but the head; `dtype` is then the quantization's. place: what
    messages call it, by default `name`. options: keywords of `from_pretrained`. Raises UserError if
    keys are missing, unexpected or of another shape; it names the first ones.
    """
    load_config(name, options.get("revision"), place)  # raises if the model cannot be built
    if quantization is not None:
        refuse_unquantizable(quantization.quantize, name)
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of each layer's casts
        how: dict[str, Any] = {"load_in_8bit": True}
        if quantization.quantize == "4bit":
            how = {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
            }
            how["bnb_4bit_compute_dtype"] = getattr(torch, quantization.compute_dtype)
        options |= {
            "quantization_config": BitsAndBytesConfig(**how),
            "dtype": getattr(torch, quantization.dtype),
        }
    # On one rank: it reads all files a second time. If it raises, its launcher stops the other
    # ranks.
    if hf_deepspeed.is_deepspeed_zero3_enabled() and os.environ.get("RANK", "0") == "0":
        # transformers only reports missing keys under ZeRO 3: keys and shapes are compared first,
        # without loading.
        reference = hf_deepspeed._hf_deepspeed_config_weak_ref
        assert reference is not None
        sharding = reference()
        hf_deepspeed.unset_hf_deepspeed_config()
        try:
            load_model(name, **options, device_map={"": "meta"})
        finally:
            hf_deepspeed.set_hf_deepspeed_config(sharding)
    loaded: Any = None
    try:
        # A pickle can run any code, and so can a model's own modules.
        loaded = AutoModelForCausalLM.from_pretrained(
            name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            use_safetensors=True,
            trust_remote_code=False,
            **options,
        )
    except (ImportError, OSError, ValueError):  # with a message for the user
        raise
    except Exception as error:
        if should_reduce_batch_size(error):
            raise
        raise UserError(
            f"{place or name}: the model cannot be loaded: {in_one_line(error)}; check the "
            "model's files"
        ) from error
    # Compare: transformers draws missing weights at random, and would train or score them.
    model, info = loaded
    complete_for_trl_(model)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(
            f"model {name}: is an adapter on the hub; download the adapter and name its folder"
        )
    mismatched = [key for key, *_ in info["mismatched_keys"]]
    refuse_other_keys(name, info["missing_keys"], info["unexpected_keys"], mismatched)
    for layer in quantized_layers(model):
        # On some CPUs bitsandbytes' first forward pass in eval mode would repack the 4-bit weights,
        # with scales rounded to bfloat16, and training would then continue with these: numbers of
        # training and evaluation would differ.
        layer.support_avx512bf16_for_cpu = False
    return model


def make_savable_(config: GenerationConfig, place: str) -> str | None:
    """Change a generation config that transformers loads and would not save again; return how, or
    None.

    Published models have settings of sampling beside a do_sample that is missing, which is turned
    on, or false: then they have no effect, and are left out. place: the model, for the message.
    Raises UserError if transformers would not save it for another reason.
    """
    # transformers loads what it will not save: without this, hours of training would end in an
    # error.
    reason = _reason_not_to_save(config)
    if reason is None:
        return None
    if config.do_sample is None:
        config.do_sample, change = (
            True,
            "the model is saved with `do_sample: true`, which these settings need",
        )
    else:
        change = "the saved model does not have them, because do_sample is false"
        for key in SAMPLING:
            setattr(config, key, None)
    if _reason_not_to_save(config) is None:
        return f"{place}: generation_config.json has sampling settings; {change}"
    raise UserError(
        f"{place}: transformers would not save this generation_config.json with the trained "
        f"model: {reason}; correct the file in a copy of the model"
    )


def _reason_not_to_save(config: GenerationConfig) -> str | None:
    try:
        config.validate(strict=True)
    except ValueError as error:
        return in_one_line(error, 300)
    return None


def complete_for_trl_(model: Any) -> None:
    """Set the attribute by which TRL finds a model's backbone, where its class lacks it (Llama
    4).
    """
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"


@contextlib.contextmanager
def trl_config_names(model: Any) -> Iterator[None]:
    """Give the model's config, within this context, the name by which TRL reads the number of
    experts (Llama 4).
    """
    config = model.config.get_text_config()
    if not hasattr(config, "num_local_experts") or hasattr(config, "num_experts"):
        yield
        return
    names = {**config.attribute_map, "num_experts": "num_local_experts"}
    with patched("transformers.PreTrainedConfig.attribute_map", names, owner=type(config)):
        yield


def load_adapter(model: PreTrainedModel, folder: str, *, is_trainable: bool = False) -> PeftModel:
    """Return the model with the LoRA adapter in `folder`, every factor from its file.

    Raises UserError if keys are missing, unexpected or of another shape, or if its config cannot be
    applied.
    """
    try:
        with as_user_error(NO_PATTERN.format(folder), re.error):
            adapted = PeftModel.from_pretrained(model, folder, is_trainable=is_trainable)
        # A second time for the result, which PEFT drops in the first call.
        result = adapted.load_adapter(folder, _ADAPTER, is_trainable=is_trainable)
    except UserError:
        raise
    except (
        AttributeError,
        KeyError,
        OSError,
        RuntimeError,
        SafetensorError,
        TypeError,
        ValueError,
    ) as error:
        if should_reduce_batch_size(cast(Exception, error)):
            raise
        raise UserError(
            f"{folder}: the adapter cannot be loaded: {in_one_line(error)}; check the files in "
            "this folder"
        ) from error
    refuse_other_keys(folder, result.missing_keys, result.unexpected_keys)
    return adapted


def refuse_other_keys(
    name: str, missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[str] = ()
) -> None:
    """Raise UserError with the first keys and their number, unless files and model contain the same
    weights.
    """
    problems = {
        "these weights are missing": sorted(missing),
        "the model does not have these weights": sorted(
            key for key in unexpected if not _MASK.search(key)
        ),
        "these weights have another shape than in the model": sorted(mismatched),
    }
    if any(problems.values()):
        findings = (
            f"{text}: {', '.join(keys[:3])} ({len(keys)} in total)"
            for text, keys in problems.items()
            if keys
        )
        raise UserError(*(f"{name}: {finding}" for finding in findings))
