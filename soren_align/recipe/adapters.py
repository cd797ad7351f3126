"""What can be said of LoRA before torch is there: adapter folders, and what goes together with `model.lora`."""

import importlib.util
import re
from pathlib import Path
from typing import Any

from .. import shipped
from ..files import local_path, read_json
from .models import ADAPTER, Lora, Recipe, UserError

TWO_WAYS = (
    "already is a LoRA adapter. Leave model.lora out, and training goes on with it; or make a whole model of it first "
    "(`soren-align merge RUN`), and start a new adapter from RUN/merged"
)


def adapter_config(folder: str | Path) -> dict[str, Any] | None:
    """What an adapter's folder says of it; None where no adapter lies there. UserError for a pickled one."""
    file = shipped.resolve(str(folder)) / ADAPTER
    if not file.is_file():
        return None
    said = read_json(file)
    if not isinstance(said, dict):
        raise UserError(f"{folder}: {ADAPTER} is no adapter's: not a mapping")
    if not (file.parent / "adapter_model.safetensors").is_file():
        raise UserError(f"{folder}: an adapter without adapter_model.safetensors; pickled weights are not loaded")
    base = said.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise UserError(f"{folder}: {ADAPTER} does not say which model is under it (base_model_name_or_path)")
    if (local_path(base) / ADAPTER).is_file():
        raise UserError(f"{folder}: an adapter of another adapter, {base}; merge that one into its base first")
    if slow := next((pattern for pattern in _patterns(said) if _REPEATED_GROUP.search(pattern)), None):
        raise UserError(
            f"{folder}: {ADAPTER} has the pattern {slow!r}, whose repeated group may match for hours; name the modules"
        )
    base, beside = Path(said["base_model_name_or_path"]), file.parent.parent / "start"
    if base.name == "start" and not base.is_dir() and beside.is_dir():
        said["base_model_name_or_path"] = str(
            beside.resolve()
        )  # the run folder, with the start that it made, was moved
    return said


# Repeats nest in a repeated group only; without one, matching a module's name takes no exponential time.
_REPEATED_GROUP = re.compile(r"\)[*+{]")


def _patterns(said: dict[str, Any]) -> list[str]:
    """The regular expressions that PEFT matches with the names of all modules."""
    named = [said.get(key) for key in ("target_modules", "exclude_modules", "layers_pattern")]
    keyed = [said.get(key) for key in ("rank_pattern", "alpha_pattern")]
    listed = [inside for value in [*named, *keyed] if isinstance(value, list | dict) for inside in value]
    return [value for value in [*named, *listed] if isinstance(value, str)]


def is_adapter(model: str) -> bool:
    """Whether an adapter lies there, whatever is wrong with it."""
    return (shipped.resolve(model) / ADAPTER).is_file()


def lora_problems(model: str, lora: Any, shared: Any) -> list[tuple[str, str]]:
    """(key of `model`, message) of what does not go together; lora: the raw section; shared: `run.parallel`."""
    try:
        is_adapter = adapter_config(model) is not None
    except UserError:
        return []  # told under model.name_or_path
    if not is_adapter and not isinstance(lora, dict):
        return []
    found = [("lora", f"{model} {TWO_WAYS}")] if is_adapter and lora is not None else []
    word = str(shared or "ddp")
    quantized = isinstance(lora, dict) and lora.get("quantize")
    if word.startswith(("zero3", "fsdp2")) or word.endswith((".yaml", ".yml")):
        key = "name_or_path" if is_adapter else "lora"
        found.append((key, f"adapters are trained under ddp, zero1 and zero2; run.parallel is {word}"))
    elif quantized and word != "ddp":
        found.append(("lora.quantize", f"a quantised base is trained under ddp only; run.parallel is {word}"))
    return found


def refuse_unquantizable(recipe: Recipe) -> None:
    """UserError where weights would have to be quantised and cannot be. Not the recipe's fault: asked before training,
    so that a machine without bitsandbytes can import, check and plan it."""
    lora = recipe.model.lora
    if lora and lora.quantize and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("model.lora.quantize: needs bitsandbytes, which is not installed: pip install bitsandbytes")


def is_all_factors(model: str, lora: Lora | dict[str, Any] | None) -> bool:
    """Whether factors of linear layers are all that is trained, so that nothing is left to AdamW."""
    try:
        said = adapter_config(model)
    except UserError:
        return False
    if said is not None:
        return not (said.get("modules_to_save") or said.get("trainable_token_indices") or said.get("use_dora"))
    if isinstance(lora, Lora):
        return not lora.modules_to_save
    return isinstance(lora, dict) and not lora.get("modules_to_save")
