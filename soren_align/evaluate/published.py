"""Rows that others published, to stand beside ours: marked as quoted, and in no test of significance.

They were asked elsewhere and in other words, and their answers question by question are not known.
"""

from typing import Annotated, Any

from pydantic import Field, model_validator

from .. import shipped
from ..errors import UserError, did_you_mean
from .yaml_sections import Section, checked, mapping, refuse_twice


class QuotedScore(Section):
    """In percent."""

    value: Annotated[float, Field(ge=0, le=100)]
    stderr: Annotated[float, Field(ge=0, le=100)] | None = None
    """Null where it was not published."""


class QuotedRow(Section):
    """One model."""

    name: Annotated[str, Field(min_length=1)]
    scores: Annotated[dict[str, QuotedScore], Field(min_length=1)]
    """By the suite's columns, and "average"; not necessarily all of them."""


class Quoted(Section):
    """One published table."""

    source: str
    """Who published it and where."""
    model: str
    """What was asked."""
    suite: str
    """Whose columns these are."""
    rows: Annotated[list[QuotedRow], Field(min_length=1)]

    @model_validator(mode="after")
    def _no_name_twice(self) -> "Quoted":
        refuse_twice([row.name for row in self.rows], "rows: {} stands there twice; each must have its own name")
        return self


def load_quoted(name_or_path: str, suite_name: str) -> list[dict[str, Any]]:
    """The rows of a shipped table ('paper/sft') or of a YAML file like it.

    Returns {"name", "source", "scores": {column: {"value", "stderr" where published}}} of each row, in percent.
    Raises UserError with every mistake found, and where the scores are those of another suite.
    """
    known = shipped.quoted()
    path = known.get(name_or_path) or shipped.resolve(name_or_path)
    if not path.is_file():
        hint = did_you_mean(name_or_path, known, f"shipped: {', '.join(known)}")
        raise UserError(f"{name_or_path}: neither a file nor a shipped table of quoted scores{hint}")
    raw = mapping(path, f"quoted scores are a mapping ({', '.join(Quoted.model_fields)})")
    table = checked(raw, Quoted, path)
    if table.suite != suite_name:
        raise UserError(f"{name_or_path}: quotes scores of suite {table.suite}, and this is suite {suite_name}")
    source = f"{table.source} ({table.model})"
    return [{"name": row.name, "source": source} | row.model_dump(exclude_none=True) for row in table.rows]
