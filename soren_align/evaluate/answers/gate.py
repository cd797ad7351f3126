"""`stats --gate`: does any model lose more than a policy allows? For a CI that stops a worse model.

A margin is the points that a column may lose. A model passes a column if its difference from the
reference is shown to be above minus the margin: if the lower end of its 95% interval is, which a
model at the margin itself passes in 2.5% of evaluations. A small sample thus fails.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...core.errors import UserError, did_you_mean, printable
from ...core.files import read_text, write
from ...core.yaml import parse_yaml
from ..report.results import Results
from ..report.tables import has_too_few


class Policy(BaseModel):
    """A gate's file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    margins: dict[str, float] = Field(min_length=1)
    """The points, out of 100, that each column may lose: at least 0."""


@dataclass(frozen=True)
class Check:
    """One column of one model. failure: "" if it has passed."""

    model: str
    column: str
    text: str
    failure: str = ""


def read_policy(name: str) -> Policy:
    """Return a policy's file. Raises UserError if it is none."""
    content, _ = parse_yaml(read_text(Path(name)), name)
    try:
        policy = Policy.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{name}: {place}: {first['msg'].lower()}; write margins: {{COLUMN: POINTS, ...}}"
        ) from None
    if wrong := next((c for c, margin in policy.margins.items() if not 0 <= margin <= 100), None):
        raise UserError(
            f"{name}: margins.{wrong}: found {policy.margins[wrong]}; write points from 0 to 100"
        )
    return policy


def checks(policy: Policy, results: Results) -> Iterator[Check]:
    """Yield a check of each column of the policy, for each model but the first.
    Raises UserError if the table has no such column.
    """
    first, *later = results["rows"]
    for column in policy.margins:
        if column not in first["scores"]:
            hint = did_you_mean(column, first["scores"], "write one of the table's columns")
            raise UserError(f"--gate: margins.{column}: the table has no such column{hint}")
    for row in later:
        for column, margin in policy.margins.items():
            yield _check(row, column, margin)


def _check(row: Any, column: str, margin: float) -> Check:
    difference = (row.get("differences") or {}).get(column)
    if difference is None:
        reason = (row.get("unpaired") or {}).get(column, "it was not compared")
        return Check(row["name"], column, f"margin {margin:g}", f"not compared: {reason}")
    value, low, high = (difference[key] for key in ("value", "low", "high"))
    text = f"{value:+.1f} [{low:+.1f}, {high:+.1f}] points, margin {margin:g}"
    failure = ""
    if has_too_few(row, column):
        failure = "too few questions to show anything"
    elif high < -margin:
        failure = "loses more than the margin"
    elif low <= -margin:
        failure = "is not shown to lose less than the margin"
    return Check(row["name"], column, text, failure)


def write_junit(file: str, done: list[Check]) -> None:
    """Write the checks as JUnit's XML, which CIs show."""
    suite = ElementTree.Element(
        "testsuite",
        name="soren-align gate",
        tests=str(len(done)),
        failures=str(sum(bool(check.failure) for check in done)),
    )
    for check in done:
        case = ElementTree.SubElement(
            suite, "testcase", classname=printable(check.model), name=printable(check.column)
        )
        if check.failure:
            ElementTree.SubElement(case, "failure", message=f"{check.failure}: {check.text}")
    ElementTree.indent(suite)
    write(Path(file), ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n")
