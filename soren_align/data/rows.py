"""Rows of a local file, one at a time, each with the number that leads a person back to it.

JSONL is read with the plain json module, line by line: it names the broken line, needs no memory, and takes about
two seconds per gigabyte.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")


class Unreadable(NamedTuple):
    """Stands in for a row that is no object."""

    reason: str


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any] | Unreadable]]:
    """(number, row) of every row of a .jsonl, .json or .parquet file.

    The number is the line's, or the row's, from 1. Blank lines are passed over.
    """
    if file.suffix == ".parquet":
        rows = enumerate(_parquet(file), start=1)
    else:
        rows = _lines(file) if in_lines(file) else enumerate(_array(file), start=1)
    for number, row in rows:
        if not isinstance(row, dict | Unreadable):
            row = Unreadable(f"not an object but {_shown(row)}")
        yield number, row


def _shown(value: Any) -> str:
    try:
        return json.dumps(value, default=str)[:40]
    except RecursionError:
        return "lists within lists"


def in_lines(file: Path) -> bool:
    """Whether the file holds one JSON object per line: .jsonl, and any .json that does not open with a bracket."""
    if file.suffix != ".json":
        return file.suffix == ".jsonl"
    with file.open("rb") as stream:
        first = next((line.lstrip(b"\xef\xbb\xbf").lstrip() for line in stream if line.strip()), b"")
    return not first.startswith(b"[")


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                yield number, Unreadable(f"not JSON: {error.msg} at column {error.colno}")
            except UnicodeDecodeError as error:
                yield number, Unreadable(f"not UTF-8: byte {error.start + 1} of the line")
            except (ValueError, RecursionError) as error:  # a number of 5000 digits, brackets nested too deeply
                yield number, Unreadable(f"not JSON that can be read: {error}")


def _array(file: Path) -> list[Any]:
    try:
        return json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON that can be read: {error}") from None


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1000):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # ValueError: texts that are not UTF-8
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{file}: not a Parquet file that can be read: {said}") from None
