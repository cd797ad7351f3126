"""The run folder: the files of one run, written so that it can be read, resumed and repeated.

    recipe.yaml    the resolved recipe, with every default
    run.json       status, versions, commit, data, start, routing, optimizer (see run/record.py)
    metrics.jsonl  one line per log
    spectra.jsonl  singular values of momenta, if run.log_spectra names steps
    samples.jsonl  answers to prompts during training, if run.samples names some
    benchmarks/    scores of checkpoints during training, if run.benchmark asks for them
    held_out.json  metrics of each held-out example at both ends, of the final runs of a study
    curves.png     losses and margins along the steps; curves-dark.png: for a dark page
    start_logits.safetensors   until training ends, if run.kl_to_start is measured
    checkpoints/   to resume from       model/   the trained model       eval/<suite>/   its scores
    merged/        the adapter merged with its base model (soren-align merge)
    gguf/          the model for llama.cpp and Ollama (soren-align export)
    tensorboard/   if trainer.report_to names it

Files are written atomically, so that a killed run leaves none truncated.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from ..core.errors import DivergedError, ResumableError, UserError
from ..core.files import Content, is_component, local_path, read_json, remove, write
from . import lock
from .provenance import fingerprint, software
from .record import EDITED, FORMAT_VERSION, read_record, to_text

COMPLETE_MARKER = "soren_align.json"
"""The seal of a checkpoint, written last, when all its files are complete and on the disk."""
PREVIOUS = "remove this checkpoint's folder to resume from the previous checkpoint"
"""The remedy for a damaged checkpoint."""
MERGED_FROM = "merged_from.json"  # in a merged model: sha256 of the adapter that was merged
CONTENTS = (
    "recipe.yaml",
    "metrics.jsonl",
    "spectra.jsonl",
    "samples.jsonl",
    "start",
    "start_logits.safetensors",
    "held_out.json",
    "benchmarks",
    "curves.png",
    "curves-dark.png",
    "checkpoints",
    "model",
    "merged",
    "gguf",
    "eval",
    "tensorboard",
    "run.json",
)
"""The entries that a run writes. The record comes last: without it the folder would not be a
run's."""
AFTER_DIVERGENCE = "train again with a smaller optimizer.lr, such as a tenth, and with --overwrite"
STOPPED = "stopped by a signal"
"""`last_error` of a run that a signal stopped: the same command resumes it."""
LOCK, RANKS_LOCK = ".lock", ".lock-ranks"
_PART = re.compile(r"run\.json\.(\d+\.)?part")


class RunFolder:
    """The files of one run, by name."""

    def __init__(self, path: str | Path):
        self.path = local_path(str(path))
        self.recipe = self.path / "recipe.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.spectra = self.path / "spectra.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.held_out = self.path / "held_out.json"
        self.curves = self.path / "curves.png"
        self.start = self.path / "start"
        self.start_logits = self.path / "start_logits.safetensors"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.merged = self.path / "merged"
        self._file = self.path / "run.json"
        self._is_holder = False
        # The record that was read last, and the version of the file that it is from.
        self._cached: tuple[tuple[int, int], dict[str, Any]] | None = None

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    def __str__(self):
        # As a word of a command: `-rf` would be options.
        return f"./{self.path}" if str(self.path).startswith("-") else str(self.path)

    def evaluation(self, suite: str) -> Path:
        """Return the folder for a suite's results.
        Raises UserError if the name is a path to another folder.
        """
        if not is_component(suite):
            raise UserError(
                "--suite: the results are written into a folder with the suite's name, but "
                f"{suite!r} cannot be such a name; rename the suite's folder: printable "
                "characters without / and \\, at most 200 bytes"
            )
        return self.path / "eval" / suite

    def read(self) -> dict[str, Any] | None:
        """Return run.json, or None if the folder is not a run's.

        Raises UserError if it is damaged, or was not written by soren-align. A folder with a
        config.json is a model's, even if another tool has written a run.json into it.
        """
        if not self._file.is_file() or (self.path / "config.json").is_file():
            return None
        # A holder reads it again only if the file was replaced, as by a rank that it started.
        if not self._is_holder or self._cached is None or self._cached[0] != self._version():
            self._cached = self._version(), read_record(self._file)
        return dict(self._cached[1])

    def _version(self) -> tuple[int, int]:
        status = self._file.stat()
        return status.st_ino, status.st_mtime_ns

    def record(self, *required: str) -> dict[str, Any]:
        """Return run.json as `read` does.
        Raises UserError if the folder is not a run's, or lacks a required key.
        """
        record = self.read()
        if record is None:
            raise UserError(f"{self}: has no run.json; name a run folder")
        if missing := [key for key in required if key not in record]:
            raise UserError(f"{self._file}: has no {', '.join(missing)}; {EDITED}")
        return record

    def why_no_model(self) -> str:
        """Return the finding and the remedy for a run without a model folder."""
        record = self.record()
        if record["status"] == "diverged":
            return f"diverged: {record['training']['diverged']}; {AFTER_DIVERGENCE}"
        if record["status"] == "finished":
            return "the model of this finished run was removed; train again with --overwrite"
        return f"has no model yet (status: {record['status']}); finish the run first"

    def update(self, **changes: Any) -> None:
        """Set keys of run.json; all others stay."""
        self.replace(**((self.read() or {}) | changes))

    def replace(self, **record: Any) -> None:
        """Replace run.json by these keys and the version of its format."""
        # As it will be read: tuples are lists in JSON, and the hash is of what the file has.
        record = json.loads(json.dumps(record | {"format_version": FORMAT_VERSION}))
        write(self._file, to_text(record))
        self._cached = self._version(), record

    def record_failure(self, error: Exception) -> None:
        """Write an error into run.json, if the run has begun and the disk has room: its message,
        whether the training diverged, and whether the same command resumes the run. Of a defect, no
        UserError, the software that has it.
        """
        # The software that has a defect: a rerun of the same version would only fail again.
        is_defect = not isinstance(error, UserError)
        message = (
            (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
            if is_defect
            else str(error)
        )
        with suppress(OSError, UserError):
            if self.read() is not None:
                self.update(
                    last_error=message,
                    diverged=isinstance(error, DivergedError),
                    resumable=isinstance(error, ResumableError),
                    failure="defect" if is_defect else error.kind,
                    defect=software() if is_defect else None,
                )

    def forget_failure(self) -> None:
        """Remove what `record_failure` has written: the run is resumed."""
        failure = ("diverged", "resumable", "failure", "defect")
        self.replace(
            **{key: value for key, value in self.record().items() if key not in failure}
            | {"last_error": None}
        )

    def complete_checkpoints(self) -> list[Path]:
        """Return the complete checkpoints (see training/checkpoints.py), in the order of their
        steps.
        """
        return [
            path for path in checkpoints_in(self.checkpoints) if (path / COMPLETE_MARKER).is_file()
        ]

    def lock(self, *, create: bool = False, as_rank: bool = False, shared: bool = False) -> None:
        """Hold the folder until `release`. Comes before anything in the folder is read.

        create: the folder may be new. as_rank: for the first of several ranks, whose launcher holds
        the folder too; the launcher may be killed before the ranks end. shared: other processes may
        evaluate the run at the same time, and none may train it. Raises UserError if another
        process holds the folder, if it is not a run's, and if it contains links.
        """
        own = self.path / (RANKS_LOCK if as_rank else LOCK)
        if not lock.is_held(own):
            # Nothing is written, not even a lock, if the folder is not a run's and cannot become
            # one: a wrong path must not cost anyone a file.
            if self.path.exists() and not self.path.is_dir():
                raise UserError(f"{self}: is a file; choose another run.output_dir")
            names = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
            # What a start that was killed has left counts as nothing.
            names = {
                name for name in names if not name.startswith(LOCK) and not _PART.fullmatch(name)
            }
            if not create:
                self.record()
            elif self.read() is None and names:
                raise UserError(
                    f"{self}: is neither empty nor a run folder; choose another run.output_dir"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(own, shared=shared)
            # Ranks may still train after their launcher was killed: their lock must be free too.
            ranks = self.path / RANKS_LOCK
            if not as_rank and not lock.is_held(ranks):
                try:
                    lock.acquire(ranks, shared=shared)
                except UserError:
                    lock.release(own)
                    raise
                lock.release(ranks)
        self._is_holder = True
        # Writing or clearing through a link, such as to a scratch disk, would change files that
        # are not the run's.
        for entry in self._entries(CONTENTS):
            for link in _links(entry):
                raise UserError(
                    f"{link}: is a symbolic link to {os.readlink(link)}, but a run writes only "
                    "into its folder; remove the link, or choose another run.output_dir for the "
                    "whole run"
                )

    def _entries(self, names: Sequence[str]) -> Iterator[Path]:
        """Yield the paths with these names, and what a killed process has left of them."""
        for name in names:
            yield from (self.path / name, *self.path.glob(f"{name}.*part"))

    def release(self) -> None:
        """Let other processes use the folder."""
        self._is_holder = False
        for name in (LOCK, RANKS_LOCK):
            lock.release(self.path / name)

    def is_locked(self) -> bool:
        """Whether this process holds the folder."""
        return any(lock.is_held(self.path / name) for name in (LOCK, RANKS_LOCK))

    def is_in_use(self) -> bool:
        """Whether another process trains or evaluates this run, as far as locks can show it."""
        for file in (self.path / LOCK, self.path / RANKS_LOCK):
            if file.is_file() and not lock.is_held(file):
                try:
                    lock.acquire(file)
                except lock.LockedError:
                    return True
                except (OSError, UserError):  # a read-only folder, or a disk without locks
                    continue
                lock.release(file)
        return False

    def refuse_lost_lock(self) -> None:
        """Raise LockedError if this process no longer holds the folder, as after `rm .lock`."""
        if not self.is_locked():
            raise lock.LockedError(
                f"{self}: the lock of this folder was removed, so another command may train in "
                "this folder. This command stops and changes nothing more; do not remove "
                f"{LOCK}, which becomes free when its process ends"
            )

    @contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Hold the folder within the block; see `lock`."""
        # Nested uses of one process hold the folder once, and the outermost releases it.
        was_locked = self.is_locked()
        try:
            self.lock(shared=shared)
            yield
        finally:
            if not was_locked:
                self.release()

    def clear(self) -> None:
        """Remove the files of a run, and no others; of links, not their targets.

        run.json stays, to be replaced: without it the folder would not be a run's if this is
        interrupted.
        """
        for entry in self._entries(CONTENTS[:-1]):
            remove(entry)

    def adapter(self) -> dict[str, str | None]:
        """Return the content of `merged`'s MERGED_FROM for the run's adapter."""
        return {"adapter_sha256": fingerprint(str(self.model))}

    def is_merged(self) -> bool:
        """Whether `merged` was made from the run's adapter as it is now."""
        file = self.merged / MERGED_FROM
        return file.is_file() and read_json(file) == self.adapter()

    def drop_measurements_after(
        self, step: int, logged: Sequence[dict[str, Any]] = ()
    ) -> list[str]:
        """Remove the lines that a resumed run repeats: of later steps, the summary of its
        interrupted training, and the samples of its end; and damaged lines. A last line that a kill
        left truncated is none.

        logged: the lines of metrics.jsonl up to `step`, as the checkpoint has them (its
        log_history); those that the file has not are restored. Returns a notice about each file
        that was damaged.
        """
        notices = []
        for file in (self.metrics, self.spectra, self.samples):
            if not file.is_file() and not (logged and file == self.metrics):
                continue
            text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
            # A line without its end was being written when the process was killed: no damage.
            records = [(line, parse_metrics(line)) for line in text.splitlines(keepends=True)]
            remaining = [
                line.removesuffix("\n")
                for line, record in records
                if record is not None
                and record["step"] <= step
                and "train_runtime" not in record
                and record.get("at") != "end"
            ]
            num_damaged = sum(record is None and line.endswith("\n") for line, record in records)
            remedy = "lines were removed"
            if logged and file == self.metrics:
                # A power cut may lose lines that were appended before the checkpoint was sealed.
                # The checkpoint has its own copy, whose keys are sorted.
                own = {_sorted(parse_metrics(line)): line for line in remaining}
                logs = ({"step": log["step"]} | log for log in logged)
                saved = {_sorted(log): metrics_line(log).removesuffix("\n") for log in logs}
                num_damaged = len(saved.keys() - own.keys())
                remaining = [own.get(log, line) for log, line in saved.items()]
                remedy = f"or missing lines were restored from checkpoint-{step}"
            if num_damaged:
                notices.append(f"{file.name}: {num_damaged} damaged {remedy}")
            write(file, "".join(line + "\n" for line in remaining))
        return notices


class Seal(TypedDict):
    """The content of COMPLETE_MARKER."""

    step: int
    origin: dict[str, Any]
    """The run that the checkpoint belongs to: recipe, processes, data, starting weights,
    template."""
    files: dict[str, Content]
    """Size and hash of every other file below the checkpoint's folder."""


def read_seal(checkpoint: Path) -> Seal:
    """Return the seal of a complete checkpoint. Raises UserError for any other folder."""
    marker = checkpoint / COMPLETE_MARKER
    if not marker.is_file():
        raise UserError(
            f"{checkpoint}: is no complete checkpoint, as {COMPLETE_MARKER} is missing; name "
            "another checkpoint"
        )
    try:
        seal = read_json(marker)
    except UserError as error:
        if isinstance(error.__context__, OSError):  # it cannot be read, and may be sound
            raise
        raise UserError(f"{error}; {PREVIOUS}") from None
    if not isinstance(seal, dict) or not Seal.__required_keys__ <= seal.keys():
        raise UserError(
            f"{marker}: was not written by this version of soren-align, or is damaged; {PREVIOUS}"
        )
    return seal  # pyright: ignore[reportReturnType]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or not, in the order of their steps.

    Raises PermissionError if it may not be read; Path.glob would return none, and the run would
    start anew.
    """
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted((entry for entry in entries if entry.name.startswith("checkpoint-")), key=step_of)


def read_metrics(file: Path, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl or samples.jsonl; a line that a killed process left
    incomplete is left out.

    last_bytes: only those in so many bytes at the end of the file.
    """
    content = b""
    # Another command may be starting the run again.
    with suppress(FileNotFoundError), file.open("rb") as stream:
        if last_bytes is not None:
            stream.seek(max(os.fstat(stream.fileno()).st_size - last_bytes, 0))
        content = stream.read()
    lines = map(parse_metrics, content.decode(errors="replace").splitlines())
    return [line for line in lines if line is not None]


def parse_metrics(text: str | bytes) -> dict[str, Any] | None:
    """Return one line of a metrics.jsonl or samples.jsonl, which has a step; None of a damaged
    one.
    """
    with suppress(ValueError, RecursionError):
        line = json.loads(text)
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            # A model may answer "NaN": texts of samples are no numbers.
            return line if "completion" in line else {k: _restored(v) for k, v in line.items()}
    return None


def metrics_line(record: Mapping[str, Any]) -> str:
    """Return a line of metrics.jsonl in strict JSON, in which NaN and infinities are texts, as
    float() and JavaScript's Number() read them.
    """
    plain = {
        key: json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def _restored(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step in a checkpoint's name; -1 for a name of another form."""
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def now() -> str:
    """Return the time in UTC, for run.json."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _sorted(record: Any) -> str:
    return json.dumps(record, sort_keys=True)


def _links(path: Path) -> Iterator[Path]:
    """Yield the symbolic links at `path` and below it."""
    if path.is_symlink():
        yield path
        return
    for folder, folders, files in os.walk(path):
        yield from (
            link for name in (*folders, *files) if (link := Path(folder, name)).is_symlink()
        )
