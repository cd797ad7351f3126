"""LoRA without torch: adapter folders, and the checks of `model.lora`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .. import shipped
from ..errors import UserError
from ..files import local_path, read_json
from ..yaml_reader import dotted
from .sections import ADAPTER, Lora

TWO_WAYS = (
    "already is a LoRA adapter. Leave model.lora out to continue training it; or merge it into a whole model first "
    "(`soren-align merge RUN`), and start a new adapter from RUN/merged"
)


class _Config(BaseModel):
    """The keys of adapter_config.json that are used here or by PEFT, which checks no types. Other keys are ignored."""

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
    """Refused: it could create any number of layers."""
    megatron_config: None = None
    """Refused: with it PEFT imports the module that `megatron_core` names."""


def adapter_config(folder: str | Path) -> dict[str, Any] | None:
    """The contents of a folder's adapter_config.json, with the base model's path; None if the folder has none.

    Raises UserError for pickled weights, an adapter that is not LoRA, a field of the wrong type, and a base that is
    itself an adapter.
    """
    file = shipped.resolve(str(folder)) / ADAPTER
    if not file.is_file():
        return None
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{folder}: {ADAPTER} is not a mapping")
    if not (file.parent / "adapter_model.safetensors").is_file():
        raise UserError(f"{folder}: an adapter without adapter_model.safetensors; pickled weights are not loaded")
    name = config.get("base_model_name_or_path")
    if not name:
        raise UserError(f"{folder}: {ADAPTER} does not name the base model (base_model_name_or_path)")
    if config.get("peft_type") != "LORA":
        raise UserError(f"{folder} is an adapter of type {config.get('peft_type')!s:.40}; only LORA is supported")
    try:
        _Config.model_validate(config)
    except ValidationError as error:
        raise UserError(*(_problem(folder, each) for each in error.errors(include_url=False)[:3])) from None
    if not isinstance(name, str) or not name.isprintable():
        raise UserError(f"{folder}: base_model_name_or_path: found {name!r:.80}; it is a folder's path or a hub name")
    return config | {"base_model_name_or_path": _base_of(file.parent, name)}


def _base_of(adapter: Path, name: str) -> str:
    """The path or hub name of the base model. Raises UserError if it is an adapter too."""
    beside = adapter.parent / "start"
    base = local_path(name)
    if base.name == "start" and not base.is_dir() and beside.is_dir():
        return str(beside.resolve())  # the run folder was moved, with the random starting weights in it
    if is_adapter(name):
        raise UserError(
            f"{adapter}: its base {name} is an adapter too; merge that one, and name the result as the base"
        )
    return name


def _problem(folder: str | Path, error: Any) -> str:
    where = dotted(error["loc"][:2])
    return f"{folder}: {ADAPTER}: {where}: found {error['input']!r:.80}; {error['msg'][0].lower()}{error['msg'][1:]}"


def is_adapter(model: str) -> bool:
    """Whether the folder is an adapter's, valid or not."""
    return (shipped.resolve(model) / ADAPTER).is_file()


def lora_problems(model: str, lora: Any, parallel: Any) -> list[tuple[str, str]]:
    """(key of `model`, message) of each conflict. lora: the raw section; parallel: `run.parallel`."""
    try:
        is_adapter = adapter_config(model) is not None
    except UserError:
        return []  # reported at model.name_or_path
    if not is_adapter and not isinstance(lora, dict):
        return []
    problems = [("lora", f"{model} {TWO_WAYS}")] if is_adapter and lora is not None else []
    name = str(parallel or "ddp")
    if name.startswith(("zero3", "fsdp2")) or name.endswith((".yaml", ".yml")):
        key = "name_or_path" if is_adapter else "lora"
        problems.append((key, f"adapters are trained under ddp, zero1 and zero2; run.parallel is {name}"))
    return problems


def freeze_problem(model: str, globs: Any) -> str | None:
    """The message of `model.freeze` beside an adapter that is trained further."""
    if not globs or not is_adapter(model):
        return None
    return f"{model} is a LoRA adapter, of which only the factors are trained; leave model.freeze out"


def is_all_factors(model: str, lora: Lora | dict[str, Any] | None) -> bool:
    """Whether only factors of linear layers are trained, so that AdamW has no parameters."""
    try:
        config = adapter_config(model)
    except UserError:
        return False
    if config is not None:
        return not (config.get("modules_to_save") or config.get("trainable_token_indices") or config.get("use_dora"))
    if isinstance(lora, Lora):
        return not lora.modules_to_save
    return isinstance(lora, dict) and not lora.get("modules_to_save")
