"""YAML files beside the tasks, read strictly: an unknown key is a mistake, and every mistake is found at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import UserError
from ..files import read_yaml


class Section(BaseModel):
    """Of such a file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


Whole = TypeVar("Whole", bound=Section)


def mapping(path: Path, described: str) -> dict[str, Any]:
    """The file's content; UserError, with what it should be in the words of `described`, where it is no mapping."""
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise UserError(f"{path}: {described}")
    return raw


def checked(
    raw: dict[str, Any], whole: type[Whole], path: Path, hint: Callable[[tuple[str | int, ...]], str] = lambda loc: ""
) -> Whole:
    """The content as a `whole`; UserError with each mistake as a sentence. hint: what to say of an unknown key."""
    try:
        return whole.model_validate(raw)
    except ValidationError as error:
        raise UserError(*(f"{path} {_say(e, hint)}" for e in error.errors(include_url=False))) from None


def refuse_twice(names: list[str], problem: str) -> None:
    """ValueError, saying `problem` of it, where a name stands there twice."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(problem.format(repr(twice[0])))


def _say(error: Any, hint: Callable[[tuple[str | int, ...]], str]) -> str:
    """One pydantic error as a sentence: key, finding, remedy."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key{hint(error['loc'])}"
    if error["type"] == "missing":
        return f"{where}: is required"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{where}: found {error['input']!r}; {error['msg'][0].lower()}{error['msg'][1:]}"
