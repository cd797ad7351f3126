"""The checkpoints that a run came from, oldest first: base, SFT, DPO."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from rich.console import Console

from ..errors import UserError
from ..files import local_path
from ..provenance import fingerprint
from ..recipe import is_local
from ..run_folder import RunFolder
from .backends import base_of, folder_of
from .cache import contents

TASKS = {"sft": "SFT", "dpo": "DPO"}


def lineage(path: str | Path, console: Console | None = None) -> list[tuple[str, Path]]:
    """(name, model folder) of the starting checkpoint, of every run between, and of the given one.

    path: a run folder, a model's, which is one row unless a run made it, an adapter's, which its base goes before, or
    a name on the hub.
    A start that is gone is a UserError; an older ancestor that is gone is left out, and the console says so.
    """
    given = local_path(path)
    run = _run_of(given)
    if run is None:
        on_hub = not is_local(str(path))
        given = folder_of(path) if on_hub else given
        name = str(path).rpartition("/")[2] if on_hub else given.resolve().name
        base = base_of(given)
        if base is not None:
            below = lineage(base, console)
            return [*(below if len(below) > 1 else [("base", base)]), (name, given)]
        if not (given / "config.json").is_file():
            raise UserError(f"{path}: neither a run folder (run.json) nor a model folder (config.json)")
        return [(name, given)]
    if not (run / "model").is_dir():
        status = (RunFolder(run).read() or {}).get("status")
        raise UserError(f"{path}: has no model yet (status: {status}); finish the run first")
    rows: list[tuple[str, Path]] = []
    seen: set[Path] = set()
    model = run / "model" if given == run else given
    while run is not None:
        seen.add(run.resolve())
        record = RunFolder(run).record("start")
        rows.append((TASKS[record["task"]], model))
        start = _own_start(run, record["start"]) or _start(record["start"])
        if start is None:
            problem = f"the checkpoint that {run} started from is gone: {record['start']['path']}"
            if len(rows) == 1:
                raise UserError(f"{path}: {problem}")
            (console or Console(stderr=True)).print(f"no row for the base: {problem}", highlight=False, soft_wrap=True)
            break
        parent = _run_of(start)
        if _was_changed(start, record["start"]) or (parent is not None and parent.resolve() in seen):
            raise UserError(f"{path}: {start} was written over since {run} started from it; its row would be false")
        if parent is None:
            rows.append(("base", start))
        run, model = parent, start
    named: list[tuple[str, Path]] = []
    for name, model in rows[::-1]:
        named.append(_named(named, name, model, model))
    return named


def lineages(paths: Sequence[str | Path], console: Console | None = None) -> list[tuple[str, Path]]:
    """The rows of several models side by side: an ancestor that they have in common stands there once.

    What was named itself keeps its row, were it equal to another in every file. A name that is taken gets its
    run folder's, or its hub name, beside it.
    """
    rows: list[tuple[str, Path]] = []
    seen: set[str] = set()
    for path in paths:
        *ancestors, named = lineage(path, console)
        for name, model in ancestors:
            if contents(model) not in seen:
                rows.append(_named(rows, name, model, path))
            seen.add(contents(model))
        if named[1].resolve() not in [model.resolve() for _, model in rows]:
            rows.append(_named(rows, *named, path))
            seen.add(contents(named[1]))
    return rows


def _named(rows: list[tuple[str, Path]], name: str, model: Path, path: str | Path) -> tuple[str, Path]:
    """The row, under a name that none of `rows` has: its run folder's, or the hub name `path`, stands beside it."""
    beside = model.parent.resolve().name if is_local(str(path)) else str(path).replace("/", "--")
    return (f"{name} ({beside})" if any(name == other for other, _ in rows) else name), model


def _run_of(path: Path) -> Path | None:
    """The run folder that `path` is, or whose `model` it is, or whose adapter `merged` into the base."""
    for run in (path, path.parent if path.resolve().name in ("model", "merged") else path):
        if (run / "run.json").is_file() and not (run / "config.json").is_file():
            return run
    return None


def _own_start(run: Path, start: dict[str, Any]) -> Path | None:
    """The start that a run made for itself: it is where the run is now, moved or copied."""
    own = run / "start"
    recorded = Path(start["path"])
    is_it = recorded.name == "start" and start.get("sha256_or_revision") in (None, fingerprint(str(own)))
    return own if own.is_dir() and is_it else None


def _start(start: dict[str, Any]) -> Path | None:
    """Where the starting checkpoint lies: a folder, or the hub's files as they were when the run began."""
    try:
        path = Path(start["path"]).expanduser()
        if path.is_dir() or is_local(start["path"]):
            return path if path.is_dir() else None
        revision = start.get("sha256_or_revision")
        return Path(huggingface_hub.snapshot_download(start["path"], revision=revision, local_files_only=True))
    except (OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"the checkpoint that a run started from, {start['path'][:200]}, is not here: {why}") from None


def _was_changed(folder: Path, start: dict[str, Any]) -> bool:
    """Whether other weights lie there now; the hub's commits do not change."""
    was = start.get("sha256_or_revision")
    return was is not None and is_local(start["path"]) and fingerprint(str(folder)) != was
