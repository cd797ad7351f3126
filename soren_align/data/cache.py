"""Cached datasets and tokenizers: made once, and read again only if no byte has changed.

Examples, their tokens and trained tokenizers each lie in a folder, named by a hash of all that
determines them, which plan, runs and resumed runs share. A training cannot notice a flipped bit or
a lost page in such a file: it would train another model. So an entry is written as a checkpoint is
(temporary folder, fsync, rename), with the digests of its files, which are checked at each opening:
2 s per GB. An entry unused for a month is removed, and the oldest where all have more than 50 GB.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, disable_caching, enable_caching, is_caching_enabled
from datasets.arrow_writer import ArrowWriter
from datasets.fingerprint import Hasher
from datasets.table import MemoryMappedTable

from ..core.errors import UserError
from ..core.files import CHANGED, contents, read_json, rename_durably, write
from ..core.text import print_labelled, stderr_console

MAX_BYTES = 50 * 10**9
MAX_AGE_SECONDS = 30 * 86400
IN_USE_SECONDS = 2 * 86400
"""An entry used more recently is never removed: a run may read it."""
BATCH_SIZE = 1000
"""Examples that are written together."""
_DATA, _DIGESTS = "data.arrow", "digests.json"


def cached(
    root: Path,
    key: str,
    features: Features,
    batches: Callable[[], Iterable[dict[str, list[Any]] | pa.Table]],
) -> Dataset:
    """The dataset of `batches`, memory-mapped from its entry below `root`: written first if there
    is none, or a damaged one.

    key: of `cache_key`, with all that determines the batches, which are columns of examples, or
    tables.
    """
    # Whoever comes first writes; the others, and all later runs, map the same file.
    if not is_intact(root / key):
        with (
            written_whole(root / key) as part,
            ArrowWriter(path=str(part / _DATA), features=features) as writer,
        ):
            for columns in batches():
                if isinstance(columns, pa.Table):
                    writer.write_table(columns)
                else:
                    writer.write_batch(columns)
            writer.finalize()
        prune(root)
    return Dataset(MemoryMappedTable.from_file(str(root / key / _DATA)), fingerprint=key)


def cache_key(*parts: Any) -> str:
    """A hash of `parts` and of the source of this package's rules for examples, which are then
    validated again.
    """
    # By the source of all of this room: a fix of a rule must not be hidden by examples that were
    # made before it. A changed comment makes the entries again too, which is cheap beside the
    # opposite mistake.
    rules = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(repr(parts).encode() + rules).hexdigest()[:32]


@contextmanager
def written_whole(entry: Path) -> Iterator[Path]:
    """Yield an empty folder, which becomes the entry when the block has filled it.

    If another process has written the entry in the meantime, that one stays.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    # Beside the entry, because a rename is atomic only within one file system.
    part = Path(tempfile.mkdtemp(prefix="part-", dir=entry.parent))
    try:
        yield part
        files = [file for file in part.rglob("*") if file.is_file()]
        # Digests are taken before the rename: an entry that exists under its name is whole and can
        # be verified.
        names = [file.relative_to(part).as_posix() for file in files]
        write(part / _DIGESTS, json.dumps(dict(zip(names, contents(files), strict=True))))
        rename_durably(part, entry)
    except OSError as error:
        # Another process was first, with the same content.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def is_intact(entry: Path) -> bool:
    """Whether the entry is there, as it was written. One that is damaged is removed, and a notice
    printed.
    """
    if not entry.is_dir():
        return False
    try:
        digests = read_json(entry / _DIGESTS)
        equal = contents(entry / name for name in digests) == [*digests.values()]
    except (UserError, FileNotFoundError, AttributeError, TypeError):  # no digests, no file
        equal = False
    if equal:
        os.utime(entry)  # for `prune`
        return True
    notice = f"{entry}: {CHANGED}; this cache entry is removed and made again"
    print_labelled(stderr_console(), "notice", notice)
    shutil.rmtree(entry)
    return False


@contextmanager
def uncached() -> Iterator[None]:
    """A context in which `datasets` writes what it derives from a dataset into a temporary folder
    of this process, and reads no earlier file.
    """
    was_enabled = is_caching_enabled()
    disable_caching()
    try:
        yield
    finally:
        if was_enabled:
            enable_caching()


@contextmanager
def verified_values(dataset: Dataset, key: tuple[Any, ...], ranks: Any) -> Iterator[None]:
    """A context in which TRL reads the values that it caches beside a dataset under `key`, or makes
    them: a damaged file is removed before, by every rank; the first rank records the digest after.
    Collective.
    """
    # The first rank writes. Without a cache the others have the tokens in folders of their own.
    folder = ranks.broadcast(Path(dataset._get_cache_file_path("")).parent)
    vars(dataset)["_get_cache_file_path"] = partial(_cache_file, folder)
    # TRL's own file name, computed as TRL does.
    file = Path(dataset._get_cache_file_path(Hasher.hash((dataset._fingerprint, *key))))
    digest = file.with_suffix(".json")
    try:
        equal = not file.exists() or [read_json(digest)] == contents([file])
    except (UserError, FileNotFoundError):  # a damaged digest, or none
        equal = False
    if not equal:
        print_labelled(stderr_console(), "notice", f"{file}: {CHANGED}; it is made again")
        file.unlink(missing_ok=True)
    yield
    if ranks.is_first and file.exists():
        write(digest, json.dumps(contents([file])[0]))


def _cache_file(folder: Path, fingerprint: str) -> str:
    """`Dataset._get_cache_file_path`, in this folder."""
    return str(folder / f"cache-{fingerprint}.arrow")


def prune(root: Path) -> None:
    """Remove the entries unused for MAX_AGE_SECONDS, and the least recently used ones beyond
    MAX_BYTES.
    """
    now, total = time.time(), 0
    entries = [(f.stat().st_mtime, f) for f in root.iterdir() if f.is_dir() and not f.is_symlink()]
    # Newest first: the sum is that of the entries that stay.
    for used, entry in sorted(entries, reverse=True):
        total += sum(file.stat().st_size for file in entry.iterdir() if file.is_file())
        age = now - used
        if age > IN_USE_SECONDS and (age > MAX_AGE_SECONDS or total > MAX_BYTES):
            shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def folder_errors(root: Path, content: str, remedy: str) -> Iterator[None]:
    """Turn an OSError of the cache folder `root` into a UserError. content: what is cached, for the
    message.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{root}: {content} cannot be cached in this folder: {reason}; free space, or {remedy}"
        ) from None
