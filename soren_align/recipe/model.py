"""LoRA without torch: adapter folders, and the checks of `model.lora`."""

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core import shipped
from ..core.document import dotted, from_pydantic
from ..core.errors import UserError, did_you_mean
from ..core.files import local_path, read_json, refuse_special_files
from .data_files import PYTHON, SUFFIXES, data_suffix, is_pattern
from .schema import ADAPTER, Lora, Quantize, Recipe

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
        problems = from_pydantic(error)[:3]
        raise UserError(*(f"{folder}: {ADAPTER}: {dotted(key[:2])}: {message}" for key, message in problems)) from None
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


# ---
# Whether the models and templates that a recipe names exist and are of the right kind.


def is_local(path: str) -> bool:
    """Whether a model or dataset is named by a path: the hub's names are `name` or `owner/name`, without a suffix."""
    local = local_path(path)
    return (
        path.startswith((shipped.PREFIX, PYTHON, "/", "./", "../", "~"))
        or path.count("/") > 1
        or data_suffix(local) in SUFFIXES
        or is_pattern(path)
        or local.exists()
    )


def model_problems(path: str, init_seed: Any, tokenizer: Any = None) -> list[str]:
    """The problems of the model or adapter at `path`. tokenizer: model.tokenizer, in the place of the folder's."""
    if not is_local(path):
        return (
            []
            if init_seed is None
            else [
                "init_seed makes random weights from the config.json of a local folder; leave it out to load this model"
            ]
        )
    folder = shipped.resolve(path)
    if not folder.is_dir():
        hint = ""
        if folder.name == "model":  # <run folder>/model: the result of another recipe
            hint = "; it is the result of another run: run that recipe first"
        return [f"no folder {path}{hint}"]
    try:
        refuse_special_files(folder)
        adapter = adapter_config(path)
    except UserError as error:
        return list(error.problems)
    if adapter is not None:
        return _base_problems(path, adapter, init_seed)
    needed = ("config.json", "tokenizer_config.json") if tokenizer is None else ("config.json",)
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        is_run = (folder / "run.json").is_file() and (folder / "model").is_dir()
        remedy = f"it is a run's folder, whose model is {path.rstrip('/')}/model" if is_run else "is it a model folder?"
        return [f"{path} has no {' and no '.join(missing)}; {remedy}"]
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    if init_seed is None and not weights:
        return [f"{path} has no weights (*.safetensors); for random ones set model.init_seed"]
    return []


def tokenizer_problems(tokenizer: Any, init_seed: Any) -> list[str]:
    """The problems of model.tokenizer."""
    if tokenizer is not None and init_seed is None:
        return ["is for random weights, and trained ones need their own; write model.init_seed, or leave it out"]
    if not isinstance(tokenizer, str) or (tokenizer and not is_local(tokenizer)):
        return []
    if not tokenizer or not (shipped.resolve(tokenizer) / "tokenizer_config.json").is_file():
        return [f"{tokenizer!r} has no tokenizer_config.json; write a folder, a name on the hub, or {{vocab_size: N}}"]
    return []


ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
KERNELS = "kernels-community/"
"""The owner of the kernels that transformers runs without asking; others could run any code."""


def attention_problems(name: str, use_cpu: Any) -> list[str]:
    """The problems of an attention's name. Whether it is installed is checked before training."""
    if name not in ATTENTION and not (name.startswith(KERNELS) and len(name) > len(KERNELS)):
        hint = did_you_mean(name, ATTENTION)
        return [f"found {name!r}; write one of {', '.join(ATTENTION)}, or {KERNELS}NAME{hint}"]
    if use_cpu is True and name not in ATTENTION[:3]:
        return [f"{name} runs on GPUs only; write sdpa or eager, or take trainer.use_cpu out"]
    return []


def template_problems(name_or_path: str) -> list[str]:
    """The problems of a chat template's name."""
    known = shipped.templates()
    file = shipped.resolve(name_or_path)
    if name_or_path in known or (file.is_file() and file.suffix == ".jinja"):
        return []
    if file.suffix == ".jinja":
        return [f"no file {name_or_path}"]
    hint = did_you_mean(name_or_path, known)
    return [f"found {name_or_path!r}; write {', '.join(known)}, or the path of a .jinja file{hint}"]


def _base_problems(path: str, adapter: dict[str, Any], init_seed: Any) -> list[str]:
    """The problems of an adapter's base model."""
    if init_seed is not None:
        return [f"{path} is an adapter of trained weights, not of random ones; leave init_seed out"]
    base = adapter["base_model_name_or_path"]
    if is_local(base) and not Path(base).is_dir():
        return [f"{path} is an adapter of {base}, which does not exist"]
    return model_problems(base, None)


# ---
# The quantization of the frozen weights under an adapter: the recipe's, and the record in an adapter's folder.
#
# An adapter belongs to the quantized weights that it was trained on. So its folder records them, and whatever loads the
# adapter later (DPO, evaluation, merge) quantizes the base in the same way.

QUANTIZATION_RECORD = "base_quantization.json"
"""The file in the folder of an adapter that was trained on quantized weights."""
Dtype = Literal["float32", "bfloat16", "float16"]


class Quantization(BaseModel):
    """How frozen weights are quantized."""

    model_config = ConfigDict(strict=True, frozen=True)

    quantize: Quantize
    """`4bit`: NF4 with double quantization; `8bit`: LLM.int8; both by bitsandbytes."""
    dtype: Dtype
    """Of the weights before they are quantized, and of those that are not: embeddings, head, norms, biases."""
    compute_dtype: Dtype
    """Of the matrix products with 4-bit weights. LLM.int8 has its own: int8, of activations in float16."""


def quantization(recipe: Recipe) -> Quantization | None:
    """The quantization of the weights that a run loads; None if it loads them as they are. recipe: resolved."""
    if recipe.model.quantize is None:
        return None
    return Quantization(quantize=recipe.model.quantize, dtype=recipe.model.dtype, compute_dtype=compute_dtype(recipe))


def inherit_quantization(recipe: Recipe) -> Recipe:
    """The recipe with the quantization that its starting adapter was trained on written out."""
    recorded = recorded_quantization(recipe.model.name_or_path)
    if recorded is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantize": recorded.quantize})})


def compute_dtype(recipe: Recipe) -> Dtype:
    """The dtype of the matrix products of the passes."""
    if recipe.trainer.get("fp16"):
        return "float16"
    return "float32" if recipe.trainer.get("bf16") is False else "bfloat16"  # null: TRL takes bfloat16


def recorded_quantization(adapter: str | Path) -> Quantization | None:
    """The quantization that an adapter was trained on; None if its folder records none.

    Raises UserError for a record of another form.
    """
    file = shipped.resolve(str(adapter)) / QUANTIZATION_RECORD
    if not file.is_file():
        return None
    try:
        return Quantization.model_validate(read_json(file))
    except ValidationError as error:
        key, message = from_pydantic(error)[0]
        raise UserError(f"{file}: {dotted(key) or 'it'}: {message}") from None


def quantization_problems(model: str, section: dict[str, Any], parallel: Any) -> list[tuple[str, str]]:
    """(key of `model`, message) of each conflict of `model.quantize`.

    model: folder or hub name. section: the raw `model`; parallel: `run.parallel`.
    """
    quantize, exists = section.get("quantize"), not is_local(model) or shipped.resolve(model).is_dir()
    try:
        recorded = recorded_quantization(model)
    except UserError as error:
        return [("name_or_path", str(error))]
    if quantize not in get_args(Quantize) and recorded is None:
        return []
    problems = []
    if exists and not is_adapter(model) and not isinstance(section.get("lora"), dict):
        message = "quantized weights cannot be trained; add `lora: {r: 16}` for an adapter on them, or leave it out"
        problems.append(("quantize", message))
    if recorded and quantize and quantize != recorded.quantize:
        message = f"found {quantize!r}, but {model} was trained on {recorded.quantize} weights; leave it out"
        problems.append(("quantize", message))
    if (name := str(parallel or "ddp")) != "ddp":
        message = f"a quantized base is trained under ddp only; run.parallel is {name}"
        problems.append(("quantize" if quantize else "name_or_path", message))
    return problems


def refuse_unloadable(adapter: str | Path) -> None:
    """Raise UserError if an adapter was trained on quantized weights and bitsandbytes is missing. Imports no torch."""
    if (recorded := recorded_quantization(adapter)) is not None:
        refuse_unquantizable(recorded.quantize, str(adapter))


def refuse_unquantizable(quantize: str | None, place: str = "model.quantize") -> None:
    """Raise UserError if weights are to be quantized and bitsandbytes is missing.

    Called before weights are loaded: a machine without bitsandbytes can import, check and plan such a recipe.
    """
    if quantize and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{place}: needs bitsandbytes, which is not installed: pip install 'soren-align[quantize]'")
