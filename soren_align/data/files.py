"""Read the records of a dataset from local files, one at a time, each with its place.

JSONL is read with the plain json module, line by line: it names an invalid line, needs no memory,
and takes about two seconds per gigabyte. Compressed files are read without a decompressed copy.
"""

import ast
import csv
import gzip
import hashlib
import io
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from ..core.errors import UserError
from ..core.files import CHUNK_BYTES, chunk_digests, chunks_of, file_sha256, is_text
from ..recipe import STDLIB, csv_columns, data_files, data_suffix, refuse_wide_characters
from .arrow import without_filled_keys

MAX_FIELD = 1 << 28
"""Characters of a field of a .csv file; Python's own limit is 131,072."""
MAX_HASHED = 1 << 30
"""Bytes of streamed files that are hashed at each start: a second of one core."""
_TO_UTF_8 = "; if the file is in Latin-1, convert the file: iconv -f LATIN1 -t UTF-8"
VALIDATION_SHARE = 0.05
"""The share of the standard library's examples in `validation`."""
_LIBRARY_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Names of folders."""
_TOPICS = "pydoc_data/topics.py"


class InvalidRecord(NamedTuple):
    """Stands for a record that is no JSON object."""

    reason: str


def read_records(file: Path) -> Iterator[tuple[int, dict[str, Any] | InvalidRecord]]:
    """(number, record) of every record of a file of one of recipe.data_files.SUFFIXES.

    The number is that of the line, or of the record, from 1. Blank lines are skipped. Raises
    UserError if the file as a whole cannot be parsed.
    """
    readers = {".parquet": _parquet, ".csv": _csv, ".txt": _lines, ".jsonl": _lines}
    # As a whole: each line of a UTF-16 file would be an invalid record of its own.
    if data_suffix(file) != ".parquet":
        with _open(file) as stream:
            refuse_wide_characters(str(file), stream.read(4))
    reader = readers.get(data_suffix(file)) or (_lines if has_lines(file) else _array)
    for number, record in reader(file):
        if not isinstance(record, dict | InvalidRecord):
            try:
                excerpt = json.dumps(record, default=str)[:40]
            except RecursionError:
                excerpt = "lists within lists"
            record = InvalidRecord(f"is {excerpt}, not a JSON object")
        yield number, record


def has_lines(file: Path) -> bool:
    """Whether a record's number is that of a line: of all but .parquet files and .json files that
    are one array.
    """
    if data_suffix(file) != ".json":
        return data_suffix(file) != ".parquet"
    with _open(file) as stream:
        first = next((line for line in stream if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    return not first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


@contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    """A context with the file's content, decompressed. Raises UserError where it is damaged."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            yield cast(BinaryIO, stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"{file}: cannot be decompressed: {error}"
        raise UserError(f"{problem}; compress the data again") from None


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    """A JSON value, or a text, per line."""
    is_plain = data_suffix(file) == ".txt"
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                # utf-8-sig: editors on Windows begin a file with a byte order mark.
                text = line.decode("utf-8-sig")
                if (text if is_plain else line).strip():
                    yield number, {"text": text.rstrip("\r\n")} if is_plain else json.loads(text)
            except json.JSONDecodeError as error:
                yield number, InvalidRecord(f"is not JSON: {error.msg} at column {error.colno}")
            except UnicodeDecodeError as error:
                finding = f"is not UTF-8 at byte {error.start + 1} of the line"
                yield number, InvalidRecord(finding + _TO_UTF_8)
            # Such as a number of 5,000 digits, or brackets that are nested too deeply.
            except (ValueError, RecursionError) as error:
                yield number, InvalidRecord(f"is JSON that cannot be read: {error}")


def _csv(file: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(MAX_FIELD)
    # surrogateescape: a byte that is no UTF-8 makes one invalid record, not an unreadable file.
    with (
        _open(file) as content,
        io.TextIOWrapper(content, "utf-8-sig", errors="surrogateescape", newline="") as stream,
    ):
        names, delimiter = csv_columns(str(file), stream.readline())
        rows, number = csv.reader(stream, delimiter=delimiter, strict=True), 2
        try:
            for row in rows:
                if row and len(row) != len(names):
                    finding = f"has {len(row)} fields, but the file has {len(names)} columns"
                    yield number, InvalidRecord(finding)
                elif row and not is_text("".join(row)):
                    yield number, InvalidRecord(f"is not UTF-8{_TO_UTF_8}")
                elif row:
                    yield number, dict(zip(names, row, strict=True))
                number = rows.line_num + 2
        except csv.Error as error:
            problem = f"{file}:{number}: is no valid CSV: {error}"
            raise UserError(f"{problem}; correct this line") from None


def _array(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        with _open(file) as stream:
            yield from enumerate(json.load(stream), start=1)
    except json.JSONDecodeError as error:
        problem = f"{file}:{error.lineno}: is not JSON: {error.msg} at column {error.colno}"
        raise UserError(f"{problem}; correct this line") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is JSON that cannot be read: {error}; correct the file") from None


def _parquet(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with pq.ParquetFile(file) as table:
            batches = (batch.to_pylist() for batch in table.iter_batches(batch_size=1000))
            yield from enumerate(map(without_filled_keys, chain.from_iterable(batches)), start=1)
    # ValueError: text that is not UTF-8
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        problem = f"{file}: is no valid Parquet file: {reason}"
        raise UserError(f"{problem}; write the file again") from None


@dataclass(frozen=True)
class LocalFiles:
    """The files that a path names, by their names for messages."""

    files: dict[str, Path]
    first_stats: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, compare=False)
    """Of `refuse_changed`, by name: size, time of modification and inode at its first call."""

    @classmethod
    def at(cls, path: str) -> "LocalFiles":
        """Return the files at a path.
        Raises UserError if there is none, or one that cannot be read.
        """
        files = data_files(path)
        for name, file in files.items():
            if not os.access(file, os.R_OK):
                raise UserError(
                    f"{name}: you have no permission to read this file; change its permissions"
                )
        return cls(files)

    def refuse_changed(self) -> None:
        """Raise UserError if a file is another one than at the first call."""
        for name, file in self.files.items():
            stat = file.stat()
            now = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
            if self.first_stats.setdefault(name, now) != now:
                raise UserError(
                    f"{name}: the file has changed while this command read it; restore the file, "
                    "and rerun the same command, which resumes if the content is the same"
                )

    def samples(
        self, num_records: int
    ) -> Iterator[tuple[str, list[dict[str, Any] | InvalidRecord]]]:
        """(name, first records) of each file that has any; of the first file if none has."""
        samples = (
            (name, [r for _, r in islice(self.of_file(name), num_records)]) for name in self.files
        )
        filled = ((name, sample) for name, sample in samples if sample)
        yield next(filled, (next(iter(self.files)), []))
        yield from filled

    def origin(self) -> dict[str, Any]:
        """Return, for run.json, `split`, `sha256`; of several files one of all hashes, and each
        file's under `files`.
        """
        hashes = {name: file_sha256(file) for name, file in self.files.items()}
        if len(hashes) == 1:
            return {"split": "all", "sha256": next(iter(hashes.values()))}
        files = [{"path": name, "sha256": sha256} for name, sha256 in hashes.items()]
        return {
            "split": "all",
            "sha256": hashlib.sha256("".join(hashes.values()).encode()).hexdigest(),
            "files": files,
        }

    def sampled_origin(self) -> dict[str, Any]:
        """Return `origin`, reading at most MAX_HASHED bytes: `tree_sha256` of the names, the sizes
        and the content.

        Of larger data it is a hash of evenly spaced chunks, the first and the last among them, and
        of the files' times of modification, which `sampled` states.
        """
        self.refuse_changed()  # what is hashed is what each pass reads
        # A stream may be terabytes, which no start should read: a change in place that keeps size,
        # times and sampled chunks is not noticed, and run.json records that it was sampled.
        stats = {name: file.stat() for name, file in self.files.items()}
        chunks = [
            chunk
            for name, stat in stats.items()
            for chunk in chunks_of(self.files[name], stat.st_size)
        ]
        parts: list[Any] = [[(name, stat.st_size) for name, stat in stats.items()]]
        num_bytes, most = sum(stat.st_size for stat in stats.values()), MAX_HASHED // CHUNK_BYTES
        if is_sampled := num_bytes > MAX_HASHED:
            chunks = [chunks[i * (len(chunks) - 1) // (most - 1)] for i in range(most)]
            parts.append([stat.st_mtime_ns for stat in stats.values()])
        parts.append([digest.hex() for digest in chunk_digests(chunks)])
        return {
            "split": "all",
            "num_files": len(stats),
            "num_bytes": num_bytes,
            "tree_sha256": hashlib.sha256(repr(parts).encode()).hexdigest(),
            "sampled": is_sampled,
        }

    def of_file(self, name: str) -> Iterator[tuple[str, dict[str, Any] | InvalidRecord]]:
        """Return an iterator over (place, record) of a file's records."""
        file = self.files[name]
        separator = ":" if has_lines(file) else " record "
        return ((f"{name}{separator}{number}", record) for number, record in read_records(file))


class LocalReader:
    """The records of local files from a position: [number of a file, number of its records read];
    None for the first.

    The records before it are read again, those of one file at most.
    """

    def __init__(self, local: LocalFiles, position: Any = None):
        local.refuse_changed()  # at the start of each pass
        self.local = local
        self.position: list[int] = list(position or (0, 0))
        """The position after the record that was returned last; plain data."""

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any] | InvalidRecord]]:
        names = list(self.local.files)
        while self.position[0] < len(names):
            number, num_read = self.position
            # Read again from the beginning of the file: a compressed one cannot be entered in its
            # middle.
            for numbered in islice(self.local.of_file(names[number]), num_read, None):
                num_read += 1
                self.position = [number, num_read]
                yield numbered
            self.position = [number + 1, 0]


class Entry(NamedTuple):
    """An example: where it is, and its content's hash."""

    name: str
    """`json/decoder.py`, or `pydoc_data/topics.py:assert`."""
    file: Path
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class StandardLibrary(LocalFiles):
    """`python:stdlib`: the library of the Python that runs this, as texts: a dataset that every
    machine has.

    An example is the source of one module, or one topic of `help`, which is English
    (pydoc_data/topics.py). Tests, installed packages, blank modules and those that are not UTF-8
    are left out. A hash of an example's name chooses its split, so that a module stays in its split
    in every version of Python, and modules of one package can be in both. A module of `validation`
    with the content of one in `train` is left out; modules that are similar, such as the code pages
    of `encodings`, are not.
    """

    split: str
    entries: tuple[Entry, ...]

    @classmethod
    def of_split(cls, split: str) -> "StandardLibrary":
        """Return the examples of a split.
        Raises UserError if Python has no source of its standard library here.
        """
        root = Path(sysconfig.get_path("stdlib"))
        chosen = entries(root)["train" if split == "train" else "validation"]
        if not chosen:
            remedy = "use another Python"
            raise UserError(
                f"{STDLIB}: this Python has no source files of its standard library in {root};"
                f" {remedy}"
            )
        return cls({f"{STDLIB}/{entry.name}": entry.file for entry in chosen}, split, chosen)

    def origin(self) -> dict[str, Any]:
        """Return, for run.json, `split`, `sha256` of names and contents, the Python, and the number
        of modules and bytes.
        """
        contents = [(entry.name, entry.sha256) for entry in self.entries]
        return {
            "split": self.split,
            "sha256": hashlib.sha256(repr(contents).encode()).hexdigest(),
            "python": platform.python_version(),
            "num_modules": sum(not entry.name.startswith(_TOPICS) for entry in self.entries),
            "num_bytes": sum(entry.num_bytes for entry in self.entries),
        }

    def sampled_origin(self) -> dict[str, Any]:
        """Return `origin`, since the library is small."""
        return self.origin()

    def of_file(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (place, record) of one example."""
        _, _, topic = name.partition(f"{_TOPICS}:")
        file = self.files[name]
        yield name, {"text": topics(file)[topic] if topic else file.read_text(encoding="utf-8")}


def is_validation(name: str) -> bool:
    """Whether the example with this name is in the split `validation`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < VALIDATION_SHARE * 2**64


@cache
def entries(root: Path) -> dict[str, tuple[Entry, ...]]:
    """The examples of the standard library at `root` by split, sorted by name."""
    texts: list[tuple[str, Path, str]] = []
    for file in root.rglob("*.py"):
        name = file.relative_to(root)
        if _LIBRARY_LEFT_OUT.isdisjoint(name.parts[:-1]) and file.is_file():
            try:
                text = file.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if name.as_posix() == _TOPICS:
                texts += (
                    (f"{_TOPICS}:{topic}", file, content) for topic, content in topics(file).items()
                )
            else:
                texts.append((name.as_posix(), file, text))
    # Sorted, because the order of files depends on the file system.
    contents = ((name, file, text.encode()) for name, file, text in sorted(texts) if text.strip())
    examples = [
        Entry(name, file, hashlib.sha256(text).hexdigest(), len(text))
        for name, file, text in contents
    ]
    train = tuple(entry for entry in examples if not is_validation(entry.name))
    trained = {entry.sha256 for entry in train}
    validation = (
        entry for entry in examples if is_validation(entry.name) and entry.sha256 not in trained
    )
    return {"train": train, "validation": tuple(validation)}


@cache
def topics(file: Path) -> dict[str, str]:
    """The topics of `help` by name; read from the source, without running it."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return ast.literal_eval(statement.value)
    return {}
