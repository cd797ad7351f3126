"""Write verdict.json: a study's verdict for other programs.

study.json has all runs, and its form follows the code. This form is stable: a key may be added, but
no key is removed or changes its meaning without another `format`. It has no paths of the machine.
docs/comparison.md explains the keys.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ...core.errors import UserError
from ...publish.card import public
from ...run.provenance import DIGITS, read_declaration
from ..declaration import read_history
from ..study import HELD_OUT, Difference, Study, finished
from . import text

VERDICT = "verdict.json"
FORMAT = 2
DIFFERENCE = ("candidate", "reference", "measure", "unit", "value", "low", "high", "p", "p_holm")
DIFFERENCE += ("answer", "detectable", "retained", "finer")
"""Fields of a Difference that have the same key in the file."""


def verdict_file(study: Study, folder: Path) -> dict[str, Any]:
    """Return the content of verdict.json. folder: the study's, with its declaration and history."""

    def shown(value: Any) -> Any:
        """Return values without the study's folder and other local paths."""
        # The file is published beside results: paths name people and machines.
        if isinstance(value, str):
            for path in dict.fromkeys((folder.resolve(), folder)):
                value = value.replace(f"{path}/", "") if path.name else value
        return public(value)

    commit, looks = None, read_history(folder, "looked")
    with suppress(UserError):  # the audit reports it
        commit = read_declaration(folder).get("commit")
    search, rules = (study.file.get(key) or {} for key in ("search", "verdict"))
    # Of runs that cannot be compared there is no difference to publish.
    differences = [] if study.problems else [_difference(d) for d in study.differences]
    return {
        "format": FORMAT,
        "title": study.name,
        "declaration": study.declaration or None,
        "digits": study.declaration[:DIGITS] or None,
        "date": str(looks[-1].get("time")) if looks and differences else None,
        "commit": commit,
        "versions": study.versions,
        "machine": study.machine,
        "metric": str(search.get("metric", "eval_loss")),
        "search_seeds": list(search.get("seeds") or []),
        "verdict_seeds": list(rules.get("seeds") or []),
        "candidates": [
            {
                "name": candidate.name,
                "settings": shown(candidate.settings),
                "selected": shown(trial.parameters)
                if (trial := candidate.selected_trial)
                else None,
                "num_trials": len(candidate.trials),
                "num_runs": len(finished(candidate.verdict)),
            }
            for candidate in study.candidates
        ],
        "measures": [_measure(study, name) for name in (HELD_OUT, *text.columns_of_suite(study))],
        "differences": differences,
        "looks": len(looks),
        "cautions": [shown(caution) for caution in study.cautions],
        "problems": [shown(problem) for problem in study.problems],
    }


def _difference(d: Difference) -> dict[str, Any]:
    margins = {"equivalence_margin": d.equivalence, "retention_margin": d.margin}
    return {key: getattr(d, key) for key in DIFFERENCE} | margins


def _measure(study: Study, name: str) -> dict[str, Any]:
    """Return the scores of all candidates and of the start on one measure."""
    runs = {candidate.name: finished(candidate.verdict) for candidate in study.candidates}
    start = [(study.base_scores or {}).get(name)]
    if name == HELD_OUT:
        start = [run.start for run in next(filter(None, runs.values()), [])]
    return {
        "name": name,
        "unit": "loss" if name == HELD_OUT else "percent",
        "higher_is_better": study.higher_is_better or name != HELD_OUT,
        "num_questions": study.num_questions.get(name),
        "start": _scores(start),
        "candidates": {
            candidate: _scores([run.results.get(name) for run in own])
            for candidate, own in runs.items()
        },
    }


def _scores(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the mean and the deviation of the values that are numbers."""
    numbers = [value for value in values if value is not None and isfinite(value)]
    return {
        "mean": fmean(numbers) if numbers else None,
        "standard_deviation": stdev(numbers) if len(numbers) > 1 else None,
        "num_seeds": len(numbers),
    }
