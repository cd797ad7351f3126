"""The models that answer: their folders, tokenizers, digests, and loading them for inference.

Without lm-eval: `chat` and `export` need no more than this.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import torch

from ...core.errors import UserError, in_one_line
from ...core.files import digest, local_path, refuse_special_files
from ...recipe import adapter_config, is_local, recorded_quantization
from ...recipe.schema import ADAPTER
from ...run import weights
from ...run.provenance import fingerprint
from ...run.weights import FILES, load_adapter, load_model


def model_folder(model: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the folder of a model's files; a model on the hub is downloaded first, or all but its
    weights.
    """
    if is_local(str(model)):
        folder = local_path(model)
        if not any((folder / name).is_file() for name in ("config.json", ADAPTER)):
            raise UserError(
                f"{model}: contains no config.json (a model) and no {ADAPTER} (an adapter); give"
                " the path of a folder with one of these files"
            )
        refuse_special_files(folder)
        return folder
    try:
        # Only the patterns of FILES: a repository's pickled weights are not even downloaded.
        patterns: list[str] = [*FILES] if weights else [*FILES[1:]]
        return Path(
            huggingface_hub.snapshot_download(
                str(model), revision=revision, allow_patterns=patterns
            )
        )
    # not found, gated, offline, no space: the hub's own message names the reason
    except Exception as error:
        reason = "is no folder, and cannot be downloaded from the hub"
        raise UserError(
            f"{model}: {reason}: {in_one_line(error)}; correct the name, or check the network"
        ) from error


def base_folder(folder: Path, *, weights: bool = True) -> Path | None:
    """Return the folder of the model under a LoRA adapter; None if `folder` holds a whole model.
    See `model_folder`.
    """
    config = adapter_config(folder)
    if config is None:
        return None
    base = model_folder(config["base_model_name_or_path"], config.get("revision"), weights=weights)
    if (base / ADAPTER).is_file():  # on the hub; a chain of adapters might be endless
        raise UserError(
            f"{folder}: the base model {config['base_model_name_or_path']} is an adapter too; merge"
            " this base model first"
        )
    return base


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in the folder; for an adapter without one, its base's."""
    base = base_folder(folder, weights=False)
    source = folder if base is None or (folder / "tokenizer_config.json").is_file() else base
    return weights.load_tokenizer(str(source))


def load_for_inference(folder: Path, dtype: str, device: str) -> Any:
    """Return the model in a folder, an adapter merged with its base or on its quantized one.

    dtype: of the weights, by its name in torch. Raises UserError if it cannot be loaded.
    """
    with loading_errors(folder):
        return _load(folder, dtype, device).to(device)


@contextmanager
def loading_errors(folder: Path) -> Iterator[None]:
    """Convert the libraries' errors within this context to UserError."""
    try:
        yield
    except UserError:
        raise
    except (ImportError, OSError, ValueError) as error:
        remedy = (
            "install this package"
            if isinstance(error, ImportError)
            else "check the files in this folder"
        )
        raise UserError(
            f"{folder}: the model cannot be loaded: {in_one_line(error)}; {remedy}"
        ) from error


def context_length(config: Any, tokenizer: Any) -> int:
    """Return the tokens of a model's context, as lm-eval's `resolve_max_length` does."""
    config = getattr(config, "text_config", None) or config
    for key in ("n_positions", "max_position_embeddings", "n_ctx"):
        if (length := getattr(config, key, None)) is not None:
            return int(length)
    # transformers writes 1e30 for an unknown length
    return 2048 if tokenizer.model_max_length > 1e29 else int(tokenizer.model_max_length)


def _load(folder: Path, dtype_name: str, device: str) -> Any:
    # Three kinds of models: an adapter on a quantized base, a whole model, an adapter that is
    # merged in float32.
    base, dtype = base_folder(folder), getattr(torch, dtype_name)
    if base and (quantization := recorded_quantization(folder)):
        # As it was trained, on a quantized base: merged, the base would be quantized again.
        as_evaluated = quantization.model_copy(update={"compute_dtype": dtype_name})
        model = load_model(str(base), as_evaluated, device_map={"": device})
        for parameter in model.parameters():
            if parameter.is_floating_point():  # else it is quantized
                parameter.data = parameter.data.to(dtype)
        return load_adapter(model, str(folder))
    # Not cast after loading: that would round the rotary frequencies too, and change the positions
    # of long prompts.
    model = load_model(str(base or folder), dtype=torch.float32 if base else dtype)
    if base:
        # Merged as `merge_and_unload` would for a model on disk: both give the same responses to
        # the last bit.
        model = cast(Any, load_adapter(model, str(folder))).merge_and_unload()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def model_digest(folder: Path) -> str:
    """Return a sha256 over the files of a model; for an adapter, over its base's files too."""
    files = sorted(
        {
            f
            for pattern in FILES
            for f in folder.glob(pattern)
            if f.suffix != ".safetensors" and f.is_file()
        }
    )
    hashes: list[Any] = [[f.name, _file_sha256(f, f.stat().st_mtime_ns)] for f in files]
    base = base_folder(folder)
    return digest([fingerprint(str(folder)), hashes, model_digest(base) if base else None])


# The time of the last change is an argument so that a replaced file is hashed again.
@lru_cache
def _file_sha256(file: Path, modified_ns: int) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
