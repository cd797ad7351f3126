"""Records of a local file, one at a time, each with its number in the file.

JSONL is read with the plain json module, line by line: it names an invalid line, needs no memory, and takes about
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


class InvalidRecord(NamedTuple):
    """In place of a record that is no JSON object."""

    reason: str


def read_records(file: Path) -> Iterator[tuple[int, dict[str, Any] | InvalidRecord]]:
    """(number, record) of every record of a .jsonl, .json or .parquet file.

    The number is that of the line, or of the record, from 1. Blank lines are skipped. Raises UserError if the file as a
    whole cannot be parsed.
    """
    if file.suffix == ".parquet":
        records = enumerate(_parquet(file), start=1)
    else:
        records = _lines(file) if has_lines(file) else enumerate(_array(file), start=1)
    for number, record in records:
        if not isinstance(record, dict | InvalidRecord):
            record = InvalidRecord(f"not an object but {_excerpt(record)}")
        yield number, record


def has_lines(file: Path) -> bool:
    """Whether the file has one JSON object per line: .jsonl, and any .json that does not start with a bracket."""
    if file.suffix != ".json":
        return file.suffix == ".jsonl"
    with file.open("rb") as stream:
        first = next((line.lstrip(b"\xef\xbb\xbf").lstrip() for line in stream if line.strip()), b"")
    return not first.startswith(b"[")


def _excerpt(value: Any) -> str:
    try:
        return json.dumps(value, default=str)[:40]
    except RecursionError:
        return "lists within lists"


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                yield number, InvalidRecord(f"not JSON: {error.msg} at column {error.colno}")
            except UnicodeDecodeError as error:
                yield number, InvalidRecord(f"not UTF-8: byte {error.start + 1} of the line")
            except (ValueError, RecursionError) as error:  # a number of 5000 digits, brackets nested too deeply
                yield number, InvalidRecord(f"not JSON that can be read: {error}")


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
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # ValueError: text that is not UTF-8
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{file}: not a Parquet file that can be read: {reason}") from None
