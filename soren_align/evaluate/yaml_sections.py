"""The strict reading of a suite's YAML files: an unknown key is an error, and all errors are reported at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import UserError
from ..files import read_text
from ..yaml_reader import Key, dotted, parse_yaml, place


class YamlSection(BaseModel):
    """One mapping in such a file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


Form = TypeVar("Form", bound=YamlSection)
Hint = Callable[[Key], str]
"""From the location of an unknown key to the remedy in its message."""
Lines = dict[Key, str]
"""The place of each key: ('tasks', 0, 'metric') -> 'suite.yaml:12'."""


def read_mapping(path: Path, remedy: str) -> tuple[dict[str, Any], Lines]:
    """Return a file's content and the places of its keys. Raises UserError with the remedy if it is not a mapping."""
    raw, lines = parse_yaml(read_text(path), str(path))
    if not isinstance(raw, dict):
        raise UserError(f"{path}: {remedy}")
    return raw, lines


def validate(raw: dict[str, Any], form: type[Form], lines: Lines, hint: Hint = lambda loc: "", end: str = "") -> Form:
    """Return a file's content as a `form`. Raises UserError with a sentence per error, and `end` after them."""
    try:
        return form.model_validate(raw)
    except ValidationError as error:
        # A default that is made of another key, such as a column of its task, is no error of its own.
        errors = [e for e in error.errors(include_url=False) if e["type"] != "default_factory_not_called"]
        places = [place(e["loc"], lines) for e in errors]
        ordered = sorted(zip(places, errors, strict=True), key=lambda each: int(each[0].rpartition(":")[2]))
        sentences = [f"{where} {_sentence(e, hint)}" for where, e in ordered]
        raise UserError(*sentences, *([end] if end else [])) from None


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
