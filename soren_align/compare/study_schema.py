"""JSON Schema of a study's file, for editors."""

import json
from typing import Any

from ..recipe import SCHEMA_COMMENT, SCHEMA_VERSION
from .study_sections import HIGHER_IS_BETTER, StudyFile

STUDY_SCHEMA_FILE = "study.schema.json"
"""The schema's file beside a study."""


def study_schema() -> dict[str, Any]:
    """JSON Schema of a study's file. The keys of a recipe in `set` and `space` are not checked."""
    schema = StudyFile.model_json_schema()
    schema["$defs"]["Search"]["properties"]["metric"]["enum"] = _metrics()
    return {"$schema": SCHEMA_VERSION, "$comment": SCHEMA_COMMENT} | schema | {"title": "Study"}


def study_schema_text() -> str:
    """The text of STUDY_SCHEMA_FILE."""
    return json.dumps(study_schema(), indent=2) + "\n"


def _metrics() -> list[str]:
    return list(dict.fromkeys(metric for metrics in HIGHER_IS_BETTER.values() for metric in metrics))
