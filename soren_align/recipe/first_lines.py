"""The first lines of .jsonl files, checked before torch is loaded: JSON objects, with columns that can be read.

All examples are checked later, by data/split.py; this saves the wait for a file that cannot be read at all.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from ..errors import did_you_mean
from .data_paths import STDLIB, data_files
from .data_section import Column

NUM_LINES, NUM_FILES = 50, 3
MAX_LINE = 1 << 20
"""Bytes; a file with a longer line is left to the later checks."""
REQUIRED_COLUMNS: dict[str, str] = {
    "sft": "'messages': a list of {role, content} turns (or 'conversations' as of ShareGPT, 'instruction' and "
    "'output', 'prompt' and 'completion', 'text'); other names go under `columns`",
    "dpo": "'chosen' and 'rejected': two whole conversations, lists of {role, content} turns (or two answers beside "
    "their 'prompt' or 'instruction'); other names go under `columns`",
}
OPTIONS = ("tools", "chat_template_kwargs")
"""Columns of an example beside its turns: the tools that its template lists, and other variables of the template."""


def first_line_problems(path: str, split: dict[str, Any], task: str | None) -> list[str]:
    """The problems of the first lines of the .jsonl files at `path`, which exist. split, task: of the raw recipe."""
    if path == STDLIB:
        return []
    limit = split.get("limit")
    num_lines = min(limit, NUM_LINES) if isinstance(limit, int) else NUM_LINES
    files = [(name, file) for name, file in data_files(path).items() if file.suffix == ".jsonl"]
    for name, file in files[:NUM_FILES]:
        try:
            lines = _lines(file, num_lines)
        except OSError as error:
            return [f"{name}: cannot be read: {error.strerror}"]
        if problems := _problems(name, lines, split, task):
            return problems
    return []


def _problems(name: str, lines: list[tuple[int, bytes]], split: dict[str, Any], task: str | None) -> list[str]:
    examples = []
    for number, line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if split.get("bad_examples", "refuse") == "refuse":
                return [f"{name}:{number}: not JSON: {error.msg} at column {error.colno}; a line is one JSON object"]
        except (ValueError, RecursionError):
            return []  # reported in full later
        else:
            examples += [record] if isinstance(record, dict) and record else []
    columns = {column: None for example in examples for column in example}
    names = split.get("columns")
    if isinstance(names, dict) and names:
        return _names_problems(name, columns, names) if columns else []
    if not columns or task not in REQUIRED_COLUMNS or columns.keys() & set(get_args(Column)):
        return []
    hint = example_of_names(examples[0], task)
    return [f"{name}: found the columns {', '.join(columns)}; {task} needs {REQUIRED_COLUMNS[task]}{hint}"]


def _names_problems(name: str, columns: dict[str, None], names: dict[str, Any]) -> list[str]:
    """The first of `names`, ours -> the dataset's, that is no column. Keys of turns are not columns."""
    own = {ours: theirs for ours, theirs in names.items() if ours not in ("role", "content", "weight")}
    missing = [(ours, theirs) for ours, theirs in own.items() if isinstance(theirs, str) and theirs not in columns]
    return [
        f"{name}: columns.{ours} is '{theirs}', and the columns are {', '.join(columns)}{did_you_mean(theirs, columns)}"
        for ours, theirs in missing[:1]
    ]


def columns_text(names: Mapping[str, str]) -> str:
    """The value of `columns` in YAML. names: ours -> the dataset's."""
    return f"{{{', '.join(f'{ours}: {theirs}' for ours, theirs in names.items())}}}"


def example_of_names(example: dict[str, Any], task: str) -> str:
    """A proposal for `columns`, where an SFT dataset has a column of turns, or two of text."""
    if task != "sft":
        return ""
    lists = {column: value for column, value in example.items() if isinstance(value, list) and column not in OPTIONS}
    turns = [column for column, value in lists.items() if value and isinstance(value[0], dict)]
    if turns:
        return f", such as {columns_text({'messages': turns[0]})}"
    texts = {column: len(value) for column, value in example.items() if isinstance(value, str)}
    longest = sorted(texts, key=lambda column: -texts[column])[:2]  # an id is shorter
    pair = [column for column in texts if column in longest]
    return f", such as {columns_text({'instruction': pair[0], 'output': pair[1]})}" if len(pair) == 2 else ""


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
