"""Conversion of the keys about attention and packing: which tokens attend to which."""

from typing import Any

from ..recipe.model import attention_problems
from .key_tables import Note

KEYS = (
    "attn_implementation flash_attn flash_attention use_flash_attention_2 sdp_attention flex_attention eager_attention"
)
PACKING = ("packing", "neat_packing")
NAMES = {
    "flash_attention": "flash_attention_2",
    "use_flash_attention_2": "flash_attention_2",
    "flash": "flash_attention_2",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    "fa4": "flash_attention_4",
    "sdp_attention": "sdpa",
    "flex": "flex_attention",
    "eager_attention": "eager",
    "disabled": "eager",
}
"""Other tools' names of an attention, as a value or as a key that is true -> the recipe's."""


def convert(key: str, name: str, value: Any, flat: dict[str, Any], recipe: dict[str, dict[str, Any]]) -> Note | None:
    """Write one key about attention or packing into the recipe's sections; None for a key about anything else."""
    if name in KEYS.split():
        return _attention(key, name, value, flat, recipe["model"])
    trainer = recipe["trainer"]
    if name == "neat_packing" or (name == "packing" and "finetuning_type" in flat):  # LLaMA-Factory's
        return _llama_factory_packing(key, name, value, flat, trainer)
    if name == "excess_length_strategy" and value == "truncate":
        if flat.get("sample_packing"):
            trainer["packing_strategy"] = "bfd"
            return Note(key, "renamed", "trainer.packing_strategy: bfd, which truncates")
        return Note(key, "dropped", "TRL truncates too")
    if name in ("eval_packing", "eval_sample_packing") and value is True and not _packs(flat):
        return Note(key, "dropped", "without packing in training, packed held-out examples would attend to each other")
    return None


def default_strategy(flat: dict[str, Any], trainer: dict[str, Any]) -> tuple[str, str] | None:
    """Return (packing_strategy, reason) of a source that packs and names none; None if there is no equal one."""
    if not trainer.get("packing") or "base_model" in flat:
        return None
    tool = "as LLaMA-Factory" if "finetuning_type" in flat else "TRL's default"
    return "bfd", f"{tool}, truncates long examples; bfd_split keeps every token"


def _packs(flat: dict[str, Any]) -> bool:
    return any(flat.get(key) in (True, "on", "yes", "true") for key in ("packing", "sample_packing", "neat_packing"))


def _attention(key: str, name: str, value: Any, flat: dict[str, Any], model: dict[str, Any]) -> Note:
    if value in (None, False, "auto"):
        return Note(key, "dropped", "attention is transformers' own choice, sdpa")
    attention = NAMES.get(name, name) if value is True else NAMES.get(str(value), str(value))
    if "attn_implementation" in model:
        return Note(key, "dropped", f"model.attn_implementation is {model['attn_implementation']} by another key")
    if attention_problems(attention, flat.get("use_cpu")):
        return Note(key, "dropped", f"there is no {attention} here; attention is transformers' own choice, sdpa")
    model["attn_implementation"] = attention
    return Note(key, "renamed", f"model.attn_implementation: {attention}")


def _llama_factory_packing(key: str, name: str, value: Any, flat: dict[str, Any], trainer: dict[str, Any]) -> Note:
    if not value:
        return Note(key, "dropped", "examples are not packed unless packing is true")
    trainer["packing"] = True
    is_neat = flat.get("neat_packing") is True
    effect = "" if is_neat else "; in LLaMA-Factory packed examples attend to each other, here they are separate"
    return Note(key, "renamed", f"trainer.packing{effect}", not is_neat)
