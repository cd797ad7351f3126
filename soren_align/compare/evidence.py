"""The run folders of a study as the audit reads them: from recipe.yaml, run.json and metrics.jsonl alone."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import parse_json, read_text
from ..recipe import Recipe, load_resolved, training_part
from ..run_folder import RunFolder

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
