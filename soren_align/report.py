"""The run folder: what a run leaves behind to be read, resumed and believed.

    recipe.yaml    as resolved, every default written out
    run.json       status, versions, commit, data, start, routing, the optimizer that really stepped
    metrics.jsonl  a line per log
    checkpoints/   to go on from        model/   what came out        eval/<suite>/   what it scores
    merged/        the model and its base as one, where it is an adapter (soren-align merge)
    tensorboard/   where trainer.report_to names it

Files appear whole or not at all (written aside, then renamed), so that a kill leaves nothing half-read.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__
from .recipe import UserError

PACKAGES = ("torch", "transformers", "trl", "datasets", "accelerate", "peft", "deepspeed", "lm-eval", "pydantic")
SEAL = "soren_align.json"  # written last into a checkpoint, when it is complete
MADE_FROM = "merged_from.json"  # in a merged model: sha256 of the adapter that it was made from
CONTENTS = ("recipe.yaml", "run.json", "metrics.jsonl", "start", "checkpoints", "model", "merged", "eval", ".lock")
CONTENTS += ("tensorboard",)
LOST = 0.5
"""Of a change, or of the entries that are to change: if less arrives, more is lost than done. What works is far above a
half and what does not far below: at its first step, Soren at the paper's 1e-6 moves 0.98 of float32 weights and less
than 0.01 of bfloat16 ones."""


class RunFolder:
    """The files of one run, by name."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self.recipe = self.path / "recipe.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.start = self.path / "start"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.merged = self.path / "merged"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    def __str__(self):
        return str(self.path)

    def evaluation(self, suite: str) -> Path:
        """Where a suite's results go."""
        return self.path / "eval" / suite

    def read(self) -> dict[str, Any] | None:
        """run.json, or None where there is no run."""
        file = self.path / "run.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def update(self, **changes: Any) -> None:
        """Set keys of run.json."""
        self.path.mkdir(parents=True, exist_ok=True)
        write(self.path / "run.json", json.dumps((self.read() or {}) | changes, indent=2) + "\n")

    def sealed(self) -> list[Path]:
        """The complete checkpoints (see trainers/checkpoints.py)."""
        return [seal.parent for seal in self.checkpoints.glob(f"checkpoint-*/{SEAL}")]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder while in it; UserError if another process does. A killed holder lets go."""
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self}: another process is running this run") from None
            yield

    def refuse_busy(self) -> None:
        """UserError if a process is running this run."""
        with self.alone():
            pass

    def adapter(self) -> dict[str, str | None]:
        """Which adapter the run trained, as `merged` says which it was made from."""
        return {"adapter_sha256": fingerprint(str(self.model))}

    def is_merged(self) -> bool:
        """Whether `merged` is the run's own adapter and its base."""
        file = self.merged / MADE_FROM
        return file.is_file() and json.loads(file.read_text(encoding="utf-8")) == self.adapter()

    def clear(self) -> None:
        """Remove what runs write, and nothing else that a person may have put there."""
        for name in CONTENTS:
            entry = self.path / name
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines of steps that a resumed run takes again, and a last line that a kill cut short."""
        if not self.metrics.is_file():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record["step"] <= step:
                kept.append(line)
        write(self.metrics, "".join(line + "\n" for line in kept))


def is_component(name: Any) -> bool:
    """Whether `name`, read from a file, is the name of one entry of a folder, and no path that leads elsewhere."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and name.isprintable()
        and not {"/", "\\"} & set(name)
        and len(name.encode("utf-8", "surrogatepass")) <= 200  # 255, less what is written beside it (.part, .jsonl)
    )


def dropped_in_words(dropped: dict[str, int]) -> str:
    """Rows left out, reason -> number: "3 dropped (messages is an empty list), ..."; empty for none."""
    return ", ".join(f"{count} dropped ({reason})" for reason, count in dropped.items())


def now() -> str:
    """The time, for run.json."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    aside = path.with_name(path.name + ".part")
    with aside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)


def fingerprint(model: str) -> str | None:
    """sha256 over a local model folder's weights; None for a hub name."""
    if not Path(model).is_dir():
        return None
    files = sorted(Path(model).glob("*.safetensors"))
    return _sha256(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@lru_cache
def _sha256(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Of the files' contents one after another; read once as long as their sizes and times stay (1.5 GB/s)."""
    digest = hashlib.sha256()
    for file, _, _ in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def provenance() -> dict[str, Any]:
    """Versions and commit: what another person needs to have in front of them to repeat the run."""
    versions = {"python": platform.python_version(), "soren-align": __version__}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"versions": versions, "commit": commit(), "platform": platform.platform()}


def commit() -> str | None:
    """The commit of the checkout that this code runs from, '+changes' when edited; None when installed from a wheel."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        head = _git(folder, "rev-parse", "HEAD").strip()
        return head + ("+changes" if _git(folder, "status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout
