"""Conversion of LoRA and QLoRA keys to `model.lora` and `model.quantize`."""

from typing import Any

from .key_tables import ADAPTER_KEYS, VARIANTS, Note, matches, number
from .tool_defaults import is_llama_factory

KEYS = {
    "lora_r": "r",
    "lora_rank": "r",
    "lora_target": "target_modules",
    "additional_target": "modules_to_save",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
}
QUANTIZE = {
    ("load_in_4bit", True): "4bit",
    ("load_in_8bit", True): "8bit",
    ("quantization_bit", 4): "4bit",
    ("quantization_bit", 8): "8bit",
}
"""(the source's key, its value) -> `model.quantize`."""
RSLORA = ("use_rslora", "peft_use_rslora")
START = ("adapter_name_or_path", "lora_model_dir")
SAME_4BIT = {
    "use_bnb_nested_quant": (True,),
    "bnb_4bit_use_double_quant": (True,),
    "double_quantization": (True,),
    "bnb_4bit_quant_type": ("nf4",),
    "quantization_type": ("nf4",),
}
"""Keys of the 4-bit format, with the values that `model.quantize: 4bit` stands for."""
# Defaults of TRL and Axolotl that differ from a recipe's.
TRL = {"r": 16, "alpha": 32.0, "dropout": 0.05}
AXOLOTL = {"r": 8, "alpha": 16.0, "dropout": 0.0}
LLAMA_FACTORY = {"r": 8, "dropout": 0.0}  # alpha is twice r


def trains_lora(flat: dict[str, Any]) -> bool:
    """Whether the source trains a LoRA adapter: TRL's use_peft, Axolotl's adapter, LLaMA-Factory's finetuning_type."""
    if is_llama_factory(flat):
        return flat.get("finetuning_type", "lora") == "lora"
    return flat.get("adapter") in ("lora", "qlora") if "base_model" in flat else flat.get("use_peft") is True


def convert(key: str, name: str, value: Any, flat: dict[str, Any], model: dict[str, Any]) -> Note | None:
    """Write one key of a source that trains LoRA into the recipe's `model`; None for a key about anything else."""
    if start := _start(flat):
        return _of_adapter(key, name, start, flat, model)
    lora = model.setdefault("lora", {})
    if name == "adapter" and value == "qlora":
        model["quantize"] = "4bit"
        return Note(key, "renamed", "model.lora, model.quantize: 4bit")
    if name in ("use_peft", "adapter", "finetuning_type"):
        return Note(key, "renamed", "model.lora")
    if note := _quantization(key, name, value, flat, model):
        return note
    if name == "lora_target_linear" and value is True:
        lora["target_modules"] = "all-linear"
        return Note(key, "renamed", "model.lora.target_modules: all-linear")
    if name == "lora_task_type":
        return Note(key, "dropped", "only language models are trained", value != "CAUSAL_LM")
    if name in RSLORA and value is True:
        return Note(key, "renamed", "model.lora.alpha: times sqrt(r), which gives the factors rsLoRA's scale")
    target = KEYS.get(name)
    if target is None and value not in (None, False, 0, "", [], {}) and matches(name, ADAPTER_KEYS):
        return Note(key, "dropped", VARIANTS, True)
    if target is None or value in (None, []):
        return None
    if target == "modules_to_save" and isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if target == "target_modules":
        if flat.get("lora_target_linear"):
            return Note(key, "dropped", "set by lora_target_linear", value != "all-linear")
        value = "all-linear" if name == "lora_target" and value == "all" else value
        parts = value.replace(" ", "").split(",") if isinstance(value, str) else [""]
        value = parts if all(part.isidentifier() for part in parts) else value
        if isinstance(value, str) and value != "all-linear":
            return Note(key, "dropped", "a pattern; write model.lora.target_modules as a list of names", True)
    if target in ("alpha", "dropout"):
        value = number(value)
        value = float(value) if type(value) is int else value
    lora[target] = value
    return Note(key, "renamed", f"model.lora.{target}")


def _start(flat: dict[str, Any]) -> str | None:
    """The adapter that the source trains further; None if it trains a new one."""
    path = next((flat[key] for key in START if flat.get(key)), None)
    return path if isinstance(path, str) and "," not in path and not flat.get("create_new_adapter") else None


def _of_adapter(key: str, name: str, start: str, flat: dict[str, Any], model: dict[str, Any]) -> Note | None:
    """Write a key of a source that trains the adapter `start` further, whose rank, base and layers are its own."""
    model["name_or_path"] = start
    if name in START:
        is_dpo = flat.get("stage") == "dpo" or bool(flat.get("rl"))
        reference = "; the reference is this adapter, in the source the model without an adapter" * is_dpo
        return Note(key, "renamed", f"model.name_or_path: trained further, as in the source{reference}", is_dpo)
    if name in ("model_name_or_path", "base_model"):
        return Note(key, "dropped", "the adapter names its own base model")
    if note := _quantization(key, name, flat[key], flat, model):
        return note
    if name in KEYS or name == "finetuning_type" or matches(name, ADAPTER_KEYS):
        return Note(key, "dropped", "that of the adapter which is trained further")
    return None


def _quantization(key: str, name: str, value: Any, flat: dict[str, Any], model: dict[str, Any]) -> Note | None:
    """Write a key about the quantization of the frozen weights; None for any other key."""
    bits = QUANTIZE.get((name, value)) if isinstance(value, bool | int) else None
    if bits:
        model["quantize"] = bits
        return Note(key, "renamed", f"model.quantize: {bits}")
    is_4bit = flat.get("load_in_4bit") is True or flat.get("quantization_bit") == 4
    if name in SAME_4BIT and is_4bit:
        return Note(
            key, "dropped", "model.quantize: 4bit is NF4 with double quantization", value not in SAME_4BIT[name]
        )
    if name == "quantization_method" and flat.get("quantization_bit") in (4, 8):
        return Note(key, "dropped", "weights are quantized by bitsandbytes", value not in ("bnb", "bitsandbytes"))
    if name in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage") and is_4bit:
        return Note(key, "dropped", "4-bit weights are computed with in the precision of trainer (bf16, fp16)")
    return None


def defaults(flat: dict[str, Any], model: dict[str, Any]) -> dict[str, str]:
    """Add the defaults of the source's tool to `model`; returns dotted key -> reason."""
    if _start(flat):
        return {}
    tool, values = ("Axolotl's", AXOLOTL) if "base_model" in flat else ("TRL's", TRL)
    if is_llama_factory(flat):
        model.setdefault("lora", {})
        tool, values = "LLaMA-Factory's", LLAMA_FACTORY
        r = model["lora"].get("r")
        values = values | {"alpha": 2.0 * (r if isinstance(r, int) else 8)}
    reasons = {}
    for key, value in values.items():
        if key not in model["lora"]:
            model["lora"][key] = value
            reasons[f"model.lora.{key}"] = f"{tool} default"
    if "target_modules" not in model["lora"]:
        model["lora"]["target_modules"] = "all-linear"
        reasons["model.lora.target_modules"] = "not in the source; PEFT's own choice for the architecture may be fewer"
    r, alpha = model["lora"]["r"], model["lora"]["alpha"]
    if any(flat.get(key) is True for key in RSLORA) and isinstance(alpha, int | float) and isinstance(r, int) and r > 0:
        # rsLoRA multiplies the factors' product by alpha / sqrt(r), LoRA by alpha / r.
        model["lora"]["alpha"] = round(alpha * r**0.5, 4)
    return reasons
