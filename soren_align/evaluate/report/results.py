"""The form of results.json and of the summary, and the checks before an evaluation replaces them.

`--output` may be any folder: only files that an evaluation wrote are replaced. No torch here,
because model cards read results too.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from ...core.errors import UserError
from ...core.files import is_component, read_checked, read_json, refuse_unwritable, write

NAME = "results.json"
POINTS = "points.json"
"""See stats/paired.py."""
WRITTEN = (NAME, POINTS, "table.md", "scores.png", "scores-dark.png")
"""Beside `samples`, a folder for each row."""
MAX_BYTES = 16 << 20


def _component(name: str) -> str:
    if not is_component(name):
        raise ValueError("is not the name of one file or folder")
    return name


class Value(TypedDict):
    """A score in percent."""

    value: float
    stderr: NotRequired[float]


class Score(Value):
    """A score with its 95% interval."""

    low: NotRequired[float]
    high: NotRequired[float]
    n: NotRequired[int]
    """Questions; an average has none."""
    chance: NotRequired[float]
    """The accuracy of answers at random, of multiple choice."""
    without_model: NotRequired["WithoutModel"]
    """What a rule that reads no question scores, where this is more than chance."""
    also: NotRequired[dict[str, Value]]
    """Other scores of the same questions, by label."""


class WithoutModel(TypedDict):
    """A rule such as "always the longest answer", and its score in percent."""

    rule: str
    value: float


class Interval(TypedDict):
    """A difference in percent with its 95% interval."""

    value: float
    low: float
    high: float


class Difference(Interval):
    """A difference to another row, and its statistics; see `significance.compare`."""

    p_holm: float


class Start(TypedDict):
    """The row whose model was trained further."""

    name: str
    differences: dict[str, Difference]


class Row(TypedDict):
    """A model; scores and differences are by benchmark, and "average"."""

    name: Annotated[str, AfterValidator(_component)]
    model: str | None
    """Its folder or name on the hub; model cards omit it."""
    weights_sha256: NotRequired[str | None]
    """The hash of the weights that answered; None for a name on the hub."""
    scores: Annotated[dict[str, Score], Field(min_length=1)]
    differences: NotRequired[dict[str, Difference] | None]
    """Differences to the first row, which has none itself."""
    unpaired: NotRequired[dict[str, str]]
    """Why a benchmark is not compared."""
    start: NotRequired[Start | None]
    chat_template_of: NotRequired[str | None]
    truncated: NotRequired[dict[str, int]]
    eos_token_id: NotRequired[Any]
    num_requests: NotRequired[Any]


class PublishedRow(TypedDict):
    """Published scores of a model."""

    name: str
    source: str
    scores: dict[str, Value]


class Settings(TypedDict, total=False):
    """All that reproduces the table; only these keys are checked."""

    metrics: dict[str, str]
    data: str


class Results(TypedDict):
    """results.json. Keys that no table needs are not checked."""

    format: Literal[1]
    points_sha256: NotRequired[str]
    """The hash of points.json."""
    title: str
    suite: str
    rows: Annotated[list[Row], Field(min_length=1)]
    """The first one is the starting checkpoint."""
    published: list[PublishedRow]
    settings: Settings
    notes: list[str]
    about: NotRequired[dict[str, str]]
    """What a column's questions are."""
    intervals: NotRequired[bool]
    """Whether a table shows a score's interval in place of its standard error."""


_RESULTS = TypeAdapter(Results)


def evaluations(run: Path) -> list[Path]:
    """Return the folders of a run's evaluations, by name of the suite."""
    return sorted(file.parent for file in run.glob(f"eval/*/{NAME}"))


def read_results(folder: Path) -> Results | None:
    """Return the results of an evaluation in `folder`; None if there is no results.json.

    Raises UserError if the file has another form or format, or is damaged.
    """
    file = folder / NAME
    if not os.path.lexists(file):
        return None
    remedy = "if this file is an evaluation's, remove it and evaluate again"
    return read_checked(file, _RESULTS, remedy, MAX_BYTES)


def refuse_foreign(output: Path, names: list[str]) -> None:
    """Raises UserError if writing rows of these names would replace files that no evaluation
    wrote.
    """
    remedy = f"choose another --output, or move {output} away"
    # Before the evaluation: its results would be lost if they could not be written in the end.
    refuse_unwritable(output if output.is_dir() else output.absolute().parent, "--output")
    if os.path.lexists(output) and not output.is_dir():
        raise UserError(f"{output}: is not a folder; {remedy}")
    for name in names:
        if not is_component(name):
            raise UserError(
                f"the row {name!r} cannot be the name of a folder of samples; rename the model's"
                " folder"
            )
    # Without a results.json no evaluation wrote here: files of these names are somebody else's.
    results, samples = read_results(output), output / "samples"
    own = {row["name"] for row in results["rows"]} if results else set()
    places = [samples / name for name in names if name not in own]
    if results is None:
        places += [output / name for name in WRITTEN]
        places += [samples] if samples.is_dir() and any(samples.iterdir()) else []
    if foreign := [place for place in places if os.path.lexists(place)]:
        raise UserError(f"{foreign[0]}: was not written by an evaluation; {remedy}")


def write_summary(results: Results, file: Path) -> None:
    """Write the scores alone, as fractions: {"rows": [{"name": "base", "zoo_mc": 0.25, ...}, ...]}.

    Call `refuse_foreign_summary` before the evaluation.
    """
    rows = [
        {
            "name": row["name"],
            **{column: score["value"] / 100 for column, score in row["scores"].items()},
        }
        for row in results["rows"]
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, json.dumps({"rows": rows}, indent=2) + "\n")


def refuse_foreign_summary(file: Path) -> None:
    """Raises UserError if `file` is there and not an earlier summary."""
    if not os.path.lexists(file):
        return
    try:
        content = read_json(file) if file.is_file() else None
    except UserError:
        content = None
    if not isinstance(content, dict) or content.keys() != {"rows"}:
        raise UserError(
            f"{file}: is not a summary of an evaluation; choose another --summary, or move this"
            " file away"
        )
