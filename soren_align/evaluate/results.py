"""results.json and the summary: what an evaluation writes, read back as a stranger's file.

A run folder comes from anywhere, and `--output` may name any folder: nothing is read as ours, and nothing is replaced,
but what has our own keys in our own shape. No torch here: model cards read results too.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import UserError
from ..files import is_component

NAME = "results.json"
WRITTEN = (NAME, "table.md", "scores.png")
"""Beside `samples`, a folder for each row."""
MAX_BYTES = 16 << 20
MAX_DEPTH = 20


def component(name: str) -> str:
    """The name itself; raises ValueError if it is not the name of one entry of a folder."""
    if not is_component(name):
        raise ValueError("is not the name of one file or folder")
    return name


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Value(_Part):
    value: float
    stderr: float = 0.0


class _Score(_Value):
    low: float = 0.0
    high: float = 0.0
    n: int = 0
    also: dict[str, _Value] = {}


class _Difference(_Part):
    value: float
    low: float
    high: float
    p_holm: float


class _Row(_Part):
    name: Annotated[str, AfterValidator(component)]
    model: str | None
    scores: Annotated[dict[str, _Score], Field(min_length=1)]
    differences: dict[str, _Difference] | None = None
    cut: dict[str, int] = {}


class _Quoted(_Part):
    name: str
    source: str
    scores: dict[str, _Value]


class _Settings(_Part):
    metrics: dict[str, str] = {}
    data: str = "hub"


class _Results(_Part):
    """What is needed to name the rows and to show the table; everything else is left as it is."""

    title: str
    suite: str
    rows: Annotated[list[_Row], Field(min_length=1)]
    quoted: list[_Quoted]
    settings: _Settings
    notes: list[str]

    @model_validator(mode="after")
    def _rows_are_alike(self) -> "_Results":
        first = self.rows[0]
        for row in self.rows:
            if row.scores.keys() != first.scores.keys():
                raise ValueError(f"{row.name} has other columns than {first.name}")
            if row.differences is not None and row.differences.keys() != row.scores.keys():
                raise ValueError(f"the differences of {row.name} are of other columns than its scores")
            if any(row.scores[c].also.keys() != first.scores[c].also.keys() for c in first.scores):
                raise ValueError(f"{row.name} has other scores beside its columns than {first.name}")
        names = [row.name for row in self.rows]
        if len(set(names)) < len(names):
            raise ValueError("two rows have one name")
        return self


class _SummaryRow(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, float]
    name: str


class _Summary(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    rows: list[_SummaryRow]


def read_results(folder: Path) -> dict[str, Any] | None:
    """The results of an evaluation in `folder`; None where there is no results.json.

    Raises UserError where that file is not an evaluation's, or is damaged.
    """
    return _read(folder / NAME, _Results, "is not an evaluation's results, or is damaged")


def refuse_foreign(output: Path, names: list[str]) -> None:
    """UserError, before a model is asked, where writing the rows `names` would replace what no evaluation wrote."""
    remedy = "choose another --output, or move it away"
    _refuse_no_place(output, "--output")
    if os.path.lexists(output) and not output.is_dir():
        raise UserError(f"{output}: is there already, and no folder; {remedy}")
    for name in names:
        if not is_component(name):
            raise UserError(f"a model would stand in the table as {name!r}, which cannot name a folder; rename its own")
    samples = output / "samples"
    if samples.is_symlink():
        raise UserError(f"{samples}: is there already, and no evaluation's; {remedy}")
    try:
        results = read_results(output)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None
    ours = set() if results is None else {row["name"] for row in results["rows"]}
    foreign = [output / name for name in WRITTEN if results is None and os.path.lexists(output / name)]
    foreign += [samples] if results is None and samples.exists() and any(samples.iterdir()) else []
    foreign += [samples / name for name in names if name not in ours and os.path.lexists(samples / name)]
    if foreign:
        raise UserError(f"{foreign[0]}: is there already, and no evaluation's; {remedy}")


def remove_samples(output: Path) -> None:
    """Remove the samples of the results in `output`: another evaluation's rows must not stand beside new ones."""
    results = read_results(output)
    for row in results["rows"] if results else []:
        entry = output / "samples" / row["name"]
        if entry.is_symlink() or entry.is_file():
            entry.unlink()
        elif entry.is_dir():
            shutil.rmtree(entry)


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """The scores alone, as fractions: {"rows": [{"name": "base", "zoo_mc": 0.25, ...}, ...]}."""
    return {
        "rows": [
            {"name": row["name"], **{column: score["value"] / 100 for column, score in row["scores"].items()}}
            for row in results["rows"]
        ]
    }


def refuse_foreign_summary(file: Path) -> None:
    """UserError, before a model is asked, where `file` is no earlier summary and would be replaced, or has no place."""
    remedy = "choose another --summary, or move it away"
    if file.is_symlink() or file.is_dir():
        raise UserError(f"{file}: is a link or a folder; {remedy}")
    _refuse_no_place(file, "--summary")
    try:
        _read(file, _Summary, "is there already, and no evaluation's summary")
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None


def _refuse_no_place(path: Path, option: str) -> None:
    """UserError where the folder that `path` is to be written into cannot be made."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise UserError(f"{path}: {above} is no folder; choose another {option}")


def _read(file: Path, form: type[BaseModel], problem: str) -> dict[str, Any] | None:
    """The content of a JSON file of that form; None where it is not there. UserError, saying `problem`, otherwise."""
    if not os.path.lexists(file):
        return None
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size > MAX_BYTES:
            raise ValueError("it is a link, no file, or too large")
        content = json.loads(file.read_text(encoding="utf-8"))
        _refuse_deep(content)
        form.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:80]
        raise UserError(f"{file}: {problem} ({f'{where}: ' if where else ''}{first['msg'][:120]})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: {problem} ({str(error)[:120]})") from None
    return content


def _refuse_deep(content: Any, depth: int = MAX_DEPTH) -> None:
    """ValueError where lists and mappings are nested more deeply than `depth`."""
    if depth < 0:
        raise ValueError("nested too deeply")
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        _refuse_deep(value, depth - 1)
