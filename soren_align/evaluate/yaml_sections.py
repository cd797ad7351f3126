"""The strict reading of a suite's YAML files: an unknown key is an error, and all errors are reported at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import UserError
from ..files import read_yaml
from ..yaml_reader import dotted


class YamlSection(BaseModel):
    """One mapping in such a file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


Form = TypeVar("Form", bound=YamlSection)
Hint = Callable[[tuple[str | int, ...]], str]
"""From the location of an unknown key to the remedy in its message."""


def read_mapping(path: Path, remedy: str) -> dict[str, Any]:
    """Return a file's content. Raises UserError with the remedy if it is not a mapping."""
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise UserError(f"{path}: {remedy}")
    return raw


def validate(raw: dict[str, Any], form: type[Form], path: Path, hint: Hint = lambda loc: "") -> Form:
    """Return the content of the file `path` as a `form`. Raises UserError with a sentence per error."""
    try:
        return form.model_validate(raw)
    except ValidationError as error:
        raise UserError(*(f"{path} {_sentence(e, hint)}" for e in error.errors(include_url=False))) from None


def refuse_duplicates(names: list[str], problem: str) -> None:
    """Raises ValueError if a name is there twice. problem: its message, with {} for the name."""
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(problem.format(repr(duplicates[0])))


def _sentence(error: Any, hint: Hint) -> str:
    """Return a pydantic error as a sentence: key, finding, remedy."""
    key = dotted(error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key{hint(error['loc'])}"
    if error["type"] == "missing":
        return f"{key}: is required"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{key}: found {error['input']!r}; {error['msg'][0].lower()}{error['msg'][1:]}"
