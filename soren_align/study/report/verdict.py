"""Write verdict.json: a study's verdict for other programs, with a version and a JSON schema.

study.json has all runs, and its form follows the code. This form is stable: a key may be added, but
no key is removed or changes its meaning without another `format`. It has no paths of the machine.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from ...core.document import Section
from ...core.errors import UserError
from ...publish.card import public
from ...run.provenance import DIGITS, read_declaration
from ..declaration import read_history
from ..study import HELD_OUT, Answer, Study, finished
from . import text

VERDICT, VERDICT_SCHEMA_FILE = "verdict.json", "verdict.schema.json"
Unit = Literal["percent", "loss"]


class VerdictCandidate(Section):
    """One optimizer of a study."""

    name: str
    settings: dict[str, Any]
    """Recipe keys that make this candidate."""
    selected: dict[str, Any] | None
    """Searched keys with their selected values; null: no trial finished."""
    num_trials: int
    """Runs of the search, also those that diverged or failed."""
    num_runs: int
    """Final runs that finished."""


class Scores(Section):
    """The scores of one model on one measure, over the seeds."""

    mean: float | None
    standard_deviation: float | None
    """Over seeds; null with fewer than two."""
    num_seeds: int


class VerdictMeasure(Section):
    """A measure: the held-out metric, a benchmark (a column of the suite), or the average of the
    benchmarks.
    """

    name: str
    """held-out, average, or a benchmark's column."""
    unit: Unit
    """loss: the held-out metric's own unit, also of an accuracy. percent: of 100 points."""
    higher_is_better: bool
    num_questions: int | None
    """Questions, or held-out examples; null: the study has problems or no final runs, so that they
    were not read."""
    start: Scores
    """The scores of the starting checkpoint. A benchmark's is that of the first final run."""
    candidates: dict[str, Scores]


class VerdictDifference(Section):
    """A candidate compared with a reference on one measure."""

    candidate: str
    reference: str
    """Another candidate's name; base: the starting checkpoint."""
    measure: str
    unit: Unit
    value: float
    """Positive: the candidate is better, whatever the measure's direction."""
    low: float
    """The lower end of the 95% interval, which is not corrected for the number of tests."""
    high: float
    p: float
    p_holm: float
    """Corrected for all declared tests of the study, and for earlier looks."""
    answer: Answer
    """better, worse: p_holm < 0.05. equivalent: within `equivalence_margin`."""
    detectable: float | None
    """The true difference that this study finds with its declared power; null: all runs gave the
    same."""
    equivalence_margin: float | None
    """The margin in the measure's unit; null: not declared."""
    retention_margin: float | None
    """The margin in percentage points; null: not declared."""
    retained: bool | None
    """Whether the loss against the start is shown to be smaller than `retention_margin`."""


class VerdictFile(Section):
    """A study's verdict: one document, written beside the report."""

    format: Literal[2] = 2
    """The version of this form."""
    title: str
    declaration: str | None
    """SHA-256 of the declaration, the study as it was fixed before its first run; null: it is
    missing or was edited."""
    digits: str | None
    """The first digits of this hash, as the terminal and the report show them."""
    date: str | None
    """When these answers were computed first (UTC); null: there are none."""
    commit: str | None
    """The commit of soren-align at the declaration."""
    versions: dict[str, str]
    machine: str
    metric: str
    """The metric of the held-out examples, as training logs it; it selected the settings."""
    search_seeds: list[int]
    verdict_seeds: list[int]
    candidates: list[VerdictCandidate]
    measures: list[VerdictMeasure]
    differences: list[VerdictDifference]
    """Empty if there are problems, or if final runs are missing."""
    looks: int
    """Verdicts that were computed of this study, each of other runs; p_holm is multiplied by this
    number."""
    cautions: list[str]
    """Facts that weaken the verdict."""
    problems: list[str]
    """Faults of the runs: with any of them, there are no differences."""


def verdict_file(study: Study, folder: Path) -> VerdictFile:
    """Return a study's verdict. folder: the study's, with its declaration and history."""

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
    differences = [
        VerdictDifference.model_validate(
            {key: value for key, value in vars(d).items() if key in VerdictDifference.model_fields}
            | {"equivalence_margin": d.equivalence, "retention_margin": d.margin}
        )
        for d in study.differences
        if not study.problems
    ]
    return VerdictFile(
        title=study.name,
        declaration=study.declaration or None,
        digits=study.declaration[:DIGITS] or None,
        date=str(looks[-1].get("time")) if looks and differences else None,
        commit=commit,
        versions=study.versions,
        machine=study.machine,
        metric=str(search.get("metric", "eval_loss")),
        search_seeds=list(search.get("seeds") or []),
        verdict_seeds=list(rules.get("seeds") or []),
        candidates=[
            VerdictCandidate(
                name=candidate.name,
                settings=shown(candidate.settings),
                selected=shown(trial.parameters) if (trial := candidate.selected_trial) else None,
                num_trials=len(candidate.trials),
                num_runs=len(finished(candidate.verdict)),
            )
            for candidate in study.candidates
        ],
        measures=[_measure(study, name) for name in (HELD_OUT, *text.columns_of_suite(study))],
        differences=differences,
        looks=len(looks),
        cautions=[shown(caution) for caution in study.cautions],
        problems=[shown(problem) for problem in study.problems],
    )


def _measure(study: Study, name: str) -> VerdictMeasure:
    """Return the scores of all candidates and of the start on one measure."""
    runs = {candidate.name: finished(candidate.verdict) for candidate in study.candidates}
    start = [(study.base_scores or {}).get(name)]
    if name == HELD_OUT:
        start = [run.start for run in next(filter(None, runs.values()), [])]
    return VerdictMeasure(
        name=name,
        unit="loss" if name == HELD_OUT else "percent",
        higher_is_better=study.higher_is_better or name != HELD_OUT,
        num_questions=study.num_questions.get(name),
        start=_scores(start),
        candidates={
            candidate: _scores([run.results.get(name) for run in own])
            for candidate, own in runs.items()
        },
    )


def _scores(values: Sequence[float | None]) -> Scores:
    """Return the mean and the deviation of the values that are numbers."""
    numbers = [value for value in values if value is not None and isfinite(value)]
    return Scores(
        mean=fmean(numbers) if numbers else None,
        standard_deviation=stdev(numbers) if len(numbers) > 1 else None,
        num_seeds=len(numbers),
    )


def verdict_schema() -> dict[str, Any]:
    """Return the JSON Schema of verdict.json."""
    return VerdictFile.model_json_schema() | {"title": "Verdict"}
