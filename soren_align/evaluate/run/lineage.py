"""The checkpoints that a run was trained from, oldest first: base, SFT, DPO."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub

from ...core.errors import UserError
from ...core.files import local_path
from ...recipe import is_local
from ...run.folder import RunFolder
from ...run.provenance import fingerprint
from ...tasks import TASKS
from .models import base_folder, model_digest, model_folder

OVERWRITTEN = "was overwritten later"
MAX_FOLDERS = 4
"""Folders in the name of a row: runs/studies/mine/a is the deepest run that soren-align makes."""

Row = tuple[str, Path]
"""(name in the table, model folder)."""
_NamedBy = tuple[str, Path, str | Path]
"""(name, model folder, path by which the user named it or a model trained from it)."""
OnOmitted = Callable[[str, str], object]
"""Called for a starting checkpoint without a row: (a sentence with the reason, the checkpoint's
recorded path)."""


def lineages(paths: Sequence[str | Path], on_omitted: OnOmitted | None = None) -> list[Row]:
    """Return the rows of several models in one table, in which a common ancestor appears once.

    A model in `paths` has its own row even if all its files equal another's. Where rows would have
    one name, all of them get the name of their run folder or on the hub in parentheses.
    """
    rows: list[_NamedBy] = []
    seen: set[str] = set()
    for path in paths:
        *ancestors, last = _lineage(path, on_omitted)
        # By the files and not by the path: one base may be reached by two paths, and would
        # otherwise be evaluated twice.
        for name, model in ancestors:
            if model_digest(model) not in seen:
                rows.append((name, model, path))
            seen.add(model_digest(model))
        if last[1].resolve() not in [model.resolve() for _, model, _ in rows]:
            rows.append((*last, path))
            seen.add(model_digest(last[1]))
    return _with_unique_names(rows)


def lineage(path: str | Path, on_omitted: OnOmitted | None = None) -> list[Row]:
    """Return the rows of a model: the starting checkpoint, every run between, and the model.

    path: a run folder; a model folder, which is one row unless a run trained it; an adapter, after
    its base; or a name on the hub. The rows begin after a checkpoint that is missing, not available
    or was overwritten: a training that is done can be evaluated without it.
    """
    return _with_unique_names([(name, model, model) for name, model in _lineage(path, on_omitted)])


def parents(models: Sequence[str | Path]) -> dict[int, int]:
    """Return, for the index of each model that a run trained, that of the model it started from, if
    that is there.
    """
    folders = [local_path(model).resolve() for model in models]
    indices = {}
    for i, folder in enumerate(folders):
        if (run := run_of(folder)) is not None:
            start, problem = _start(run, RunFolder(run).record("start")["start"])
            if not problem and start.resolve() in folders:
                indices[i] = folders.index(start.resolve())
    return indices


def _lineage(path: str | Path, on_omitted: OnOmitted | None) -> list[Row]:
    """Return the rows of `lineage`, of which several may have one name."""
    local = local_path(path)
    run = run_of(local)
    if run is None:  # a model or adapter that no run trained
        on_hub = not is_local(str(path))
        folder = model_folder(path) if on_hub else local
        name = str(path).rpartition("/")[2] if on_hub else folder.resolve().name
        base = base_folder(folder)
        if base is not None:
            base_rows = _lineage(base, on_omitted)
            return [*(base_rows if len(base_rows) > 1 else [("base", base)]), (name, folder)]
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{path}: contains no run.json (a run) and no config.json (a model); give the path"
                " of a folder with one of these files"
            )
        return [(name, folder)]
    if not (run / "model").is_dir():
        raise UserError(f"{path}: {RunFolder(run).why_no_model()}")
    rows: list[Row] = []
    seen: set[Path] = set()
    model = run / "model" if local == run else local
    while run is not None:
        seen.add(run.resolve())
        record = RunFolder(run).record("start")
        rows.append((TASKS[record["task"]].title, model))
        start, problem = _start(run, record["start"])
        parent = None if problem else run_of(start)  # otherwise it may be no path at all
        # The start was overwritten by a later run of this chain: following it would never end.
        if parent is not None and parent.resolve() in seen:
            problem = OVERWRITTEN
        if problem:
            if on_omitted:
                sentence = (
                    f"the table has no row for the checkpoint that {run.resolve().name} was trained"
                    f" from, because the checkpoint {problem}"
                )
                on_omitted(sentence, record["start"]["path"])
            break
        if parent is None:
            rows.append(("base", start))
        run, model = parent, start
    return rows[::-1]


def _with_unique_names(rows: list[_NamedBy]) -> list[Row]:
    """Return the rows; those of one name with the hub name, or the run folder's, in parentheses.

    A run folder's name is that of as many folders as differ: `SFT (sft)`, or `SFT
    (mine--runs--sft)`.
    """
    names, unique = [name for name, _, _ in rows], []
    # As few folders as make the names unique: they stand in the first column of the table.
    for num_folders in range(1, MAX_FOLDERS + 1):
        unique = []
        for name, model, path in rows:
            folders = (
                model.parent.resolve().parts[-num_folders:]
                if is_local(str(path))
                else str(path).split("/")
            )
            unique.append(
                (f"{name} ({'--'.join(folders)})" if names.count(name) > 1 else name, model)
            )
        if len({name for name, _ in unique}) == len(rows):
            break
    return unique


def run_of(path: Path) -> Path | None:
    """Return the run folder that `path` is, or of which it is the model or the merged model; else
    None.
    """
    for run in (path, path.parent if path.resolve().name in ("model", "merged") else path):
        if (run / "run.json").is_file() and not (run / "config.json").is_file():
            return run
    return None


def _start(run: Path, start: dict[str, Any]) -> tuple[Path, str]:
    """Return (the folder of the starting checkpoint, the reason why it cannot have a row; "" if it
    can).

    For the hub, the folder has the files of the recorded revision.
    """
    own, path, recorded = run / "start", Path(start["path"]), start.get("sha256_or_revision")
    # A start in the run folder itself, which may have been moved or copied.
    if own.is_dir() and path.name == "start" and recorded in (None, fingerprint(str(own))):
        return own, ""
    try:
        path = path.expanduser()
        if path.is_dir():  # a revision on the hub does not change
            is_changed = (
                recorded is not None
                and is_local(start["path"])
                and fingerprint(str(path)) != recorded
            )
            return path, OVERWRITTEN if is_changed else ""
        if is_local(start["path"]):
            return path, "is missing"
        return (
            Path(
                huggingface_hub.snapshot_download(
                    start["path"], revision=recorded, local_files_only=True
                )
            ),
            "",
        )
    except (OSError, RuntimeError, ValueError):
        return path, "is not on this machine"
