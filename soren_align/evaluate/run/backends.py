"""The backends: a model is loaded and run by Hugging Face transformers or by vLLM.

Either is lm-eval's own class, so that prompts are tokenized and scored exactly as by `lm_eval`.
Added here: missing weights are refused, and truncated prompts are counted.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import huggingface_hub
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ...core.errors import UserError, in_one_line
from ...core.files import local_path, read_json, refuse_special_files
from ...recipe import adapter_config, is_local, recorded_quantization
from ...recipe.schema import ADAPTER
from ...run import weights
from ...run.weights import load_adapter, load_model

FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""The files that determine a model's responses: weights (the first pattern; no pickled ones),
configs, tokenizer, chat template."""

MAX_GEN_TOKS = 256
"""New tokens where the task names no number, as in HFLM."""

MOST = {
    "num_beams": 64,
    "num_return_sequences": 64,
    "max_new_tokens": 1 << 20,
    "max_length": 1 << 20,
}
"""Of a generation config: an answer with 100,000 beams would take hours."""

_WITHOUT_EFFECT = re.compile(
    "_.*|output_.*|return_.*|(bos|pad|decoder_start)_token_id|eos_token_id|do_sample|temperature|top_p|top_k|max_length"
    "|use_cache|transformers_version"
)
"""Keys of a generation config that do not change greedy responses, whose length the task sets.
eos_token_id does, and is reported by itself."""


class ContextTooShort(UserError):
    """The model's context is too short for a request."""


@dataclass(frozen=True)
class BackendSettings:
    """How a model is loaded and run: all that may change the last digits of its responses, beside
    its files.
    """

    backend: Literal["hf", "vllm"]
    dtype: str
    device: str
    """The device, as in torch.device."""
    batch_size: int
    """Prompts in one forward pass; with vLLM, in one call."""


def load_lm(folder: Path, tokenizer: Any, settings: BackendSettings) -> Any:
    """Return lm-eval's object for the model in a folder."""
    if settings.backend == "vllm" and (folder / ADAPTER).is_file():
        raise UserError(
            f"{folder}: is an adapter, which vLLM does not load; run `soren-align merge RUN` and"
            " evaluate RUN/merged, or use --backend hf"
        )
    model = None
    try:
        if settings.backend == "hf":
            model = _load_hf(folder, settings)
        # vLLM has quantizers of its own
        elif "quantization_config" not in (read_json(folder / "config.json") or {}):
            # names and shapes only: vLLM loads the weights itself
            load_model(str(folder), device_map={"": "meta"})
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
    if model is not None:
        return hf_lm(model.to(settings.device), tokenizer, settings.batch_size)
    from lm_eval.models.vllm_causallms import VLLM

    # vLLM always generates one token, which needs a place in the context.
    return _count_truncated(VLLM, -1)(
        pretrained=str(folder), dtype=settings.dtype, batch_size=settings.batch_size, seed=1234
    )


def hf_lm(model: Any, tokenizer: Any, batch_size: int) -> Any:
    """Return lm-eval's object for a loaded model."""
    # The spare token is the last one of a continuation, which is predicted and never an input.
    return _count_truncated(HFLM, 1)(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


def run_requests(lm: Any, kind: str, arguments: list[tuple]) -> tuple[list[Any], int]:
    """Return the responses to requests of one kind (loglikelihood, generate_until), and the number
    of truncated prompts."""
    # Counted anew in each call: the number belongs to this chunk, and is cached with its responses.
    lm.num_truncated = 0
    requests = [Instance(cast(Any, kind), {}, each, 0) for each in arguments]
    return getattr(lm, kind)(requests, disable_tqdm=True), lm.num_truncated


def require_backend(backend: str) -> None:
    """Raises UserError if the backend is not installed."""
    if backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "eval.backend: vLLM is not installed; run `pip install 'soren-align[vllm]'`, or"
            " write hf"
        )


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


def generation_settings(folder: Path) -> tuple[dict[str, Any], Any]:
    """Return (the settings of a model's generation config that change greedy responses, its
    eos_token_id).

    lm-eval leaves these settings in force: a repetition penalty, for example, or a limit of the
    length.
    """
    folder = base_folder(folder, weights=False) or folder
    try:
        config = (
            GenerationConfig.from_pretrained(folder)
            if (folder / GENERATION_CONFIG_NAME).is_file()
            else None
        )
    except Exception as error:  # of values that transformers does not check
        raise UserError(
            f"{folder / GENERATION_CONFIG_NAME}: cannot be read: {in_one_line(error)}; correct this"
            " file"
        ) from None
    settings = config.to_diff_dict() if config else {}
    for key, most in MOST.items():
        if isinstance(value := settings.get(key), int | float) and value > most:
            raise UserError(
                f"{folder / GENERATION_CONFIG_NAME}: {key} is {value}, but may be {most:,} at most;"
                " correct the file in a copy of the model"
            )
    changing = {key: value for key, value in settings.items() if not _WITHOUT_EFFECT.fullmatch(key)}
    return changing, settings.get("eos_token_id")


def num_new_tokens(settings: Any, default: int, context: int) -> int:
    """Return how many tokens a request may generate.
    Raises ContextTooShort if they leave no room for a prompt.

    settings: of the request. default: where these name no number. context: the model's, in tokens.
    """
    num_new = int(cast(Any, normalize_gen_kwargs(settings, default))["max_gen_toks"])
    if num_new >= context:
        raise ContextTooShort(
            f"an answer of {num_new} tokens leaves no room for a prompt in the model's context of"
            f" {context} tokens"
        )
    return num_new


def refuse_long_choice(num_tokens: int, context: int) -> None:
    """Raises ContextTooShort if an answer choice alone does not fit the model's context."""
    if num_tokens > context:
        raise ContextTooShort(
            f"an answer choice of {num_tokens} tokens does not fit the model's context of {context}"
            " tokens"
        )


def _count_truncated(lm_class: type, spare: int) -> Any:
    """Return a subclass of lm-eval's class that counts the prompts it truncates from the left.

    spare: the number of tokens by which a prompt with its continuation may exceed the model's
    context.
    """

    class CountingLM(lm_class):
        num_truncated = 0

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> Any:
            max_tokens = self.max_length + spare
            longest = max((len(continuation) for _, _, continuation in requests), default=0)
            refuse_long_choice(longest, self.max_length)  # an assertion in lm-eval
            if not all(continuation for _, _, continuation in requests):
                raise ContextTooShort("an answer choice has no tokens")
            self.num_truncated += len(
                {
                    text[0]
                    for text, prompt, continuation in requests
                    if len(prompt) + len(continuation) > max_tokens
                }
            )
            return super()._loglikelihood_tokens(requests, **options)

        def generate_until(self, requests: Any, **options: Any) -> Any:
            for request in requests:
                prompt, settings = request.args
                num_new = num_new_tokens(settings, self.max_gen_toks, self.max_length)
                self.num_truncated += len(self.tok_encode(prompt)) > self.max_length - num_new
            return super().generate_until(requests, **options)

    return CountingLM


def _load_hf(folder: Path, settings: BackendSettings) -> Any:
    # Three kinds of models: an adapter on a quantized base, a whole model, an adapter that is
    # merged in float32.
    base, dtype = base_folder(folder), getattr(torch, settings.dtype)
    if base and (quantization := recorded_quantization(folder)):
        # As it was trained, on a quantized base: merged, the base would be quantized again.
        as_evaluated = quantization.model_copy(update={"compute_dtype": settings.dtype})
        model = load_model(str(base), as_evaluated, device_map={"": settings.device})
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
