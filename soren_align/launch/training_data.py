"""The questions of a suite that the training examples of runs contain."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import UserError, in_one_line
from ..core.patches import hub_offline
from ..core.text import Terminal, counting, working
from ..data import LoadedSplit
from ..evaluate.run.lineage import run_of
from ..evaluate.stats.contamination import Overlaps, overlaps_with, question_texts
from ..evaluate.suite.tasks import Tasks
from ..recipe import load_resolved
from ..run.folder import RunFolder
from ..training.setup import load_splits


def overlaps_of_runs(
    rows: Sequence[tuple[str, Path]], limit: int | None, cache: Path, console: Terminal, tasks: Tasks
) -> Overlaps | str:
    """Return the questions that the training examples of the rows' runs contain, or the reason why none is known.

    Held-out examples are not trained on, and not read. Examples that several runs share are read once. limit: only the
    first questions of each task.
    """
    runs = {name: run for name, model in rows if (run := run_of(Path(model))) is not None}
    if not runs:
        return "not checked, because no row is a run, whose training examples are known"
    questions = question_texts(tasks, limit)
    known: dict[str, Overlaps] = {}
    with working(console, "Reading training examples") as show:
        for name, run in runs.items():
            try:
                dataset = _trained_on(RunFolder(run)).dataset
            except (UserError, OSError) as error:
                reason = in_one_line(error, 300)
                return f"not checked, because the training examples of {name} are not available: {reason}"
            if dataset._fingerprint not in known:
                known[dataset._fingerprint] = overlaps_with(
                    dataset, questions, cache, counting(show, "Comparing with the questions")
                )
    first, *others = known.values()
    for other in others:
        first |= other
    return first


def _trained_on(run: RunFolder) -> LoadedSplit:
    """Return the training examples of a run. Raises UserError if they are missing or were changed since.

    Nothing is downloaded: a run folder may come from anyone.
    """
    record, recipe = run.record("data"), load_resolved(run.recipe)
    if recipe.data.streaming:
        raise UserError("they were streamed (data.streaming), and are not read a second time")
    with hub_offline():
        split = load_splits(recipe)["train"]
    if _identities(split.source) != _identities(record["data"]["train"]):
        raise UserError(f"{split.source['path']}: was changed since the training")
    return split


def _identities(source: dict[str, Any]) -> list[Any]:
    """Return the hash or the revision of each source."""
    return [each.get("sha256") or each.get("revision") for each in source.get("sources", [source])]
