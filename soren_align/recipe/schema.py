"""JSON Schema of a recipe, for editors."""

from typing import Any

from . import trl_config
from .optimizers import MAPS
from .sections import Recipe

_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "dict": "object", "list": "array"}


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe's file; `trainer` lists the keys of the installed TRL."""
    schema = Recipe.model_json_schema()
    properties = schema["properties"]
    properties["extends"] |= {"type": ["string", "array"]}
    properties["trainer"] |= {"properties": _trainer_properties(), "additionalProperties": False}
    soren = schema["$defs"]["SorenSettings"]["properties"]["map"]
    soren["anyOf"] = [*soren.pop("oneOf"), {"enum": list(MAPS)}]
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["extends"]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _trainer_properties() -> dict[str, Any]:
    """The schema of each key of `trainer`."""
    properties: dict[str, Any] = {}
    for task in trl_config.CLASSES:
        for field in trl_config.fields(task).values():
            if field.name in trl_config.ELSEWHERE:
                continue
            entry: dict[str, Any] = {"description": field.help}
            if field.choices:
                entry["enum"] = [*field.choices, *([None] if "None" in field.types else [])]
            elif field.types <= _TYPES.keys() | {"None"}:
                entry["type"] = sorted(_TYPES.get(t, "null") for t in field.types)
            properties[field.name] = entry
    return properties
