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
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__, manifest
from .errors import UserError
from .files import is_component, local_path, read_json

PACKAGES = ("torch", "transformers", "trl", "datasets", "accelerate", "peft", "deepspeed", "lm-eval", "pydantic")
COMPLETE_MARKER = "soren_align.json"  # written last into a checkpoint, when it is complete
MADE_FROM = "merged_from.json"  # in a merged model: sha256 of the adapter that it was made from
CONTENTS = (
    "recipe.yaml",
    "metrics.jsonl",
    "start",
    "checkpoints",
    "model",
    "merged",
    "eval",
    "tensorboard",
    "run.json",
)
LOCK, RANKS_LOCK = ".lock", ".lock-ranks"
LOST = 0.5
"""Of a change, or of the entries that are to change: if less arrives, more is lost than done. What works is far above a
half and what does not far below: at its first step, Soren at the paper's 1e-6 moves 0.98 of float32 weights and less
than 0.01 of bfloat16 ones."""
_PART = re.compile(r"run\.json\.(\d+\.)?part")
_HELD = "SOREN_ALIGN_LOCK"  # the file descriptors of held locks, for what this process becomes by exec


class RunFolder:
    """The files of one run, by name. What is read from them is a stranger's until it is checked."""

    def __init__(self, path: str | Path):
        self.path = local_path(str(path))
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
        """Where a suite's results go. UserError for a name that would lead elsewhere."""
        if not is_component(suite):
            raise UserError(f"suite {suite!r}: is no name for a folder of results")
        return self.path / "eval" / suite

    def read(self, *needed: str) -> dict[str, Any] | None:
        """run.json, with these keys in it, or None where there is no run.

        UserError if it is damaged, lacks a key, or was not written by soren-align. A folder with a config.json is a
        model's, whatever another tool has put beside it.
        """
        file = self.path / "run.json"
        if not file.is_file() or (self.path / "config.json").is_file():
            return None
        return manifest.checked(read_json(file), file, needed)

    def record(self, *needed: str) -> dict[str, Any]:
        """As `read`, with a UserError if there is no run."""
        record = self.read(*needed)
        if record is None:
            raise UserError(f"{self}: is no run folder (run.json)")
        return record

    def update(self, **changes: Any) -> None:
        """Set keys of run.json."""
        self.replace(**((self.read() or {}) | changes))

    def replace(self, **record: Any) -> None:
        """Write run.json anew."""
        write(self.path / "run.json", json.dumps(record, indent=2) + "\n")

    def complete_checkpoints(self) -> list[Path]:
        """The complete checkpoints (see trainers/checkpoints.py)."""
        return [seal.parent for seal in self.checkpoints.glob(f"checkpoint-*/{COMPLETE_MARKER}")]

    # -- one process at a time --------------------------------------------------------------------------------------

    def lock(self, *, begin: bool = False, as_rank: bool = False, shared: bool = False) -> None:
        """Hold the folder until this process ends, and in what it becomes by exec. Comes before all that is read in it.

        begin: it may be new, and is made. as_rank: by the first of several ranks, beside their launcher, which may be
        killed before them. shared: beside others that evaluate it too, and nobody who trains.
        UserError if another process holds it, if it is no run's, and for links in it.
        """
        name = RANKS_LOCK if as_rank else LOCK
        if not self.holds(name):
            self._refuse_foreign(begin)
            self.path.mkdir(parents=True, exist_ok=True)
            # Before the ranks' lock: else this could get in the way of a run's own rank.
            held = self._locked(name, shared)
            try:
                if not as_rank and not self.holds(RANKS_LOCK):
                    os.close(self._locked(RANKS_LOCK, shared))
            except BaseException:
                os.close(held)
                raise
            os.set_inheritable(held, True)
            os.environ[_HELD] = " ".join([*os.environ.get(_HELD, "").split(), str(held)])
        self._refuse_links()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder while in it; see `lock`."""
        was_held = self.holds()
        try:
            self.lock()
            yield
        finally:
            if not was_held:
                self.release()

    def release(self) -> None:
        """Let other processes have the folder."""
        for held in os.environ.pop(_HELD, "").split():
            if self._is(int(held), LOCK) or self._is(int(held), RANKS_LOCK):
                os.close(int(held))
            else:
                os.environ[_HELD] = " ".join([*os.environ.get(_HELD, "").split(), held])

    def holds(self, name: str = LOCK) -> bool:
        """Whether this process holds the folder."""
        return any(self._is(int(held), name) for held in os.environ.get(_HELD, "").split())

    def _is(self, descriptor: int, name: str) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), (self.path / name).stat(follow_symlinks=False))
        except OSError:  # of a parent process: a child has the variable, and not the descriptor
            return False

    def _locked(self, name: str, shared: bool) -> int:
        """The descriptor of a lock file that this process holds; UserError if another does."""
        # As the umask says: a group may share a run folder.
        descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise UserError(f"{self}: another process is running this run, or evaluating it") from None
            raise UserError(f"{self}: its file system has no locks ({error.strerror}); choose another folder") from None
        return descriptor

    def _refuse_foreign(self, begin: bool) -> None:
        """UserError where no run is, nor may begin: nothing is put there, not even a lock."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self}: is a file; choose another run.output_dir")
        there = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        there -= {LOCK, RANKS_LOCK, *(name for name in there if _PART.fullmatch(name))}  # of a start that was killed
        if self.read() is not None or (begin and not there):
            return
        if begin:
            raise UserError(f"{self}: not empty and not a run folder; choose another run.output_dir")
        raise UserError(f"{self}: is no run folder (run.json)")

    # -- nothing outside of it --------------------------------------------------------------------------------------

    def _refuse_links(self) -> None:
        """UserError for a link among what runs write: through it, files elsewhere would be changed."""
        for name in CONTENTS:
            for entry in (self.path / name, *self.path.glob(f"{name}.*part")):
                for link in _links(entry):
                    raise UserError(
                        f"{link}: is a link to {os.readlink(link)}, and a run writes into no other folder; remove it, "
                        "or have the whole run elsewhere (run.output_dir)"
                    )

    def clear(self) -> None:
        """Remove what runs write, and nothing else that a person may have put there; links, not what they lead to.

        run.json stays, to be replaced: without it the folder would be no run's if this is interrupted.
        """
        for name in CONTENTS[:-1]:
            for entry in (self.path / name, *self.path.glob(f"{name}.*part")):
                remove(entry)

    def adapter(self) -> dict[str, str | None]:
        """Which adapter the run trained, as `merged` says which it was made from."""
        return {"adapter_sha256": fingerprint(str(self.model))}

    def is_merged(self) -> bool:
        """Whether `merged` is the run's own adapter and its base."""
        file = self.merged / MADE_FROM
        return file.is_file() and read_json(file) == self.adapter()

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines of steps that a resumed run takes again, and a last line that a kill cut short."""
        if not self.metrics.is_file():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                if json.loads(line)["step"] <= step:
                    kept.append(line)
        write(self.metrics, "".join(line + "\n" for line in kept))


def dropped_in_words(dropped: dict[str, int]) -> str:
    """Rows left out, reason -> number: "3 dropped (messages is an empty list), ..."; empty for none."""
    return ", ".join(f"{count} dropped ({reason})" for reason, count in dropped.items())


def now() -> str:
    """The time, for run.json."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part. A link is replaced, not followed."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")  # two evaluations of a run write its card
    remove(aside)
    with aside.open("x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link without what it leads to; or find nothing there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _links(path: Path) -> Iterator[Path]:
    """The links at `path` and below it."""
    if path.is_symlink():
        yield path
    elif path.is_dir():
        for folder, folders, files in os.walk(path):
            yield from (entry for name in (*folders, *files) if (entry := Path(folder, name)).is_symlink())


def fingerprint(model: str) -> str | None:
    """sha256 over a local model folder's weights; None for a hub name."""
    if not Path(model).is_dir():
        return None
    files = sorted(file for file in Path(model).glob("*.safetensors") if file.is_file())
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
