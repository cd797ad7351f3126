"""JSON Schema of a study's file, for editors."""

import json
from typing import Any

from ..recipe import SCHEMA_COMMENT, SCHEMA_VERSION
from .study_sections import METRICS, StudyFile

STUDY_SCHEMA_FILE = "study.schema.json"
"""The schema's file beside a study."""


def study_schema() -> dict[str, Any]:
    """JSON Schema of a study's file. The keys of a recipe in `set` and `space` are not checked."""
    schema = StudyFile.model_json_schema()
    schema["$defs"]["Search"]["properties"]["metric"]["enum"] = list(METRICS)
    return {"$schema": SCHEMA_VERSION, "$comment": SCHEMA_COMMENT} | schema | {"title": "Study"}


def study_schema_text() -> str:
    """The text of STUDY_SCHEMA_FILE."""
    return json.dumps(study_schema(), indent=2) + "\n"
