"""The first lines of .jsonl files, checked before torch is loaded: JSON objects, with columns that can be read.

All examples are checked later, by data/split.py; this saves the wait for a file that cannot be read at all.
"""

import json
from pathlib import Path
from typing import Any, get_args

from ..errors import did_you_mean
from .data_paths import STDLIB, data_files
from .data_section import Column

NUM_LINES, NUM_FILES = 50, 3
MAX_LINE = 1 << 20
"""Bytes; a file with a longer line is left to the later checks."""


def first_line_problems(path: str, split: dict[str, Any]) -> list[str]:
    """The problems of the first lines of the .jsonl files at `path`, which exist. split: the raw section."""
    if path == STDLIB:
        return []
    limit = split.get("limit")
    num_lines = min(limit, NUM_LINES) if isinstance(limit, int) else NUM_LINES
    files = [(name, file) for name, file in data_files(path).items() if file.suffix == ".jsonl"]
    for name, file in files[:NUM_FILES]:
        if problems := _problems(name, file, split, num_lines):
            return problems
    return []


def _problems(name: str, file: Path, split: dict[str, Any], num_lines: int) -> list[str]:
    columns: dict[str, None] = {}
    refuses = split.get("bad_examples", "refuse") == "refuse"
    try:
        lines = _lines(file, num_lines)
    except OSError as error:
        return [f"{name}: cannot be read: {error.strerror}"]
    for number, line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if refuses:
                return [f"{name}:{number}: not JSON: {error.msg} at column {error.colno}; a line is one JSON object"]
        except (ValueError, RecursionError):
            return []  # reported in full later
        else:
            columns |= dict.fromkeys(record) if isinstance(record, dict) else {}
    return _column_problems(name, list(columns), split.get("columns"))


def _lines(file: Path, num_lines: int) -> list[tuple[int, bytes]]:
    """(number, line) of the first lines that are not blank, up to the first that is too long."""
    lines: list[tuple[int, bytes]] = []
    with file.open("rb") as stream:
        for number in range(1, num_lines + 1):
            line = stream.readline(MAX_LINE)
            if len(line) == MAX_LINE or not line:
                break
            if line.strip():
                lines.append((number, line))
    return lines


def _column_problems(name: str, columns: list[str], names: Any) -> list[str]:
    """columns: of the first objects. names: the raw `columns`."""
    if not columns:
        return []
    if isinstance(names, dict) and names:
        own = {ours: theirs for ours, theirs in names.items() if ours not in ("role", "content", "weight")}
        missing = [(ours, theirs) for ours, theirs in own.items() if isinstance(theirs, str) and theirs not in columns]
        return [
            f"{name}: columns.{ours} is '{theirs}', and the columns are {', '.join(columns)}"
            f"{did_you_mean(theirs, columns)}"
            for ours, theirs in missing[:1]
        ]
    if set(columns) & set(get_args(Column)):
        return []
    pair = f", such as {{instruction: {columns[0]}, output: {columns[1]}}}" if len(columns) > 1 else ""
    return [
        f"{name}: found the columns {', '.join(columns)}, and none of {', '.join(get_args(Column)[:11])}; other names "
        f"go under `columns`{pair}"
    ]
