"""The local files of a split: their records in order, and the hashes that identify them."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..recipe import data_files
from .records import InvalidRecord, has_lines, read_records


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
        return islice((numbered for name in self.files for numbered in self._of_file(name)), limit)

    def samples(self, num_records: int) -> dict[str, list[dict[str, Any] | InvalidRecord]]:
        """The first records of each file that has any."""
        samples = {name: [r for _, r in islice(self._of_file(name), num_records)] for name in self.files}
        return {name: sample for name, sample in samples.items() if sample} or dict(islice(samples.items(), 1))

    def origin(self) -> dict[str, Any]:
        """For run.json: `split`, `sha256`; of several files one of all hashes, and each file's under `files`."""
        hashes = {name: _sha256(file) for name, file in self.files.items()}
        if len(hashes) == 1:
            return {"split": "all", "sha256": next(iter(hashes.values()))}
        files = [{"path": name, "sha256": sha256} for name, sha256 in hashes.items()]
        return {"split": "all", "sha256": hashlib.sha256("".join(hashes.values()).encode()).hexdigest(), "files": files}

    def _of_file(self, name: str) -> Iterator[tuple[str, dict[str, Any] | InvalidRecord]]:
        file = self.files[name]
        separator = ":" if has_lines(file) else " record "
        return ((f"{name}{separator}{number}", record) for number, record in read_records(file))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
