"""Whether the models and templates that a recipe names exist and are of the right kind."""

from pathlib import Path
from typing import Any

from .. import shipped
from ..errors import UserError, did_you_mean
from ..files import local_path, refuse_special_files
from .data_paths import PYTHON, SUFFIXES, data_suffix, is_pattern
from .lora import adapter_config


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
