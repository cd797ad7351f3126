"""The fields that a task's templates read, in the data's .jsonl files.

A field that no question has is an error of lm-eval without a file or line; of one that some questions do not have, its
templates write the text "None", and such a question counts as answered wrong.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..data.records import InvalidRecord, read_records
from ..errors import closest

SETTINGS = ("doc_to_text", "doc_to_choice", "doc_to_target")
SPLITS = ("test_split", "validation_split")
_FIELD = re.compile(r"\{\{-?\s*([A-Za-z_]\w*)\s*-?\}\}")


def missing_field(settings: dict[str, Any], folder: Path) -> str:
    """Return the place of the first question without a field that its task needs, and the remedy; "" if there is none.

    settings: the task file's, with its includes. folder: of its data.
    """
    fields = dict(_fields(settings))
    split = next((str(settings[key]) for key in SPLITS if settings.get(key)), "")
    if not fields or settings.get("process_docs"):  # which may add fields
        return ""
    for file in sorted(folder.rglob("*.jsonl")):
        if split not in file.name:
            continue
        for number, record in read_records(file):
            if isinstance(record, InvalidRecord):
                continue  # reported elsewhere
            for field, setting in fields.items():
                if record.get(field) is None:
                    similar = closest(field, [key for key in record if key not in fields])
                    remedy = f"rename {similar!r} to {field!r}" if similar else "add it, or leave the question out"
                    return (
                        f"{file}:{number}: the question has no {field!r}, which its task reads ({setting}), but"
                        f" {', '.join(map(str, record))[:200]}; {remedy}"
                    )
    return ""


def _fields(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (field, setting) of the fields that are read without a condition or a default.

    A setting without braces is the name of a field, or plain text.
    """
    for setting in SETTINGS:
        template = settings.get(setting)
        if not isinstance(template, str) or "{%" in template:
            continue
        names = _FIELD.findall(template)
        if setting != "doc_to_text" and template.isidentifier():
            names = [template]
        yield from ((name, setting) for name in names)
