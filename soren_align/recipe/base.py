"""Bounded numbers of the recipe's sections, by the bounds of `optimizer_settings`."""

from typing import Annotated, Any

from pydantic import Field

from ..core.document import Section, members, tag_of
from ..core.optimizer_settings import COEFFICIENT, LARGEST, NON_NEGATIVE, POSITIVE, Bounds

__all__ = ["Coefficient", "NonNegative", "Positive", "Section", "members", "tag_of", "within"]


def within(bounds: Bounds) -> Any:
    """The pydantic Field of an int or a float within `bounds`."""
    least, above, most, below = bounds
    if most != LARGEST:
        return Field(ge=least, gt=above, le=most, lt=below)
    return Field(ge=least, gt=above, le=most, allow_inf_nan=False)


Positive = Annotated[float, within(POSITIVE)]
NonNegative = Annotated[float, within(NON_NEGATIVE)]
Coefficient = Annotated[float, within(COEFFICIENT)]
