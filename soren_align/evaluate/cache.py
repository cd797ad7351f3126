"""The cache of responses: no request is computed twice, and no model gets another model's responses.

A cache file belongs to one model. Its name is a hash of all that determines the responses: weights, configs, tokenizer,
template, dtype, batch size, device, versions. It has one line per chunk of requests, under a hash of the requests.
The chunks do not depend on the number of processes, so that a cached response equals, to the last bit, the one that
would be computed again.
"""

import hashlib
import json
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ..files import digest
from ..provenance import fingerprint
from .backends import FILES, BackendSettings, base_folder

FORMAT = 2
"""Of a cache file. Increased when this package loads or runs models differently, so that responses change."""
PACKAGES = ("torch", "transformers", "lm-eval", "tokenizers", "peft")


class ResponseCache:
    """The cached responses of one model."""

    def __init__(self, root: Path | None, key: dict[str, Any]):
        """root: the cache folder; None keeps the responses in memory. key: what determines them, see `cache_key`."""
        self.responses: dict[str, tuple[list[Any], int]] = {}
        """By chunk: the responses, and the number of truncated prompts."""
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
                self.responses[record["chunk"]] = ([_restore(r) for r in record["responses"]], record["truncated"])
            except (ValueError, KeyError, TypeError):
                continue  # the first line, which is the key, or a line that a kill left incomplete
        if not text:
            self._append(json.dumps(key) + "\n")
        elif not text.endswith(b"\n"):
            self._append("\n")  # ends an incomplete line

    def add(self, chunk: str, responses: list[Any], num_truncated: int) -> None:
        """Add the responses to a chunk of requests."""
        self.responses[chunk] = ([_restore(response) for response in responses], num_truncated)
        if self.file:
            self._append(json.dumps({"chunk": chunk, "truncated": num_truncated, "responses": responses}) + "\n")

    def _append(self, text: str) -> None:
        # One write in append mode: two evaluations of one model may add responses at the same time.
        assert self.file
        with self.file.open("ab", buffering=0) as stream:
            stream.write(text.encode())


def cache_key(folder: Path, settings: BackendSettings, device: str) -> dict[str, Any]:
    """Return what determines the responses of the model in `folder` to given requests. device: its full name."""
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


def model_digest(folder: Path) -> str:
    """Return a sha256 over the files of a model; for an adapter, over its base's files too."""
    files = sorted({f for pattern in FILES for f in folder.glob(pattern) if f.suffix != ".safetensors" and f.is_file()})
    hashes: list[Any] = [[f.name, _file_sha256(f, f.stat().st_mtime_ns)] for f in files]
    base = base_folder(folder)
    return digest([fingerprint(str(folder)), hashes, model_digest(base) if base else None])


@lru_cache
def _file_sha256(file: Path, modified_ns: int) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _restore(response: Any) -> Any:
    """Return a log-likelihood's [number, is_greedy] as lm-eval's tuple; a text unchanged."""
    return tuple(response) if isinstance(response, list) else response
