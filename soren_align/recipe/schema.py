"""JSON Schema of a recipe, for editors."""

import json
from pathlib import Path
from typing import Any

from ..files import write
from ..shipped import MODELINE
from . import trl_config
from .optimizers import MAPS
from .sections import Recipe

SCHEMA_FILE = "recipe.schema.json"
"""The schema's file beside a recipe. A copied recipe names it by this relative path, which is right on every machine
that the two files are copied to; the path of the installed package is not, and the schema has no address on the web."""
SCHEMA_COMMENT = "Written by `soren-align schema`."
SCHEMA_VERSION = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "dict": "object", "list": "array"}


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe's file; `trainer` lists the keys of the installed TRL."""
    schema = Recipe.model_json_schema()
    properties = schema["properties"]
    properties["extends"] |= {"type": ["string", "array"]}
    properties["trainer"] |= {"properties": _trainer_properties(), "additionalProperties": False}
    soren = schema["$defs"]["SorenSettings"]["properties"]["map"]
    soren["anyOf"] = [*soren.pop("oneOf"), {"enum": list(MAPS)}]
    schema["$defs"]["Data"]["properties"]["streaming"]["anyOf"].append({"type": "boolean"})
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["extends"]}]
    return {"$schema": SCHEMA_VERSION, "$comment": SCHEMA_COMMENT} | schema


def schema_text() -> str:
    """The text of SCHEMA_FILE."""
    return json.dumps(json_schema(), indent=2) + "\n"


def with_modeline(text: str, reference: str = SCHEMA_FILE) -> str:
    """Return a file's text whose first line names the schema `reference`, in the place of an earlier such line."""
    if text.startswith(MODELINE):
        text = text.partition("\n")[2]
    return f"{MODELINE}{reference}\n{text}"


def write_schema(file: Path, text: str) -> bool:
    """Write a schema's text, over an earlier one of ours. Returns False, writing nothing, if the file is another's."""
    if file.is_symlink() or (
        file.exists() and SCHEMA_COMMENT not in file.read_text(encoding="utf-8", errors="replace")
    ):
        return False
    write(file, text)
    return True


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
