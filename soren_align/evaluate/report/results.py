"""The form of results.json and of the summary, and the checks before an evaluation replaces them.

A run folder may come from anyone, and `--output` may be any folder: only files of this form are read or replaced. No
torch here, because model cards read results too.
"""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...core.document import dotted
from ...core.errors import UserError
from ...core.files import is_component, read_json

NAME = "results.json"
FORMAT = 2
"""Of results.json. Format 1 had no such key, and other names (docs/evaluation.md)."""
POINTS = "points.json"
"""See points.py."""
WRITTEN = (NAME, POINTS, "table.md", "scores.png")
"""Beside `samples`, a folder for each row."""
MAX_BYTES = 16 << 20
MAX_DEPTH = 20


def component(name: str) -> str:
    """Return the name. Raises ValueError if it is not the name of one entry of a folder."""
    if not is_component(name):
        raise ValueError("is not the name of one file or folder")
    return name


class _Section(BaseModel):
    model_config = ConfigDict(strict=True)


class _Value(_Section):
    value: float
    stderr: float = 0.0


class _Score(_Value):
    low: float = 0.0
    high: float = 0.0
    n: int = 0
    also: dict[str, _Value] = {}


class _CleanDifference(_Section):
    value: float
    low: float
    high: float


class _OtherDifference(_CleanDifference):
    p_holm: float


class _Difference(_OtherDifference):
    also: dict[str, _OtherDifference] = {}


class _Start(_Section):
    name: str
    differences: dict[str, _Difference]


class _Row(_Section):
    name: Annotated[str, AfterValidator(component)]
    model: str | None
    scores: Annotated[dict[str, _Score], Field(min_length=1)]
    differences: dict[str, _Difference] | None = None
    unpaired: dict[str, str] = {}
    start: _Start | None = None
    chat_template_of: str | None = None
    truncated: dict[str, int] = {}


class _CleanScore(_Section):
    value: float
    change: float
    difference: _CleanDifference | None = None


class _Contamination(_Section):
    questions: int
    overlapping: int
    exact: int
    examples_read: int
    scores: dict[str, _CleanScore] = {}


class _Published(_Section):
    name: str
    source: str
    scores: dict[str, _Value]


class _Settings(_Section):
    metrics: dict[str, str] = {}
    data: str = "hub"


class _Results(_Section):
    """The keys that the table needs; other keys are not checked."""

    format: int
    title: str
    suite: str
    rows: Annotated[list[_Row], Field(min_length=1)]
    published: list[_Published]
    contamination: dict[str, _Contamination] | None = None
    settings: _Settings
    notes: list[str]

    @model_validator(mode="after")
    def _rows_have_equal_columns(self) -> "_Results":
        first = self.rows[0]
        for row in self.rows:
            if row.scores.keys() != first.scores.keys():
                raise ValueError(f"{row.name} has other columns than {first.name}")
            if row.differences is not None and row.differences.keys() | row.unpaired.keys() != row.scores.keys():
                raise ValueError(f"the differences of {row.name} have other columns than its scores")
            if any(row.scores[c].also.keys() != first.scores[c].also.keys() for c in first.scores):
                raise ValueError(f"{row.name} has other additional scores than {first.name}")
        names = [row.name for row in self.rows]
        if len(set(names)) < len(names):
            raise ValueError("two rows have the same name")
        return self


class _SummaryRow(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, float]
    name: str


class _Summary(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    rows: list[_SummaryRow]


def read_results(folder: Path) -> dict[str, Any] | None:
    """Return the results of an evaluation in `folder`; None if there is no results.json.

    Raises UserError if the file has another form or format, or is damaged.
    """
    return _read(folder / NAME, _Results, "is not an evaluation's results, or is damaged")


def refuse_foreign(output: Path, names: list[str]) -> None:
    """Raises UserError if writing rows of these names would replace files that no evaluation wrote."""
    remedy = "choose another --output, or move it away"
    _refuse_unwritable(output, "--output")
    if os.path.lexists(output) and not output.is_dir():
        raise UserError(f"{output}: is not a folder; {remedy}")
    for name in names:
        if not is_component(name):
            raise UserError(f"the row {name!r} cannot be the name of a folder of samples; rename the model's folder")
    samples = output / "samples"
    if samples.is_symlink():
        raise UserError(f"{samples}: was not written by an evaluation; {remedy}")
    try:
        results = read_results(output)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None
    own = set() if results is None else {row["name"] for row in results["rows"]}
    foreign = [output / name for name in WRITTEN if results is None and os.path.lexists(output / name)]
    foreign += [samples] if results is None and samples.exists() and any(samples.iterdir()) else []
    foreign += [samples / name for name in names if name not in own and os.path.lexists(samples / name)]
    if foreign:
        raise UserError(f"{foreign[0]}: was not written by an evaluation; {remedy}")


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Return the scores alone, as fractions: {"rows": [{"name": "base", "zoo_mc": 0.25, ...}, ...]}."""
    return {
        "rows": [
            {"name": row["name"], **{column: score["value"] / 100 for column, score in row["scores"].items()}}
            for row in results["rows"]
        ]
    }


def refuse_foreign_summary(file: Path) -> None:
    """Raises UserError if `file` is there and not an earlier summary, or cannot be written."""
    remedy = "choose another --summary, or move it away"
    if file.is_symlink() or file.is_dir():
        raise UserError(f"{file}: is a link or a folder; {remedy}")
    _refuse_unwritable(file, "--summary")
    try:
        _read(file, _Summary, "is not a summary of an evaluation")
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None


def _refuse_unwritable(path: Path, option: str) -> None:
    """Raises UserError if the parent folder of `path` cannot be made."""
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise UserError(f"{path}: {parent} is not a folder; choose another {option}")


def _read(file: Path, form: type[BaseModel], problem: str) -> dict[str, Any] | None:
    """Return the content of a JSON file; None if there is no file. Raises UserError if it does not have that form."""
    if not os.path.lexists(file):
        return None
    if file.is_symlink() or not file.is_file():
        raise UserError(f"{file}: {problem} (not a regular file)")
    try:
        content = read_json(file, max_bytes=MAX_BYTES, max_depth=MAX_DEPTH)
    except UserError as error:
        reason = str(error).removeprefix(f"{file}: ").removeprefix(f"{file}:")
        raise UserError(f"{file}: {problem} ({reason[:120]})") from None
    if form is _Results and _is_of_other_version(content):
        raise UserError(f"{file}: was written by another version of soren-align, in another format")
    try:
        form.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = dotted(first["loc"])[:80]
        raise UserError(f"{file}: {problem} ({f'{key}: ' if key else ''}{first['msg'][:120]})") from None
    return content


def _is_of_other_version(content: Any) -> bool:
    """Whether this is results.json of another format."""
    return (
        isinstance(content, dict)
        and {"title", "suite", "rows", "settings"} <= content.keys()
        and (content.get("format", 1) != FORMAT)
    )
