"""The backends: a model is loaded and run by Hugging Face transformers or by vLLM.

Either is lm-eval's own class, so that prompts are tokenized and scored exactly as by `lm_eval`.
Added here: missing weights are refused, and truncated prompts are counted.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ...core.errors import UserError, in_one_line
from ...core.extras import require
from ...core.files import read_json
from ...recipe.schema import ADAPTER
from ...run.weights import load_model
from .models import base_folder, load_for_inference, loading_errors

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
    if settings.backend == "hf":
        model = load_for_inference(folder, settings.dtype, settings.device)
        return hf_lm(model, tokenizer, settings.batch_size)
    # vLLM has quantizers of its own
    if "quantization_config" not in (read_json(folder / "config.json") or {}):
        with loading_errors(folder):
            # names and shapes only: vLLM loads the weights itself
            load_model(str(folder), device_map={"": "meta"})
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
    if backend == "vllm":
        require("vllm", "eval.backend", "write hf")


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
