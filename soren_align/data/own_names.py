"""A dataset's own names of columns, keys and roles, replaced by ours."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import UserError, did_you_mean
from .tool_calls import OPTIONS
from .turns import with_known_keys


class Names(NamedTuple):
    """A dataset's own names of columns, of the keys of turns, and of roles."""

    columns: Mapping[str, str] = {}
    """Our column -> the dataset's, whose other columns are then not read."""
    keys: Mapping[str, str] = {}
    """role, content and weight -> the dataset's keys of a turn."""
    roles: Mapping[str, str] = {}
    """The dataset's role -> ours."""

    @classmethod
    def of(cls, columns: Mapping[Any, str], roles: Mapping[str, str]) -> "Names":
        """From a recipe's `columns`, which include the keys of turns, and its `roles`."""
        keys = {key: name for key, name in columns.items() if key in ("role", "content", "weight")}
        return cls({key: name for key, name in columns.items() if key not in keys}, keys, roles)

    def known(self, example: dict[str, Any]) -> dict[str, Any]:
        """The example with our names, for a Reader. Values that are no turns are unchanged."""
        if self.columns:
            example = {ours: example.get(theirs) for ours, theirs in self.columns.items()}
        return {
            column: with_known_keys(value, self.keys, self.roles)
            if isinstance(value, list | dict) and column not in OPTIONS
            else value
            for column, value in example.items()
        }

    def refuse_missing(self, columns: Mapping[str, Any], place: str) -> None:
        """Raise UserError if the dataset has none of a name's column. columns: the dataset's."""
        for ours, theirs in self.columns.items():
            if theirs not in columns:
                hint = did_you_mean(theirs, columns)
                raise UserError(
                    f"{place}: columns.{ours} is '{theirs}', and the columns are {', '.join(columns)}{hint}"
                )
