"""Answer the requests to one model from the cache, or by the worker processes in chunks.

lm-eval sees a single model on a single rank, so that its few-shot examples do not depend on the
number of processes (with lm-eval's own data parallelism on two ranks, most prompts change). Workers
get finished prompts.

No request is computed twice, and no model gets another model's responses: a cache file belongs to
one model. Its name is a hash of all that determines the responses: weights, configs, tokenizer,
template, dtype, batch size, device, versions. It has one line per chunk of requests, under a hash
of the requests. The chunks do not depend on the number of processes, so that a cached response
equals, to the last bit, the one that would be computed again.
"""

import json
from collections.abc import Callable
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from ...core.errors import UserError
from ...core.files import digest
from ...data.rendering import template_errors
from .backends import BackendSettings, ContextTooShort
from .models import model_digest
from .workers import Workers

FORMAT = 2
"""The version of a cache file. Increased when this package loads or runs models differently, so
that responses change."""
PACKAGES = ("torch", "transformers", "lm-eval", "tokenizers", "peft")


class ResponseCache:
    """The cached responses of one model."""

    def __init__(self, root: Path | None, key: dict[str, Any], folder: Path | None = None):
        """root: the cache folder; None keeps the responses in memory.
        key: what determines them, see `cache_key`. folder: of the model, which must still be the
        key's when its first responses are stored.
        """
        self.unverified = folder if root else None
        self.key = key
        self.responses: dict[str, tuple[list[Any], int]] = {}
        """Each chunk's responses, and the number of truncated prompts."""
        self.file = None
        if root is None:
            return
        folder = root / "responses"
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"{digest(key)}.jsonl"
        text = self.file.read_bytes() if self.file.is_file() else b""
        for line in text.split(b"\n"):
            try:
                record = json.loads(line)
                # One flipped bit would be another score, of the model that was evaluated.
                if record.pop("sha256") != digest(record):
                    continue
                self.responses[record["chunk"]] = (
                    [_restore(r) for r in record["responses"]],
                    record["truncated"],
                )
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # the first line, which is the key, or a line that a kill left incomplete
        if not text:
            self._append(json.dumps(key) + "\n")
        elif not text.endswith(b"\n"):
            self._append("\n")  # ends an incomplete line

    def add(self, chunk: str, responses: list[Any], num_truncated: int) -> None:
        """Add the responses to a chunk of requests.

        Raises UserError if the model's files have changed since the key was made.
        """
        # The files were hashed before the model was loaded: another command may have replaced them
        # in between, and its answers would be cached as this model's for good.
        if self.unverified and model_digest(self.unverified) != self.key["model"]:
            raise UserError(
                f"{self.unverified}: has changed while it was evaluated; wait until the other"
                " command has ended, and evaluate it again"
            )
        self.unverified = None
        self.responses[chunk] = ([_restore(response) for response in responses], num_truncated)
        if self.file:
            record = {"chunk": chunk, "truncated": num_truncated, "responses": responses}
            self._append(json.dumps(record | {"sha256": digest(record)}) + "\n")

    def _append(self, text: str) -> None:
        # One write in append mode: two evaluations of one model may add responses at the same time.
        assert self.file
        with self.file.open("ab", buffering=0) as stream:
            stream.write(text.encode())


def cache_key(folder: Path, settings: BackendSettings, device: str) -> dict[str, Any]:
    """Return what determines the responses of the model in `folder` to given requests.
    device: its full name.
    """
    packages = [*PACKAGES, *(["vllm"] if settings.backend == "vllm" else [])]
    return {
        "format": FORMAT,
        "model": model_digest(folder),
        "backend": settings.backend,
        "dtype": settings.dtype,
        "batch_size": settings.batch_size,
        "device": device,
        "versions": {package: metadata.version(package) for package in packages},
    }


def _restore(response: Any) -> Any:
    """Return a log-likelihood's [number, is_greedy] as lm-eval's tuple; a text unchanged."""
    return tuple(response) if isinstance(response, list) else response


BATCHES_PER_CHUNK = 16
"""Batches of log-likelihoods in a chunk: enough to sort requests by length, few enough to lose
little when killed."""


class RequestDispatcher(LM):
    """lm-eval's model: takes responses from the cache and sends the remaining requests to the
    workers.
    """

    def __init__(
        self,
        workers: Workers,
        tokenizer: Any,
        settings: BackendSettings,
        cache: ResponseCache,
        *,
        strict: bool = False,
    ):
        """strict: a truncated prompt is an error."""
        super().__init__()
        self.workers, self.tokenizer, self.settings = workers, tokenizer, settings
        self.cache, self.strict = cache, strict
        self.chat_template_args: dict[str, Any] = {}  # read by HFLM.apply_chat_template
        self.num_computed = self.num_cached = self.num_truncated = 0
        self.label = ""
        """Model and column, for errors."""
        self.on_progress: Callable[[int, int], object] = lambda done, total: None
        """Called with the numbers of requests: those that have responses, and all."""

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood of the continuation after its context, whether it is greedy) of
        each request.
        """
        return self._responses("loglikelihood", [request.args for request in requests])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text generated after each context."""
        return self._responses("generate_until", [request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text."""
        return self._responses("loglikelihood_rolling", [request.args for request in requests])

    def _responses(self, kind: str, requests: list[tuple]) -> list[Any]:
        """Return the responses in the order of the requests; those not cached are computed and
        cached.
        """
        # Chunks depend on the requests and the batch size alone, so that every number of processes
        # computes the same batches, bit for bit, and a killed evaluation finds its chunks again.
        # vLLM schedules batches itself
        single = kind == "generate_until" and self.settings.backend == "hf"
        chunks = make_chunks(
            requests, self.settings.batch_size * (1 if single else BATCHES_PER_CHUNK)
        )
        keys = [digest([kind, [requests[i] for i in chunk]]) for chunk in chunks]
        missing = {
            key: chunk
            for key, chunk in zip(keys, chunks, strict=True)
            if key not in self.cache.responses
        }
        work = [(key, kind, [requests[i] for i in chunk]) for key, chunk in missing.items()]
        done = len(requests) - sum(len(chunk) for chunk in missing.values())
        self.num_cached += done
        self.on_progress(done, len(requests))
        # Each chunk is in the cache as soon as it is computed: a kill loses one chunk per process.
        try:
            for key, responses, num_truncated in self.workers.run(work):
                self._refuse_truncated(num_truncated)
                self.cache.add(key, responses, num_truncated)
                self.num_computed += len(responses)
                done += len(responses)
                self.on_progress(done, len(requests))
        except ContextTooShort as error:
            raise UserError(f"{self.label}: {error}; omit this column (--omit)") from None
        # lm-eval expects the order of its requests; the chunks are sorted by length.
        ordered: list[Any] = [None] * len(requests)
        for key, chunk in zip(keys, chunks, strict=True):
            responses, num_truncated = self.cache.responses[key]
            self._refuse_truncated(num_truncated)
            self.num_truncated += num_truncated
            for i, response in zip(chunk, responses, strict=True):
                ordered[i] = response
        return ordered

    def _refuse_truncated(self, num_truncated: int) -> None:
        if num_truncated and self.strict:
            raise UserError(
                f"{self.label}: prompts do not fit the model's context; use --no-strict to truncate"
                " prompts"
            )

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        """Return HFLM's rendering of one prompt."""
        with template_errors(f"{self.label}: the chat template"):
            return HFLM.apply_chat_template(cast(Any, self), *args, **options)

    tokenizer_name = HFLM.tokenizer_name


def make_chunks(requests: list[tuple], size: int) -> list[list[int]]:
    """Return the indices of the requests in chunks, longest contexts first: a batch too large fails
    at once.

    Requests of one context stay in one chunk, which may exceed `size`. The chunks depend on the
    requests and `size` only.
    """
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i][0]), requests[i][0], i))
    chunks: list[list[int]] = []
    for _, group in groupby(order, key=lambda i: requests[i][0]):
        same_context = list(group)
        if not chunks or len(chunks[-1]) + len(same_context) > size:
            chunks.append([])
        chunks[-1] += same_context
    return chunks
