"""Published scores of other authors, shown under the table's own rows and never compared.

They come from other prompts and other software, and the points of single questions are not known.
"""

from typing import Annotated, Any

from pydantic import Field, model_validator

from .. import shipped
from ..errors import UserError, did_you_mean
from .yaml_sections import YamlSection, read_mapping, refuse_duplicates, validate


class PublishedScore(YamlSection):
    """In percent."""

    value: Annotated[float, Field(ge=0, le=100)]
    stderr: Annotated[float, Field(ge=0, le=100)] | None = None
    """Null if it was not published."""


class PublishedRow(YamlSection):
    """One model."""

    name: Annotated[str, Field(min_length=1)]
    scores: Annotated[dict[str, PublishedScore], Field(min_length=1)]
    """By column of the suite, and "average"; some may be missing."""


class PublishedTable(YamlSection):
    """One published table."""

    source: str
    """Authors and publication."""
    model: str
    """The model that was evaluated."""
    suite: str
    """The suite with the same columns."""
    rows: Annotated[list[PublishedRow], Field(min_length=1)]

    @model_validator(mode="after")
    def _refuse_duplicate_names(self) -> "PublishedTable":
        refuse_duplicates([row.name for row in self.rows], "rows: {} is there twice; each row needs its own name")
        return self


def load_published(name_or_path: str, suite_name: str) -> list[dict[str, Any]]:
    """Return the rows of a shipped table ('paper/sft') or of a YAML file of the same form.

    A row is {"name", "source", "scores": {column: {"value", "stderr" if published}}}, in percent.
    Raises UserError with all errors in the file, or if the scores belong to another suite.
    """
    known = shipped.published()
    path = known.get(name_or_path) or shipped.resolve(name_or_path)
    if not path.is_file():
        hint = did_you_mean(name_or_path, known, f"shipped: {', '.join(known)}")
        raise UserError(f"{name_or_path}: neither a file nor a shipped table of published scores{hint}")
    raw, lines = read_mapping(path, f"published scores are a mapping ({', '.join(PublishedTable.model_fields)})")
    table = validate(raw, PublishedTable, lines)
    if table.suite != suite_name:
        raise UserError(
            f"{name_or_path}: has published scores for suite {table.suite}, not for {suite_name}; choose another table"
        )
    source = f"{table.source} ({table.model})"
    return [{"name": row.name, "source": source} | row.model_dump(exclude_none=True) for row in table.rows]
