"""Read the run folders of a study: recipe.yaml, run.json and metrics.jsonl."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..core.errors import UserError
from ..evaluate.report.results import read_results
from ..recipe import Recipe, load_resolved
from ..run.folder import STOPPED, RunFolder, read_metrics
from ..run.held_out import read_held_out
from ..run.metrics import IN_STUDIES
from ..run.provenance import software
from ..run.record import divergence
from .config import Range, StudyFile
from .study import Point, Run, by_number, mean_metric

STAGES = ("search", "verdict")


@dataclass(frozen=True)
class RunFiles:
    """The recipe and run.json of a run's folder.
    place: relative to the study's folder, "search/soren/03".
    """

    stage: str
    candidate: str
    place: str
    recipe: Recipe
    record: dict[str, Any]

    @property
    def seed(self) -> int:
        """The seed that the run was trained with."""
        recorded = self.record.get("seeds", {}).get("trainer")
        return recorded if recorded is not None else self.recipe.trainer.get("seed", 42)

    @property
    def num_steps(self) -> int | None:
        """The number of steps of a run whose training came to its end."""
        return self.record.get("training", {}).get("steps")


def read_files(study_folder: Path, runs: Sequence[Run]) -> tuple[list[RunFiles], list[str]]:
    """Return the files of a study's runs, and a problem for each run that cannot be read.

    A folder without run.json has no run yet.
    """
    files, problems = [], []
    for run in runs:
        folder = RunFolder(study_folder / run.folder)
        try:
            if (record := folder.read()) is not None and folder.recipe.is_file():
                recipe = load_resolved(folder.recipe)
                files.append(RunFiles(run.stage, run.candidate, run.folder, recipe, record))
        except UserError as error:
            problems.append(
                f"{run.folder}: cannot be read: {error}; remove this folder and rerun the study"
            )
    return files, problems


def read_run(run: Run, folder: RunFolder, metric: str) -> Run:
    """The run with all that its folder records.
    status "running": it was started, and has not ended.
    """
    record = folder.read()
    if record is None:
        return run
    lines = read_metrics(folder.metrics)
    curve = read_curve(lines, metric)
    status, reason = "running", record.get("last_error") if record.get("resumable") else None
    if has_ended(record):
        status, reason = "finished", divergence(lines)
        if record["status"] not in ("finished", "diverged"):
            status = "diverged" if record.get("diverged") else "failed"
            reason = record["last_error"]
        elif sum("eval_loss" in line for line in lines) < 2 or not any(
            "loss" in line for line in lines
        ):
            status, reason = "failed", "metrics.jsonl has no evaluation of the start and of the end"
        elif reason:
            status = "diverged"
    ends = (
        (curve[0].metric, curve[-1].metric)
        if curve and status in ("finished", "diverged")
        else (None, None)
    )
    if run.stage == "verdict" and status == "finished":
        with suppress(UserError):  # missing or damaged: the verdict, which needs it, reports it
            values = read_held_out(folder.held_out, metric)
            ends = float(values.start.mean()), float(values.end.mean())
    return replace(
        run,
        status=status,
        reason=reason,
        start=ends[0],
        metric=ends[1],
        curve=curve,
        seconds=curve[-1].seconds if curve else None,
        peak_memory_bytes=record.get("training", {}).get("peak_memory_bytes"),
        scores=read_scores(folder)[1] if run.stage == "verdict" and status == "finished" else None,
        identity=record.get("identity", {}),
    )


def has_ended(record: dict[str, Any]) -> bool:
    """Whether the run of a run.json is a result, if only a failure.

    A run ends by its last step, by divergence, and by a UserError: its recipe is refused. A failure
    of the machine is
    none: the run resumes. Neither is a defect of another version of the software: the run is tried
    again.
    """
    if record["status"] in ("finished", "diverged"):
        return True
    if record.get("last_error") in (None, STOPPED) or record.get("resumable"):
        return False
    return record.get("defect") in (None, software())


def read_curve(lines: Sequence[Mapping[str, Any]], metric: str) -> list[Point]:
    """The evaluations in the lines of a metrics.jsonl, one per step, the start first.

    seconds: of training and evaluations, from the logged speeds, so that a resumed run has those of
    all its parts. transformers averages the first loss that is logged after a resume over the steps
    since then.
    """

    def finite(value: Any) -> float | None:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    points: dict[int, Point] = {}
    train: Mapping[str, Any] = {}
    seconds, tokens = 0.0, 0.0
    for line in lines:
        if "loss" in line:
            train = line
            speed, total = line.get("tokens_per_second"), line.get("num_tokens")
            if speed and total is not None:
                # From speeds, and not from a clock: time between a kill and the resume is not
                # training.
                seconds, tokens = seconds + max(0.0, total - tokens) / speed, total
        if metric in line or "eval_loss" in line:
            step, measured = line["step"], {}
            # a recipe's setting asks for those of an evaluation; others are in every log
            for each in IN_STUDIES:
                value = (
                    line.get(f"eval_{each.key}", line.get(each.key))
                    if each.recipe
                    else train.get(each.key)
                )
                measured[each.key] = finite(value) if step or each.recipe else each.at_start
            points[step] = Point(
                step,
                # The evaluations of a pre-training are ours, and have no such count.
                tokens=int(line.get("eval_num_tokens", tokens)) if step else 0,
                seconds=seconds,
                metric=finite(line.get(metric)),
                train_loss=finite(train.get("loss")) if step else None,
                **measured,
            )
    return [points[step] for step in sorted(points)]


def read_scores(folder: RunFolder) -> tuple[dict[str, float] | None, dict[str, float] | None]:
    """(scores of the starting checkpoint, scores of the model) in percent, from the run's
    evaluation.
    """
    recipe = load_resolved(folder.recipe)
    results = read_results(folder.evaluation(recipe.eval.name)) if recipe.eval else None
    if results is None or len(results["rows"]) < 2:
        return None, None
    start, model = (
        {column: score["value"] for column, score in row["scores"].items()}
        for row in results["rows"][-2:]
    )
    return start, model


def select(runs: list[Run], *, higher_is_better: bool) -> int | None:
    """The number of the trial with the best metric, the first of equals; None if none has
    finished.
    """
    metrics = {number: mean_metric(trial) for number, trial in by_number(runs).items()}
    # Without a metric, as of a failure, a trial can lie at an edge, but not be selected.
    metrics = {number: metric for number, metric in metrics.items() if metric is not None}
    best = max if higher_is_better else min
    return best(metrics, key=lambda number: metrics[number]) if metrics else None


def edges(
    study: StudyFile, candidate: str, runs: list[Run], selected: int
) -> dict[str, Literal["low", "high"]]:
    """The keys whose selected value is the least or the largest that was tried, so that a better
    one may lie beyond.

    A trial that diverged or failed counts as tried. A list of texts has no ends; 0 as the low end
    is none.
    """
    at_edge: dict[str, Literal["low", "high"]] = {}
    trials = by_number(runs)
    for key, values in study.free(candidate).items():
        tried = [trial[0].parameters[key] for trial in trials.values()]
        if len(set(tried)) < 2 or any(isinstance(value, str | bool) for value in tried):
            continue
        value = trials[selected][0].parameters[key]
        if value == max(tried):
            at_edge[key] = "high"
        elif value == min(tried) and not (
            isinstance(values, Range) and not values.log and values.low == 0
        ):
            at_edge[key] = "low"
    return at_edge


def finer_gain(study: StudyFile, runs: list[Run], selected: int) -> float:
    """What a search with values between those tried might gain in the metric, in its unit.

    The parabola through the selected value and its two neighbours (on a logarithmic axis where all
    are positive) has its best there or beside it. With optima between five values that lie a factor
    of 2.2 apart, 9% to 74% of studies called equal optimizers different; with this gain as a part
    of the interval, 3% to 4% (research/studies/statistics.md). 0: several keys are searched, or
    the selected value is an end, which `edges` reports.
    """
    free = [*study.free(runs[0].candidate)]
    if len(free) != 1:
        return 0.0
    trials = by_number(runs)
    metrics: dict[float, float] = {}
    for trial in trials.values():
        value, metric = trial[0].parameters[free[0]], mean_metric(trial)
        if isinstance(value, str | bool):
            return 0.0
        if metric is not None:
            metrics[value] = metric
    tried = sorted(metrics)
    i = tried.index(trials[selected][0].parameters[free[0]])
    if not 0 < i < len(tried) - 1:
        return 0.0
    near = tried[i - 1 : i + 2]
    x = [math.log(value) if near[0] > 0 else value for value in near]
    y = [metrics[value] - metrics[near[1]] for value in near]
    a, b = x[0] - x[1], x[2] - x[1]
    curvature = (y[0] / a - y[2] / b) / (a - b)
    slope = y[0] / a - curvature * a
    return slope**2 / abs(4 * curvature) if curvature else 0.0


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict with dotted keys: {"optimizer.lr": 0.01, ...}."""
    items: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, dict) and value
        items |= flat(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return items
