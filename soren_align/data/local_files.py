"""The local files of a split: their records in order, and the hashes that identify them."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import CHUNK_BYTES, chunk_digests, chunks_of
from ..recipe import data_files
from .records import InvalidRecord, has_lines, read_records

MAX_HASHED = 1 << 30
"""Bytes of streamed files that are hashed at each start: a second of one core."""


@dataclass(frozen=True)
class LocalFiles:
    """The files that a path names, by their names for messages."""

    files: dict[str, Path]

    @classmethod
    def at(cls, path: str) -> "LocalFiles":
        """Raises UserError if there is none, or one that cannot be read."""
        files = data_files(path)
        for name, file in files.items():
            if not os.access(file, os.R_OK):
                raise UserError(f"{name}: no permission to read it; change its permissions")
        return cls(files)

    def numbered(self, limit: int | None) -> Iterator[tuple[str, dict[str, Any] | InvalidRecord]]:
        """(place, record) of the first `limit` records of all files."""
        return islice((numbered for name in self.files for numbered in self.of_file(name)), limit)

    def samples(self, num_records: int) -> Iterator[tuple[str, list[dict[str, Any] | InvalidRecord]]]:
        """(name, first records) of each file that has any; of the first file if none has."""
        samples = ((name, [r for _, r in islice(self.of_file(name), num_records)]) for name in self.files)
        filled = ((name, sample) for name, sample in samples if sample)
        yield next(filled, (next(iter(self.files)), []))
        yield from filled

    def origin(self) -> dict[str, Any]:
        """For run.json: `split`, `sha256`; of several files one of all hashes, and each file's under `files`."""
        hashes = {name: _sha256(file) for name, file in self.files.items()}
        if len(hashes) == 1:
            return {"split": "all", "sha256": next(iter(hashes.values()))}
        files = [{"path": name, "sha256": sha256} for name, sha256 in hashes.items()]
        return {"split": "all", "sha256": hashlib.sha256("".join(hashes.values()).encode()).hexdigest(), "files": files}

    def sampled_origin(self) -> dict[str, Any]:
        """As `origin`, reading at most MAX_HASHED bytes: `tree_sha256` of the names, the sizes and the content.

        Of larger data it is a hash of evenly spaced chunks, the first and the last among them, and of the files' times
        of modification, which `sampled` states.
        """
        stats = {name: file.stat() for name, file in self.files.items()}
        chunks = [chunk for name, stat in stats.items() for chunk in chunks_of(self.files[name], stat.st_size)]
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
        """(place, record) of a file's records."""
        file = self.files[name]
        separator = ":" if has_lines(file) else " record "
        return ((f"{name}{separator}{number}", record) for number, record in read_records(file))


class LocalReader:
    """The records of local files from a position: [number of a file, number of its records read]; None for the first.

    The records before it are read again, those of one file at most.
    """

    def __init__(self, local: LocalFiles, position: Any = None):
        self.local = local
        self.position: list[int] = list(position or (0, 0))
        """After the record that was returned last; plain data."""

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any] | InvalidRecord]]:
        names = list(self.local.files)
        while self.position[0] < len(names):
            number, num_read = self.position
            for numbered in islice(self.local.of_file(names[number]), num_read, None):
                num_read += 1
                self.position = [number, num_read]
                yield numbered
            self.position = [number + 1, 0]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
