"""The runs of a study in a fixed order, and what their folders record of them."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..core.errors import UserError
from ..core.files import parse_json, read_text
from ..evaluate.report.results import read_results
from ..recipe import Recipe, load_resolved, training_part
from ..run.folder import STOPPED, RunFolder, read_metrics
from ..run.provenance import software
from ..run.record import divergence
from .config import Range, StudyFile
from .study import Point, Run, metric_of_trial


def search_runs(study: StudyFile, drawn: Mapping[str, list[dict[str, Any]]]) -> list[Run]:
    """The search's runs of the drawn trials: trial 0 of every candidate, then trial 1, ..."""
    runs = []
    for number in range(max(map(len, drawn.values()), default=0)):
        for name, trials in drawn.items():
            if number >= len(trials):
                continue
            for seed in study.search.seeds:
                suffix = f"-{seed}" if len(study.search.seeds) > 1 else ""
                folder = f"search/{name}/{number:02}{suffix}"
                parameters = study.parameters(name, trials[number])
                runs.append(Run(name, "search", number, seed, folder, parameters, "waiting"))
    return runs


def verdict_runs(study: StudyFile, candidate: str, parameters: dict[str, Any]) -> list[Run]:
    """The verdict's runs of a candidate with the selected parameters, one per seed."""
    seeds = enumerate(study.verdict.seeds)
    return [
        Run(candidate, "verdict", number, seed, f"verdict/{candidate}/{seed}", parameters, "waiting")
        for number, seed in seeds
    ]


def read_run(run: Run, folder: RunFolder, metric: str) -> Run:
    """The run with all that its folder records. status "running": it was started, and has not ended."""
    record = folder.read()
    if record is None:
        return run
    curve = read_curve(folder.metrics, metric)
    training = record.get("training", {})
    status, reason = _status(record, folder)
    return replace(
        run,
        status=status,
        reason=reason,
        metric=curve[-1].metric if curve and status in ("finished", "diverged") else None,
        curve=curve,
        seconds=curve[-1].seconds if curve else None,
        peak_memory_bytes=training.get("peak_memory_bytes"),
        scores=read_scores(folder)[1] if run.stage == "verdict" and status == "finished" else None,
        identity=record.get("identity", {}),
    )


def has_ended(record: dict[str, Any]) -> bool:
    """Whether the run of a run.json is a result, if only a failure.

    A run ends by its last step, by divergence, and by a UserError: its recipe is refused. A failure of the machine is
    none: the run resumes. Neither is a defect of another version of the software: the run is tried again.
    """
    if record["status"] in ("finished", "diverged"):
        return True
    if record.get("last_error") in (None, STOPPED) or record.get("resumable"):
        return False
    return record.get("defect") in (None, software())


def _status(record: dict[str, Any], folder: RunFolder) -> tuple[Any, str | None]:
    if not has_ended(record):
        return "running", record.get("last_error") if record.get("resumable") else None
    if record["status"] not in ("finished", "diverged"):
        return ("diverged" if record.get("diverged") else "failed"), record["last_error"]
    lines = read_metrics(folder.metrics)
    if sum("eval_loss" in line for line in lines) < 2 or not any("loss" in line for line in lines):
        return "failed", "metrics.jsonl has no evaluation of the start and of the end"
    reason = divergence(lines)
    return ("diverged", reason) if reason else ("finished", None)


def read_curve(metrics: Path, metric: str) -> list[Point]:
    """The evaluations in metrics.jsonl, one per step, the start first.

    seconds: of training and evaluations, from the logged speeds, so that a resumed run has those of all its parts.
    transformers averages the first loss that is logged after a resume over the steps since then.
    """
    points: dict[int, Point] = {}
    train: dict[str, Any] = {}
    seconds, tokens = 0.0, 0.0
    for line in read_metrics(metrics):
        if "loss" in line:
            train = line
            speed, total = line.get("tokens_per_second"), line.get("num_tokens")
            if speed and total is not None:
                seconds, tokens = seconds + max(0.0, total - tokens) / speed, total
        if metric not in line and "eval_loss" not in line:
            continue
        step = line["step"]
        points[step] = Point(
            step,
            # The evaluations of a pre-training are ours, and have no such count.
            tokens=int(line.get("eval_num_tokens", tokens)) if step else 0,
            seconds=seconds,
            metric=_finite(line.get(metric)),
            train_loss=_finite(train.get("loss")) if step else None,
            relative_change=_finite(train.get("relative_change")) if step else 0.0,
            kl_to_start=_finite(line.get("eval_kl_to_start", line.get("kl_to_start"))),
            retention_loss=_finite(line.get("eval_retention_loss", line.get("retention_loss"))),
        )
    return [points[step] for step in sorted(points)]


def read_scores(folder: RunFolder) -> tuple[dict[str, float] | None, dict[str, float] | None]:
    """(scores of the starting checkpoint, scores of the model) in percent, from the run's evaluation."""
    recipe = load_resolved(folder.recipe)
    results = read_results(folder.evaluation(recipe.eval.name)) if recipe.eval else None
    if results is None or len(results["rows"]) < 2:
        return None, None
    start, model = ({column: score["value"] for column, score in row["scores"].items()} for row in results["rows"][-2:])
    return start, model


def select(runs: list[Run], *, higher_is_better: bool) -> int | None:
    """The number of the trial with the best metric, the first of equals; None if none has finished."""
    metrics = {number: metric_of_trial(trial) for number, trial in by_trial(runs).items()}
    metrics = {number: metric for number, metric in metrics.items() if metric is not None}
    best = max if higher_is_better else min
    return best(metrics, key=lambda number: metrics[number]) if metrics else None


def edges(study: StudyFile, candidate: str, runs: list[Run], selected: int) -> dict[str, Literal["low", "high"]]:
    """The keys whose selected value is the least or the largest that was tried, so that a better one may lie beyond.

    A trial that diverged or failed counts as tried. A list of texts has no ends; 0 as the low end is none.
    """
    at_edge: dict[str, Literal["low", "high"]] = {}
    trials = by_trial(runs)
    for key, values in study.free(candidate).items():
        tried = [trial[0].parameters[key] for trial in trials.values()]
        if len(set(tried)) < 2 or any(isinstance(value, str | bool) for value in tried):
            continue
        value = trials[selected][0].parameters[key]
        if value == max(tried):
            at_edge[key] = "high"
        elif value == min(tried) and not (isinstance(values, Range) and not values.log and values.low == 0):
            at_edge[key] = "low"
    return at_edge


def by_trial(runs: Iterable[Run]) -> dict[int, list[Run]]:
    """The runs of one candidate's search by number of the trial."""
    trials: dict[int, list[Run]] = {}
    for run in runs:
        trials.setdefault(run.number, []).append(run)
    return trials


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# ---
# The run folders of a study as the audit reads them: from recipe.yaml, run.json and metrics.jsonl alone.

STAGES = ("search", "verdict")
MAX_METRICS_BYTES = 2**28
"""Of a metrics.jsonl: 600 bytes per log, 400,000 logs."""


@dataclass(frozen=True)
class Evidence:
    """One run folder. place: relative to the study's folder, "search/soren/03"."""

    place: str
    recipe: Recipe
    record: dict[str, Any]
    """run.json."""
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl."""

    @property
    def stage(self) -> str:
        """search or verdict."""
        return self.place.split("/")[0]

    @property
    def candidate(self) -> str:
        """The folder that the run is in."""
        return self.place.split("/")[1]

    @property
    def seed(self) -> int:
        """The seed that the run was trained with."""
        recorded = self.record.get("seeds", {}).get("trainer")
        return recorded if recorded is not None else self.recipe.trainer.get("seed", 42)

    @property
    def is_trained(self) -> bool:
        """Whether training came to its end."""
        return "training" in self.record

    @property
    def num_steps(self) -> int:
        """Of a trained run."""
        return self.record["training"]["steps"]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The keys of the recipe that determine the weights, as dotted ones, without the seed."""
        values = json.loads(json.dumps(flat(training_part(self.recipe)), default=str))  # tuples are lists, as in files
        seeds = {"trainer.seed", "trainer.data_seed"} | (
            {"model.init_seed"} if self.recipe.task == "pretrain" else set()
        )
        return {key: value for key, value in values.items() if key not in seeds}

    def metric(self, name: str) -> float | None:
        """The value of the last evaluation; None if there is none, or it is not finite."""
        values = [line[name] for line in self.metrics if isinstance(line.get(name), int | float)]
        return float(values[-1]) if values and math.isfinite(values[-1]) else None


def read_evidence(study_folder: Path) -> tuple[list[Evidence], list[str]]:
    """The runs in the folder, in the order of their places, and a problem for each that cannot be read.

    A folder without run.json has no run yet.
    """
    runs, problems = [], []
    for folder in run_folders(study_folder):
        place = folder.relative_to(study_folder).as_posix()
        try:
            run = RunFolder(folder)
            if (record := run.read()) is not None and run.recipe.is_file():
                runs.append(Evidence(place, load_resolved(run.recipe), record, list(_lines(run.metrics))))
        except UserError as error:
            problems.append(f"{place}: cannot be audited: {error}; remove the folder and rerun the study")
    return runs, problems


def run_folders(study_folder: Path) -> list[Path]:
    """All folders at the places of runs."""
    return sorted(path for stage in STAGES for path in (study_folder / stage).glob("*/*") if path.is_dir())


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in read_text(file, MAX_METRICS_BYTES).splitlines() if file.is_file() else ():
        with suppress(UserError):  # a line that a kill left truncated
            if isinstance(record := parse_json(line, file.name), dict):
                yield record


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict with dotted keys: {"optimizer.lr": 0.01, ...}."""
    items: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, dict) and value
        items |= flat(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return items
