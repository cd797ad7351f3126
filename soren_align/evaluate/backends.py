"""The model that answers, in this process: by Hugging Face's transformers, or by vLLM.

Either is lm-eval's own class, so that a prompt is cut into tokens and scored as `lm_eval` itself does it. Added here:
weights that are not all there are refused, and prompts that had to be cut are counted.
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
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ..errors import UserError
from ..files import local_path, read_json, refuse_special_files
from ..recipe import ADAPTER, adapter_config, is_local
from ..weights import load_adapter, load_model

FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""What decides a model's answers: weights, configs, tokenizer, chat template. No pickled weights."""

_WITHOUT_EFFECT = re.compile(
    "_.*|output_.*|return_.*|(bos|pad|decoder_start)_token_id|eos_token_id|do_sample|temperature|top_p|top_k|max_length"
    "|use_cache|transformers_version"
)
"""Of a generation config: lm-eval asks for one likeliest answer, of its own length. Where it ends is told by itself."""


class DoesNotFit(UserError):
    """The model's context is too short for a question."""


@dataclass(frozen=True)
class Setup:
    """How a model is made to answer: beside its files, what may change an answer's last digits."""

    backend: Literal["hf", "vllm"]
    dtype: str
    device: str
    """torch's word."""
    batch_size: int
    """Prompts in one forward pass; with vLLM, in one call."""


def refuse_absent(backend: str) -> None:
    """UserError where the backend is not installed."""
    if backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError("eval.backend is vllm, which is not installed: pip install 'soren-align[vllm]', or write hf")


def folder_of(model: str | Path, revision: str | None = None) -> Path:
    """Where a model's files lie; a name on the hub is downloaded first."""
    if is_local(str(model)):
        folder = local_path(model)
        if not any((folder / name).is_file() for name in ("config.json", ADAPTER)):
            raise UserError(f"{model}: not a model that can be loaded: there is no config.json, nor an {ADAPTER}")
        refuse_special_files(folder)
        return folder
    try:
        return Path(huggingface_hub.snapshot_download(str(model), revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # not found, gated, offline, no space: the hub's own words say which
        raise UserError(f"{model}: cannot be had from the hub: {_in_short(error)}") from error


def base_of(folder: Path) -> Path | None:
    """The model under a LoRA adapter; None where the folder holds a whole model."""
    said = adapter_config(folder)
    if said is None:
        return None
    base = folder_of(said["base_model_name_or_path"], said.get("revision"))
    if (base / ADAPTER).is_file():  # on the hub; a chain of them need not end
        raise UserError(
            f"{folder}: stands on {said['base_model_name_or_path']}, which is an adapter too; merge that one"
        )
    return base


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in the folder; an adapter without one has its base's."""
    base = base_of(folder)
    where = folder if base is None or (folder / "tokenizer_config.json").is_file() else base
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: has no tokenizer that can be loaded: {_in_short(error)}") from error


def generation_of(model: Any) -> tuple[dict[str, Any], Any]:
    """What the model's own generation config does to greedy answers, and the token ids that end them.

    A repetition penalty changes them, under lm-eval too, as does a limit to their length.
    """
    if isinstance(model, str | Path):
        folder = base_of(Path(model)) or Path(model)
        try:
            config = GenerationConfig.from_pretrained(folder) if (folder / GENERATION_CONFIG_NAME).is_file() else None
        except (AttributeError, OSError, TypeError, ValueError) as error:
            raise UserError(f"{folder / GENERATION_CONFIG_NAME}: cannot be read: {_in_short(error)}") from None
    else:
        config = model.generation_config
    said = config.to_diff_dict() if config else {}
    return {k: v for k, v in said.items() if not _WITHOUT_EFFECT.fullmatch(k)}, said.get("eos_token_id")


def load(model: Any, tokenizer: Any, setup: Setup) -> Any:
    """lm-eval's object of a model: a folder, or a loaded transformers or PEFT model, which stays on its device."""
    if setup.backend == "vllm":
        return _load_vllm(model, setup)
    # Handed a model, lm-eval takes it as it is, and leaves it in eval mode.
    loaded = _load_hf(Path(model), setup).to(setup.device) if isinstance(model, str | Path) else model
    return _counting(HFLM, 1)(pretrained=loaded, tokenizer=tokenizer, batch_size=setup.batch_size)


def answer(lm: Any, kind: str, arguments: list[tuple]) -> tuple[list[Any], int]:
    """The answers to requests of one kind (loglikelihood, generate_until), and how many prompts had to be cut."""
    lm.num_cut = 0
    requests = [Instance(cast(Any, kind), {}, each, 0) for each in arguments]
    return getattr(lm, kind)(requests, disable_tqdm=True), lm.num_cut


def _counting(kind: type, spare: int) -> Any:
    """lm-eval's class, counting the prompts that it cuts from the left.

    spare: by how many tokens a prompt with its choice may be longer than the model's context.
    """

    class Counting(kind):
        num_cut = 0

        def _loglikelihood_tokens(self, requests: Any, **how: Any) -> Any:
            room = self.max_length + spare
            longest = max((len(choice) for _, _, choice in requests), default=0)
            if longest > self.max_length:  # lm-eval asserts it
                raise DoesNotFit(f"an answer of {longest} tokens does not fit the model's context of {self.max_length}")
            if not all(choice for _, _, choice in requests):
                raise DoesNotFit("an answer to choose from has no tokens")
            self.num_cut += len({text[0] for text, prompt, choice in requests if len(prompt) + len(choice) > room})
            return super()._loglikelihood_tokens(requests, **how)

        def generate_until(self, requests: Any, **how: Any) -> Any:
            for request in requests:
                prompt, settings = request.args
                answer_tokens = cast(Any, normalize_gen_kwargs(settings, self.max_gen_toks))["max_gen_toks"]
                if answer_tokens >= self.max_length:
                    raise DoesNotFit(f"an answer of {answer_tokens} tokens leaves no room in {self.max_length}")
                self.num_cut += len(self.tok_encode(prompt)) > self.max_length - answer_tokens
            return super().generate_until(requests, **how)

    return Counting


def _load_hf(folder: Path, setup: Setup) -> Any:
    base = base_of(folder)
    dtype = getattr(torch, setup.dtype)
    try:
        # Not cast afterwards: that would round the rotary frequencies too, and turn the words of a long prompt.
        model = load_model(str(base or folder), dtype=torch.float32 if base else dtype)
        if base:
            # Merged as `merge_and_unload` would for a model on disk, so that both answer alike to the last bit.
            model = cast(Any, load_adapter(model, str(folder))).merge_and_unload()
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder}: not a model that can be loaded: {_in_short(error)}") from error
    return model


def _load_vllm(model: Any, setup: Setup) -> Any:
    if not isinstance(model, str | Path):
        raise UserError("vLLM loads models from folders; save this one first")
    if (Path(model) / ADAPTER).is_file():
        raise UserError(
            f"{model}: is an adapter; merge it for vLLM (`soren-align merge RUN` makes RUN/merged), or use --backend hf"
        )
    if "quantization_config" not in (read_json(Path(model) / "config.json") or {}):  # vLLM has quantizers of its own
        try:
            load_model(str(model), device_map={"": "meta"})  # names and shapes only: vLLM loads the weights itself
        except (ImportError, OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{model}: not a model that can be loaded: {_in_short(error)}") from error
    from lm_eval.models.vllm_causallms import VLLM

    # It always generates a token, and needs room for it.
    return _counting(VLLM, -1)(pretrained=str(model), dtype=setup.dtype, batch_size=setup.batch_size, seed=1234)


def _in_short(error: Exception) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) < 200 else f"{said[:200]}..."
