"""Answers, kept by what they are answers to: no other model's are ever given, and none is asked for twice.

A journal is a file per model, named by a hash of all that decides an answer: weights, configs, tokenizer, template,
precision, batch size, device, versions. In it stands a line per piece of work, under a hash of its requests. The
pieces are cut in the same way however many processes work on them, so that an answer taken from here is, to the last
bit, the one that would be given again.
"""

import hashlib
import json
import os
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ..provenance import fingerprint
from .backends import FILES, Setup, base_of

FORMAT = 1
"""Of the answers. Counted up when our own loading or asking of a model changes what it answers."""
PACKAGES = ("torch", "transformers", "lm-eval", "tokenizers", "peft")


def default_root() -> Path:
    """Where journals are kept: $SOREN_ALIGN_CACHE, or soren-align in the user's cache folder."""
    given = os.environ.get("SOREN_ALIGN_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "soren-align").expanduser()


class Journal:
    """The answers of one model."""

    def __init__(self, root: Path | None, identity: dict[str, Any]):
        """root: the folder of all journals; None keeps the answers in memory. identity: what decides the answers."""
        self.answers: dict[str, tuple[list[Any], int]] = {}
        self.file = None
        if root is None:
            return
        folder = root / "answers"
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"{digest(identity)}.jsonl"
        text = self.file.read_bytes() if self.file.is_file() else b""
        for line in text.split(b"\n"):
            try:
                record = json.loads(line)
                self.answers[record["piece"]] = ([_frozen(a) for a in record["answers"]], record["cut"])
            except (ValueError, KeyError, TypeError):
                continue  # the identity, or what a kill cut short
        if not text:
            self._append(json.dumps(identity) + "\n")
        elif not text.endswith(b"\n"):
            self._append("\n")  # close the line that a kill cut short

    def add(self, piece: str, answers: list[Any], num_cut: int) -> None:
        """Keep the answers to a piece of work."""
        self.answers[piece] = ([_frozen(a) for a in answers], num_cut)
        if self.file:
            self._append(json.dumps({"piece": piece, "cut": num_cut, "answers": answers}) + "\n")

    def _append(self, text: str) -> None:
        # One write in append mode: two evaluations of one model may keep their answers at the same time.
        assert self.file
        with self.file.open("ab", buffering=0) as stream:
            stream.write(text.encode())


def digest(content: Any) -> str:
    """sha256 of what JSON can say."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def identity(folder: Path, setup: Setup, device: str) -> dict[str, Any]:
    """What decides the answers of the model in a folder, beside the requests. device: its full name."""
    packages = [*PACKAGES, *(["vllm"] if setup.backend == "vllm" else [])]
    return {
        "format": FORMAT,
        "model": contents(folder),
        "backend": setup.backend,
        "dtype": setup.dtype,
        "batch_size": setup.batch_size,
        "device": device,
        "versions": {package: metadata.version(package) for package in packages},
    }


def contents(folder: Path) -> str:
    """sha256 over a model folder's files; with an adapter, over its base's too."""
    files = sorted({f for pattern in FILES for f in folder.glob(pattern) if f.suffix != ".safetensors" and f.is_file()})
    said: list[Any] = [[f.name, _small(f, f.stat().st_mtime_ns)] for f in files]
    base = base_of(folder)
    return digest([fingerprint(str(folder)), said, contents(base) if base else None])


@lru_cache
def _small(file: Path, changed: int) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _frozen(answer: Any) -> Any:
    """A log-likelihood's [number, whether greedy] as lm-eval's tuple; a text as it is."""
    return tuple(answer) if isinstance(answer, list) else answer
