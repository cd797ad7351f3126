"""The declaration of a study: its settings before its first run, and all later changes.

Seeds that are dropped, candidates that are left out, another metric or another margin after a look
at the results are worth any number of significant answers. So `compare` writes declaration.json
before the first run: the study's file, the recipe of each candidate, the files of data and suite by
their hashes, and the commit. Its first DIGITS stand in the terminal, in the report and in
trials.csv. `plan STUDY` prints them before anything was trained, so that they can be posted where
others see them: whoever then changes both the study and the declaration has other digits.

history.jsonl is only appended to: the declaration, extensions, every run that ended, and every look
at the answers. A run that ended twice was removed and repeated, and an answer after several looks
is worth less than after the first.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import digest, drop_incomplete_line, file_sha256, write
from ..evaluate.suite.suites import suite_of
from ..recipe import Recipe, differences, load_resolved, training_part
from ..recipe.data_files import data_files
from ..run.folder import RunFolder, now
from ..run.provenance import DECLARATION, commit, read_declaration
from .config import StudyFile
from .runs import run_folders
from .study import ENDED, Run, Study

HISTORY = "history.jsonl"
CHANGEABLE: Any = dict.fromkeys(("title", "jobs", "budget_hours", "output_dir"), True) | {
    "search": {"keep_models"}
}
"""Keys of a study's file that may change while it runs: they change no run."""
MAX_BYTES = 64 << 20
"""Of history.jsonl."""


def declare(study: StudyFile, recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Return the declaration of a study as plain data; `sha256` is the hash of all other keys.

    recipes: of each candidate's first run.
    """
    # most have the same ones
    files = {name: file for recipe in recipes.values() for name, file in _files(recipe)}
    content = {
        "study": _fixed(study),
        "recipes": {name: _part(recipe) for name, recipe in recipes.items()},
        "files": {name: file_sha256(files[name]) for name in sorted(files)},
        "commit": commit(),
    }
    return {"sha256": digest(content), **content}


def _fixed(study: StudyFile) -> dict[str, Any]:
    """Return the study's file without its changeable keys and without the recipe's path: its
    content is declared.
    """
    return _plain(study.model_dump(exclude={**CHANGEABLE, "recipe": True}))


def _part(recipe: Recipe) -> dict[str, Any]:
    return _plain({**training_part(recipe), "eval": recipe.eval and recipe.eval.model_dump()})


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as they are read again from a file: tuples are lists."""
    return json.loads(json.dumps(values, default=str))


def _files(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """Yield the local files of the examples and of the suite, by their names; what a hub has is
    named by the recipe.
    """
    sources = [*recipe.data.sources, *([recipe.data.eval] if recipe.data.eval else [])]
    for path in dict.fromkeys(source.path for source in sources if getattr(source, "path", None)):
        try:
            yield from data_files(path).items()
        except UserError:  # a name on the hub
            continue
    if recipe.eval:
        suite = suite_of(recipe.eval)
        folder = suite.path.parent
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            yield f"{suite.name}/{file.relative_to(folder).as_posix()}", file


def write_declaration(folder: Path, study: StudyFile, recipes: Mapping[str, Recipe]) -> None:
    """Write the declaration of a study that has none, and no runs; compare that of a study which
    has one.

    recipes: see `declare`. Raises UserError, with the differences, if the study was declared
    otherwise.
    """
    content, file = declare(study, recipes), folder / DECLARATION
    if not file.is_file() and not run_folders(folder):
        write(file, json.dumps(content, indent=1) + "\n")
        note(folder, "declared", sha256=content["sha256"])
        return
    own = ("sha256", "commit")
    before, after = (
        {k: v for k, v in each.items() if k not in own}
        for each in (read_declaration(folder), content)
    )
    if changed := differences(before, after):
        raise UserError(
            f"{folder}: the study differs from its declaration ({file.name}):",
            *(f"  {line}" for line in changed[:20]),
            "Restore the declared values to continue, or choose another output_dir",
        )


def declaration_problems(folder: Path, study: StudyFile) -> Iterator[str]:
    """Yield how the study in a folder differs from its declaration.
    Data are compared by the hashes of the runs.
    """
    try:
        declared = read_declaration(folder)
    except UserError as error:
        yield str(error)
        return
    if [line.get("sha256") for line in read_history(folder, "declared")] != [declared["sha256"]]:
        yield (
            f"{HISTORY}: its first line is not this study's declaration; restore this file, or repeat the study in "
            "another folder"
        )
    for line in differences(declared.get("study", {}), _fixed(study))[:20]:
        yield f"study.yaml: differs from the declaration ({line}); restore this file"
    for name, part in declared.get("recipes", {}).items():
        file = folder / "candidates" / f"{name}.yaml"
        # the audit reports a missing one
        own = _part(load_resolved(file)) if file.is_file() else part
        for line in differences(part, own)[:3]:
            yield f"candidates/{file.name}: differs from the declaration ({line}); restore this file"


def note(folder: Path, event: str, **facts: Any) -> None:
    """Append an event to a study's history."""
    drop_incomplete_line(folder / HISTORY)
    with (folder / HISTORY).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"time": now(), "event": event, **facts}) + "\n")


def read_history(folder: Path, event: str) -> list[dict[str, Any]]:
    """Return the events of one kind, in their order; a line that a kill left incomplete is none."""
    file = folder / HISTORY
    if file.is_symlink() or not file.is_file():
        return []
    events = []
    for line in file.read_bytes()[:MAX_BYTES].splitlines():
        with suppress(ValueError, RecursionError):
            events.append(json.loads(line))
    return [each for each in events if isinstance(each, dict) and each.get("event") == event]


def note_ended(folder: Path, runs: Iterable[Run]) -> None:
    """Append the runs that have ended since the last call, by the weights that they left."""
    known = {(line.get("run"), line.get("weights")) for line in read_history(folder, "ended")}
    for run in (run for run in runs if run.status in ENDED):
        weights = ((RunFolder(folder / run.folder).read() or {}).get("written") or {}).get(
            "weights_sha256"
        )
        if (run.folder, weights) not in known:
            note(folder, "ended", run=run.folder, status=run.status, weights=weights)


def look_number(folder: Path, study: Study) -> int:
    """Return the number of a study's verdict, from 1: one for each set of final runs whose answers
    were computed.
    """
    looks = read_history(folder, "looked")
    return len(looks) + (not looks or looks[-1].get("runs") != final_runs(study))


def final_runs(study: Study) -> str:
    """Return the hash of a study's final runs and their results."""
    return digest(
        [[run.folder, run.metric, run.scores] for each in study.candidates for run in each.verdict]
    )


def history_cautions(folder: Path, study: Study) -> Iterator[str]:
    """Yield repeated runs and earlier looks, each a sentence."""
    ended = Counter(line.get("run") for line in read_history(folder, "ended"))
    for run in study.runs:
        if ended[run.folder] > 1:
            yield (
                f"{run.folder}: this run was repeated: it ended {ended[run.folder]} times, with different weights; "
                "the last one counts"
            )
    looks = read_history(folder, "looked")
    if len(looks) > 1:
        first = [str(answer) for answer in looks[0].get("answers", [])]
        changed = sum(answer not in first for answer in looks[-1].get("answers", []))
        yield (
            f"`compare` has computed {len(looks)} verdicts, each from a different set of runs; {changed} of "
            f"{len(first)} answers changed since the first verdict. Each verdict is another chance of a wrong "
            f"answer, so the p-values of this verdict are multiplied by {len(looks)}"
        )
