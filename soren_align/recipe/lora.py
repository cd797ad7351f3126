"""What can be said of LoRA before torch is there: adapter folders, and what goes together with `model.lora`."""

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .. import shipped
from ..errors import UserError
from ..files import local_path, read_json
from .sections import ADAPTER, Lora, Recipe

TWO_WAYS = (
    "already is a LoRA adapter. Leave model.lora out, and training goes on with it; or make a whole model of it first "
    "(`soren-align merge RUN`), and start a new adapter from RUN/merged"
)


class _Config(BaseModel):
    """What is used of adapter_config.json, by us and by PEFT, which checks no types. Other keys stay as they are."""

    model_config = ConfigDict(strict=True)

    task_type: Literal["CAUSAL_LM"] | None = None
    revision: str | None = None
    r: Annotated[int, Field(ge=1, le=1 << 16)] = 8
    lora_alpha: Annotated[float, Field(allow_inf_nan=False)] = 8
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0
    bias: Literal["none", "all", "lora_only"] = "none"
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    layers_pattern: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=1 << 16)]] | None = None
    alpha_pattern: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    use_dora: bool = False
    layer_replication: None = None
    """It would make as many layers as the file says."""
    megatron_config: None = None
    """With it, PEFT imports the module that `megatron_core` names."""


def adapter_config(folder: str | Path) -> dict[str, Any] | None:
    """What an adapter's folder says of it; None where no adapter lies there.

    Raises UserError for a pickled one, one that is not LoRA, a field of another type, and a base that is itself an
    adapter.
    """
    file = shipped.resolve(str(folder)) / ADAPTER
    if not file.is_file():
        return None
    said = read_json(file)
    if not isinstance(said, dict):
        raise UserError(f"{folder}: {ADAPTER} is no mapping")
    if not (file.parent / "adapter_model.safetensors").is_file():
        raise UserError(f"{folder}: an adapter without adapter_model.safetensors; pickled weights are not loaded")
    name = said.get("base_model_name_or_path")
    if not name:
        raise UserError(f"{folder}: {ADAPTER} does not say which model is under it (base_model_name_or_path)")
    if said.get("peft_type") != "LORA":
        raise UserError(f"{folder} is an adapter of type {said.get('peft_type')!s:.40}; only LORA can be gone on with")
    try:
        _Config.model_validate(said)
    except ValidationError as error:
        raise UserError(*(_problem(folder, each) for each in error.errors(include_url=False)[:3])) from None
    if not isinstance(name, str) or not name.isprintable():
        raise UserError(f"{folder}: base_model_name_or_path: found {name!r:.80}; it is a folder's path or a hub name")
    return said | {"base_model_name_or_path": _base_of(file.parent, name)}


def _base_of(adapter: Path, name: str) -> str:
    """Where the base named `name` lies; UserError if it is an adapter too."""
    beside = adapter.parent / "start"
    base = local_path(name)
    if base.name == "start" and not base.is_dir() and beside.is_dir():
        return str(beside.resolve())  # the run folder, with the start that it made, was moved
    if is_adapter(name):
        raise UserError(
            f"{adapter}: stands on {name}, which is an adapter too; merge that one, and name the result as the base"
        )
    return name


def _problem(folder: str | Path, error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"][:2])
    return f"{folder}: {ADAPTER}: {where}: found {error['input']!r:.80}; {error['msg'][0].lower()}{error['msg'][1:]}"


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
