"""The model section without torch: models and adapters in folders, quantization, names of
attentions.

An adapter belongs to the quantized weights that it was trained on. So its folder records them, and
whatever loads the adapter later (DPO, evaluation, merge) quantizes the base in the same way.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core import extras
from ..core.document import from_pydantic
from ..core.errors import MissingError, OutOfReach, UserError, did_you_mean
from ..core.files import PREFIX, local_path, read_json, refuse_special_files, resolve_path
from ..core.text import dotted
from .data_files import PYTHON, SUFFIXES, data_suffix, has_wildcards
from .parallel import parallel
from .schema import ADAPTER, Quantize, Recipe


class _Config(BaseModel):
    """The keys of adapter_config.json that are used here or by PEFT, which checks no types.
    Other keys are ignored.
    """

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
    """The contents of a folder's adapter_config.json, with the base model's path; None if the
    folder has none.

    Raises UserError for pickled weights, an adapter that is not LoRA, a field of the wrong type,
    and a base that is itself an adapter.
    """
    file = resolve_path(str(folder)) / ADAPTER
    if not file.is_file():
        return None
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{folder}: {ADAPTER} is not a JSON object; restore this file")
    if not (file.parent / "adapter_model.safetensors").is_file():
        raise UserError(
            f"{folder}: the adapter has no adapter_model.safetensors; save its weights as"
            " safetensors"
        )
    name = config.get("base_model_name_or_path")
    if not name:
        raise UserError(
            f"{folder}: {ADAPTER} has no base model; add base_model_name_or_path to this file"
        )
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{folder} is an adapter of type {config.get('peft_type')!s:.40}; name a LoRA adapter"
            " instead"
        )
    # PEFT checks no types, and allocates an adapter's rank before it reads the weights: a huge `r`
    # would take tens of GB (notes/log.md).
    try:
        _Config.model_validate(config)
    except ValidationError as error:
        problems = from_pydantic(error)[:3]
        raise UserError(
            *(f"{folder}: {ADAPTER}: {dotted(p.key[:2])}: {p.message}" for p in problems)
        ) from None
    if not isinstance(name, str) or not name.isprintable():
        raise UserError(
            f"{folder}: base_model_name_or_path: found {name!r:.80}; write a folder's path or a hub"
            " name"
        )
    # An adapter on random weights has them in its run folder, by an absolute path of the machine
    # that trained it.
    beside, base = file.parent.parent / "start", resolve_path(name)
    if base.name == "start" and not base.is_dir() and beside.is_dir():
        # The run folder was moved, with the random starting weights in it.
        name = str(beside.resolve())
    elif (base / ADAPTER).is_file():
        raise UserError(
            f"{file.parent}: the base model {name} is an adapter too; merge {name}, and write the"
            f" merged model's folder as base_model_name_or_path into {ADAPTER}"
        )
    return config | {"base_model_name_or_path": name}


def is_adapter(model: str) -> bool:
    """Whether the folder is an adapter's, valid or not."""
    return (resolve_path(model) / ADAPTER).is_file()


def estimated_parameters(model: str) -> int | None:
    """Estimate the number of parameters of a model in a folder from its config.json; None if that
    does not show it.

    Counted as of a transformer with gated layers: embeddings, head, and the matrices of attention
    and MLPs.
    """
    try:
        if adapter := adapter_config(model):
            model = adapter["base_model_name_or_path"]
        config = read_json(resolve_path(model) / "config.json")
        keys = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
        width, depth, words, inner = (int(config[key]) for key in keys)
        num_experts = int(config.get("num_local_experts") or config.get("num_experts") or 1)
    except (UserError, OSError, LookupError, TypeError, ValueError, AttributeError):
        return None
    # Attention as four squares, MLPs as gate, up and down: good enough for a choice that depends on
    # the order of magnitude.
    embeddings = words * width * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + depth * (4 * width**2 + 3 * width * inner * num_experts)


def is_local(path: str) -> bool:
    """Whether a model or dataset is named by a path: the hub's names are `name` or `owner/name`,
    without a suffix.
    """
    local = local_path(path)
    return (
        path.startswith((PREFIX, PYTHON, "/", "./", "../", "~"))
        or path.count("/") > 1
        or data_suffix(local) in SUFFIXES
        or has_wildcards(path)
        or local.exists()
    )


def refuse_unusable(path: str, init_seed: Any, tokenizer: Any = None) -> None:
    """Raise UserError if the model or adapter at `path` cannot be trained; MissingError if it is
    not there.

    tokenizer: model.tokenizer, in the place of the folder's.
    """
    if not is_local(path):
        if init_seed is not None:
            raise UserError(
                "init_seed needs a local folder with a config.json, from which it makes random "
                "weights; remove init_seed to load this model's weights"
            )
        return
    folder = resolve_path(path)
    if not folder.is_dir():
        is_result = folder.name == "model"  # <run folder>/model
        remedy = "first run the recipe that makes this folder" if is_result else "correct the path"
        raise MissingError(f"no folder {path}; {remedy}")
    refuse_special_files(folder)
    adapter = adapter_config(path)
    if adapter is not None:
        base = adapter["base_model_name_or_path"]
        if init_seed is not None:
            raise UserError(
                f"{path} is an adapter of trained weights, not of random weights; "
                "remove model.init_seed"
            )
        if is_local(base) and not Path(base).is_dir():
            raise MissingError(
                f"{path} is an adapter of {base}, which does not exist; restore this base model"
            )
        return refuse_unusable(base, None)
    # transformers loads a model without a tokenizer's files, and fails at the first text.
    needed = ("config.json", "tokenizer_config.json") if tokenizer is None else ("config.json",)
    if missing := [name for name in needed if not (folder / name).is_file()]:
        is_run = (folder / "run.json").is_file() and (folder / "model").is_dir()
        remedy = (
            f"write {path.rstrip('/')}/model, the model of this run"
            if is_run
            else "name a model's folder"
        )
        raise UserError(f"{path} has no {' and no '.join(missing)}; {remedy}")
    # Pickled weights (.bin) do not count: loading them could run code.
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    if init_seed is None and not weights:
        raise UserError(
            f"{path} has no weights (*.safetensors); add weights, or set model.init_seed for "
            "random weights"
        )


ATTENTION = (
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
KERNELS = "kernels-community/"
"""The owner of the kernels that transformers runs without asking; others could run any code."""


def attention_problems(name: str, use_cpu: Any) -> list[str]:
    """The problems of an attention's name. Whether it is installed is checked before training."""
    if name not in ATTENTION and not (name.startswith(KERNELS) and len(name) > len(KERNELS)):
        hint = did_you_mean(name, ATTENTION)
        return [f"found {name!r}; write one of {', '.join(ATTENTION)}, or {KERNELS}NAME{hint}"]
    if use_cpu is True and name not in ATTENTION[:3]:
        return [f"{name} runs on GPUs only; write sdpa or eager, or remove trainer.use_cpu"]
    return []


QUANTIZATION_RECORD = "base_quantization.json"
"""The file in the folder of an adapter that was trained on quantized weights."""
Dtype = Literal["float32", "bfloat16", "float16"]


class Quantization(BaseModel):
    """How frozen weights are quantized."""

    model_config = ConfigDict(strict=True, frozen=True)

    quantize: Quantize
    """`4bit`: NF4 with double quantization; `8bit`: LLM.int8; both by bitsandbytes."""
    dtype: Dtype
    """The dtype of the weights before they are quantized, and of others: embeddings, head, norms,
    biases."""
    compute_dtype: Dtype
    """The dtype of the matrix products with 4-bit weights. LLM.int8 has its own: int8, of
    activations in float16."""


def quantization(recipe: Recipe) -> Quantization | None:
    """The quantization of the weights that a run loads; None if it loads them as they are.
    recipe: resolved.
    """
    if recipe.model.quantize is None:
        return None
    return Quantization(
        quantize=recipe.model.quantize,
        dtype=recipe.model.dtype,
        compute_dtype=compute_dtype(recipe),
    )


def compute_dtype(recipe: Recipe) -> Dtype:
    """The dtype of the matrix products of the passes."""
    if recipe.trainer.get("fp16"):
        return "float16"
    # null: TRL takes bfloat16
    return "float32" if recipe.trainer.get("bf16") is False else "bfloat16"


def recorded_quantization(adapter: str | Path) -> Quantization | None:
    """The quantization that an adapter was trained on; None if its folder records none.

    Raises UserError for a record of another format.
    """
    file = resolve_path(str(adapter)) / QUANTIZATION_RECORD
    if not file.is_file():
        return None
    try:
        return Quantization.model_validate(read_json(file))
    except ValidationError as error:
        key, message, _ = from_pydantic(error)[0]
        raise UserError(f"{file}: {dotted(key) or 'it'}: {message}") from None


def refuse_unloadable(adapter: str | Path) -> None:
    """Raise UserError if an adapter was trained on quantized weights and bitsandbytes is missing.
    Imports no torch.
    """
    if (recorded := recorded_quantization(adapter)) is not None:
        refuse_unquantizable(recorded.quantize, str(adapter))


def refuse_unquantizable(quantize: str | None, place: str = "model.quantize") -> None:
    """Raise UserError if weights are to be quantized and bitsandbytes is missing."""
    if quantize:
        extras.require("bitsandbytes", place)


def missing_extras(recipe: Recipe, without_eval: str = "add --no-eval") -> list[str]:
    """Return the problems of missing packages that training and evaluating a recipe need.

    Without them it can be imported, checked and planned. without_eval: how to leave out `eval`.
    """
    is_zero = parallel(recipe.run.parallel).kind == "zero"
    needs = {
        ("model.quantize", "bitsandbytes", "write null"): recipe.model.quantize,
        ("run.parallel", "deepspeed", "write ddp or fsdp2"): is_zero,
        ("eval", "lm_eval", without_eval): recipe.eval,
    }
    problems = {place: extras.missing(*rest) for (place, *rest), needed in needs.items() if needed}
    return [f"{place}: {problem}" for place, problem in problems.items() if problem]


HUB_SECONDS = 3.0
"""The hub is asked once and briefly, since its own client retries for half a minute."""


def hub_answers() -> bool:
    """Whether the hub can be used now: offline mode is off, and the hub answers, not only a proxy
    before it.
    """
    from huggingface_hub import constants, get_session  # 0.2 s, of commands that mostly need no hub

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        return get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS).status_code < 500
    except Exception:  # whatever its client raises, the hub is unreachable
        return False


def refuse_unreachable(recipe: Recipe) -> None:
    """Raise OutOfReach if the model is on the hub alone, and the hub does not answer.
    Imports no torch.
    """
    name = recipe.model.name_or_path
    if is_local(name):
        return
    from huggingface_hub import constants, try_to_load_from_cache

    # A model in the cache needs no hub: it is asked only where its silence would end the run.
    if isinstance(try_to_load_from_cache(name, "config.json", revision=recipe.model.revision), str):
        return
    is_offline = recipe.run.offline or constants.HF_HUB_OFFLINE
    if is_offline or not hub_answers():
        reason = (
            "HF_HUB_OFFLINE or run.offline is set"
            if is_offline
            else f"{constants.ENDPOINT} does not answer"
        )
        raise OutOfReach(
            f"model {name}: is neither a folder nor in the cache, and {reason}; run `hf download"
            f" {name} --local-dir FOLDER` on a machine with a network, and write FOLDER as"
            " model.name_or_path on this machine"
        )
