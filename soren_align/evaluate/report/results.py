"""The form of results.json and of the summary, and the checks before an evaluation replaces them.

A run folder may come from anyone, and `--output` may be any folder: only files of this form are
read or replaced. No torch here, because model cards read results too.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ...core.errors import UserError
from ...core.files import is_component, read_json, refuse_unwritable, write
from ...core.text import dotted

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
    also: NotRequired[dict[str, Value]]
    """Other scores of the same questions, by label."""


class Interval(TypedDict):
    """A difference in percent with its 95% interval."""

    value: float
    low: float
    high: float


class _Difference(Interval):
    p_holm: float
    also: NotRequired[dict[str, "Difference"]]


def _refuse_words(difference: Any) -> Any:
    for key, value in difference.items() if isinstance(difference, dict) else ():
        if key != "also" and type(value) not in (int, float):
            raise ValueError(f"{key} is not a number")
    return difference


Difference = Annotated[_Difference, BeforeValidator(_refuse_words)]
"""A difference to another row, and its statistics, each a number; see `significance.compare`."""


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
    problem = "is not an evaluation's results, or is damaged"
    content = _read(folder / NAME, problem)
    if content is None:
        return None
    try:
        # Strict: a text in place of a number would fail later, in the middle of a table.
        _RESULTS.validate_python(content, strict=True)
        reason = _contradiction(content["rows"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = dotted(first["loc"])[:80]
        reason = f"{f'{key}: ' if key else ''}{first['msg'][:120]}"
    if reason:
        raise UserError(f"{folder / NAME}: {problem} ({reason}); evaluate the run again")
    return content


def _contradiction(rows: list[Row]) -> str:
    """Return how rows of one table contradict each other; "" if they do not."""
    first, names = rows[0], [row["name"] for row in rows]
    # The schema checks one row at a time. Tables index every row by the first one's columns, which
    # no schema states.
    for row in rows:
        if row["scores"].keys() != first["scores"].keys():
            return f"the rows {row['name']} and {first['name']} have different columns"
        differences = row.get("differences")
        if (
            differences is not None
            and differences.keys() | row.get("unpaired", {}).keys() != row["scores"].keys()
        ):
            return f"the scores and the differences of {row['name']} have different columns"
        if any(
            s.get("also", {}).keys() != first["scores"][c].get("also", {}).keys()
            for c, s in row["scores"].items()
        ):
            return f"the rows {row['name']} and {first['name']} have different additional scores"
    return "two rows have the same name" if len(set(names)) < len(names) else ""


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
    samples = output / "samples"
    if samples.is_symlink():
        raise UserError(f"{samples}: was not written by an evaluation; {remedy}")
    try:
        results = read_results(output)
    except UserError as error:
        raise UserError(f"{str(error).partition('; ')[0]}; {remedy}") from None
    own = set() if results is None else {row["name"] for row in results["rows"]}
    # Without a results.json no evaluation wrote here: files of these names are somebody else's.
    foreign = [
        output / name for name in WRITTEN if results is None and os.path.lexists(output / name)
    ]
    foreign += [samples] if results is None and samples.exists() and any(samples.iterdir()) else []
    foreign += [
        samples / name for name in names if name not in own and os.path.lexists(samples / name)
    ]
    if foreign:
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
    problem, remedy = (
        "is not a summary of an evaluation",
        "choose another --summary, or move this file away",
    )
    if file.is_symlink() or file.is_dir():
        raise UserError(f"{file}: is a symbolic link or a folder; {remedy}")
    try:
        content = _read(file, problem)
    except UserError as error:
        raise UserError(f"{str(error).partition('; ')[0]}; {remedy}") from None
    rows = content["rows"] if isinstance(content, dict) and content.keys() == {"rows"} else None
    is_summary = isinstance(rows, list) and all(
        isinstance(row, dict)
        and isinstance(row.get("name"), str)
        and all(isinstance(value, int | float) for key, value in row.items() if key != "name")
        for row in rows
    )
    if content is not None and not is_summary:
        raise UserError(f"{file}: {problem}; {remedy}")


def _read(file: Path, problem: str) -> Any:
    """Return the content of a JSON file; None if there is no file.
    Raises UserError with the problem if it is none.
    """
    if not os.path.lexists(file):
        return None
    if file.is_symlink() or not file.is_file():
        raise UserError(f"{file}: {problem} (not a regular file)")
    try:
        content = read_json(file, max_bytes=MAX_BYTES)
    except UserError as error:
        reason = str(error).removeprefix(f"{file}: ").removeprefix(f"{file}:")
        raise UserError(f"{file}: {problem} ({reason[:120]})") from None
    if content is None:
        raise UserError(f"{file}: {problem} (null)")
    return content
