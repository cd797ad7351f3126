"""The declaration of a study: what was fixed before its first run, and a hash of it.

`plan STUDY` prints the first DIGITS of the hash before anything was trained, and the report prints
them again. Posted digits show that seeds, candidates, metrics and margins were chosen before the
results were known. They do not show that there was no earlier study, nor that files are unedited.

history.jsonl is only appended to: a line for every verdict that was computed from other final runs
(a look). An answer after several looks is worth less than after the first.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import append, digest, drop_incomplete_line, file_sha256
from ..evaluate.suite.suites import suite_of
from ..recipe import Recipe, training_part
from ..recipe.data_files import data_files
from ..run.folder import now
from ..run.provenance import commit
from .config import StudyFile
from .study import Study

HISTORY = "history.jsonl"
CHANGEABLE: Any = dict.fromkeys(("title", "jobs", "output_dir", "recipe"), True) | {
    "search": {"keep_models"}
}
"""Keys of a study's file that may change while it runs: they change no run. The content of the
recipe is declared, not its path."""


def declare(study: StudyFile, recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Return the declaration of a study as plain data; `sha256` is the hash of all other keys.

    recipes: of each candidate's first run.
    """
    parts = {
        name: {**training_part(recipe), "eval": recipe.eval and recipe.eval.model_dump()}
        for name, recipe in recipes.items()
    }
    # most candidates have the same files
    files = {name: file for recipe in recipes.values() for name, file in _files(recipe)}
    content = {
        "study": study.model_dump(exclude=CHANGEABLE),
        "recipes": parts,
        "files": {name: file_sha256(files[name]) for name in sorted(files)},
        "commit": commit(),
    }
    content = json.loads(json.dumps(content, default=str))  # tuples are lists, as in the file
    return {"sha256": digest(content), **content}


def _files(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """Yield the local files of the examples and of the suite, by their names; what a hub has is
    named by the recipe.
    """
    sources = [*recipe.data.sources, *([recipe.data.eval] if recipe.data.eval else [])]
    for path in dict.fromkeys(source.path for source in sources if getattr(source, "path", None)):
        with suppress(UserError):  # a name on the hub
            yield from data_files(path).items()
    if recipe.eval:
        suite = suite_of(recipe.eval)
        folder = suite.path.parent
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            yield f"{suite.name}/{file.relative_to(folder).as_posix()}", file


def read_history(folder: Path, event: str) -> list[dict[str, Any]]:
    """Return the events of one kind, in their order; a line that a kill left incomplete is none."""
    events = []
    if (file := folder / HISTORY).is_file():
        for line in file.read_bytes().splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
    return [each for each in events if each.get("event") == event]


def look_number(folder: Path, study: Study) -> int:
    """Return the number of a study's verdict, from 1: one for each set of final runs whose answers
    were computed.
    """
    looks = read_history(folder, "looked")
    # A verdict of the same final runs is no further look.
    return len(looks) + (not looks or looks[-1]["runs"] != _final_runs(study))


def note_look(folder: Path, study: Study) -> None:
    """Append a verdict to the history, if it is of other final runs than the last one."""
    if study.differences and look_number(folder, study) > len(read_history(folder, "looked")):
        # A kill may have left half of a line, which would make this one unreadable.
        drop_incomplete_line(folder / HISTORY)
        event = {"time": now(), "event": "looked", "runs": _final_runs(study)}
        append(folder / HISTORY, json.dumps(event) + "\n")


def _final_runs(study: Study) -> str:
    """Return the hash of a study's final runs and their results."""
    return digest(
        [[run.folder, run.metric, run.scores] for each in study.candidates for run in each.verdict]
    )
