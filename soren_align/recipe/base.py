"""Building blocks of the sections: their base class, bounded numbers, and unions of sections chosen by `name`."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, Tag

from ..core.optimizer_settings import COEFFICIENT, LARGEST, NON_NEGATIVE, POSITIVE, Bounds


class Section(BaseModel):
    """A section of a recipe: unknown keys are errors, and no value is converted to another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def within(bounds: Bounds) -> Any:
    """The pydantic Field of an int or a float within `bounds`."""
    least, above, most, below = bounds
    if most != LARGEST:
        return Field(ge=least, gt=above, le=most, lt=below)
    return Field(ge=least, gt=above, le=most, allow_inf_nan=False)


Positive = Annotated[float, within(POSITIVE)]
NonNegative = Annotated[float, within(NON_NEGATIVE)]
Coefficient = Annotated[float, within(COEFFICIENT)]


def members(annotation: Any) -> dict[str, Any]:
    """The sections of a tagged union (`Annotated[A, Tag("a")] | ...`) by tag; empty for any other annotation.

    A member `list[A]` counts as A; the union may stand beside None.
    """
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    parts = get_args(annotation)
    if len(parts) == 2 and parts[1] is type(None):
        return members(parts[0]) if get_origin(parts[0]) is Annotated else {}
    sections = {}
    for part in parts:
        tag = next((m.tag for m in getattr(part, "__metadata__", ()) if isinstance(m, Tag)), None)
        if tag is not None and (section := section_in(part)):  # a member may be a text
            sections[tag] = section
    return sections


def section_in(annotation: Any) -> type[Section] | None:
    """The first section within an annotation such as `Lora | None` or `list[TrainSplit]`; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((section for part in get_args(annotation) if (section := section_in(part))), None)


def tag_of(value: Any, union: Mapping[str, type[Section]]) -> str:
    """The tag of the member that `value` (a dict or a section) is, by its `name`.

    The first member's for a missing or unknown name: its check then reports the name, and all other mistakes with it.
    """
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return name if isinstance(name, str) and name in union else next(iter(union))
