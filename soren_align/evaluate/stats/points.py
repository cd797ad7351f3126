"""The points of each question, beside the results of an evaluation, so that runs can be compared later.

    points.json    {"format": 1, "rows": {row: {column: {"points": [1.0, 0.0, ...], "clusters": [0, 0, 1, ...],
                   "prompts": hash of the questions and prompts}}}}

A run folder may come from anyone: only a file of this form is read, and its points must give the scores in
results.json. Neither torch nor lm-eval.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...core.document import dotted
from ...core.errors import UserError
from ...core.files import read_json
from ..report.results import NAME as RESULTS
from ..report.results import POINTS as NAME
from ..report.results import read_results
from .paired import MODELS_OWN

MAX_BYTES = 64 << 20
"""The leaderboard's 28,659 questions are 0.3 MB a row."""


@dataclass(frozen=True)
class ColumnPoints:
    """The points of one model on one column, in the order of the questions."""

    each: np.ndarray
    """In [0, 1]; the score is 100 times their mean."""
    clusters: np.ndarray | None
    """Numbers from 0; None: the questions are independent."""
    prompts: str
    """Hash of all questions, prompts and settings of the model's own: models are compared only if it is equal."""


Points = Mapping[str, ColumnPoints]
"""Of one model, by column."""


class _Column(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    points: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)]
    clusters: list[Annotated[int, Field(ge=0)]] | None = None
    prompts: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _clusters_are_numbered(self) -> "_Column":
        if self.clusters is not None:
            if len(self.clusters) != len(self.points):
                raise ValueError("has another number of clusters than of points")
            if len(set(self.clusters)) != max(self.clusters) + 1:
                raise ValueError("numbers of clusters are left out")
        return self


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    format: Literal[1]
    rows: dict[str, dict[str, _Column]]


def text(rows: Mapping[str, Any]) -> str:
    """Return the content of points.json. rows: the harness's ModelResults by row."""
    content = {
        row: {
            column: {
                "points": points,
                "clusters": _numbers(results.clusters.get(column)),
                "prompts": _hash(results, column),
            }
            for column, points in results.points.items()
        }
        for row, results in rows.items()
    }
    return json.dumps({"format": 1, "rows": content}) + "\n"


def read_points(folder: Path) -> dict[str, Points]:
    """Return the points by row, in the order of the table. folder: of an evaluation's results.

    Raises UserError if there are none, if the file has another form, or if they do not give the scores in results.json.
    """
    file = folder / NAME
    results = read_results(folder)
    if results is None:
        raise UserError(f"{folder}: no {RESULTS}; evaluate the run first")
    if file.is_symlink() or not file.is_file():
        raise UserError(f"{file}: is missing; evaluate the run again")
    try:
        content = _File.model_validate(read_json(file, max_bytes=MAX_BYTES))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{file} {dotted(first['loc'])[:80]}: {first['msg'][:120]}; evaluate the run again") from None
    points = {row: {name: _points(column) for name, column in each.items()} for row, each in content.rows.items()}
    for row in results["rows"]:
        _refuse_other_scores(file, row, points.get(row["name"], {}))
    return {row["name"]: points[row["name"]] for row in results["rows"]}


def _points(column: _Column) -> ColumnPoints:
    clusters = None if column.clusters is None else np.array(column.clusters)
    return ColumnPoints(np.array(column.points), clusters, column.prompts)


def _refuse_other_scores(file: Path, row: dict[str, Any], points: Points) -> None:
    for column, score in row["scores"].items():
        if column == "average":
            continue
        mean = 100 * float(points[column].each.mean()) if column in points else None
        if mean is None or abs(mean - score["value"]) > 1e-6:
            raise UserError(
                f"{file}: {row['name']} has {mean} in {column}, {RESULTS} {score['value']}; evaluate the run again"
            )


def _numbers(labels: list[str] | None) -> list[int] | None:
    """Return the clusters as numbers in the order of their first question."""
    if labels is None:
        return None
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return [numbers[label] for label in labels]


def _hash(results: Any, column: str) -> str:
    own = [results.settings.get(key) for key in MODELS_OWN]
    prompts = [results.prompt_hashes[column], results.truncated.get(column, 0), own]
    return hashlib.sha256(json.dumps(prompts, sort_keys=True, default=str).encode()).hexdigest()
