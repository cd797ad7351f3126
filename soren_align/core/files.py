"""Read files of limited size, write files atomically and durably, and identify them by content."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import TypedDict

from .errors import REMEDIES, UserError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from pydantic import TypeAdapter

T = TypeVar("T")

_package = Path(__file__).resolve().parent.parent
ROOT = _package / "_shipped" if (_package / "_shipped").is_dir() else _package.parent
"""The folder of the shipped folders (core/shipped.py): inside the package in a wheel, beside it in
a checkout."""
PREFIX = "shipped:"

MAX_YAML_BYTES = 1 << 20
MAX_JSON_BYTES = 1 << 26
CORRECT = "correct the file, or restore a copy"
"""The remedy for a file that is no valid JSON: the user's own file, or one that this tool wrote."""
CHANGED = (
    "the content differs from what was saved (because of an edit, a bad copy or a defect of the"
    " disk)"
)
CHUNK_BYTES = 1 << 24
"""Bytes of a file that are hashed at once: part of the definition of `Content`."""
_BLOCK_BYTES = 1 << 18
"""Bytes of one read: it is hashed while it is in the CPU's cache, and bounds the memory of a
thread."""
_MAX_THREADS = 4
"""That hash in one process: SHA-256 of 4 threads is faster than a disk."""


def local_path(text: str | Path) -> Path:
    """Return the path that `text` names, `~` expanded.
    Its exists(), is_file() and is_dir() then raise nothing.

    Raises UserError if it cannot be a path: an unknown user's home, a name too long, a NUL, a
    forbidden folder.
    """
    try:
        # stat raises here, once, what exists() and is_file() of later code would raise somewhere
        # without the reason.
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        raise UserError(
            f"{text}: cannot be used as a path: {error.strerror}; name another path"
        ) from None
    except (ValueError, RuntimeError) as error:  # a NUL, half of a surrogate pair; no home
        raise UserError(f"{text}: cannot be used as a path: {error}; name another path") from None
    return path


def resolve_path(path: str) -> Path:
    """Return the file or folder for a path in a recipe: `shipped:...` in the shipped folders, so
    that a recipe works in any folder; others from the working directory.

    Raises UserError if it cannot be a path.
    """
    return local_path(ROOT / path.removeprefix(PREFIX) if path.startswith(PREFIX) else path)


def default_cache_folder() -> Path:
    """Return $SOREN_ALIGN_CACHE, or else `soren-align` in the user's cache folder."""
    own = os.environ.get("SOREN_ALIGN_CACHE")
    return Path(
        own or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "soren-align"
    ).expanduser()


def is_component(name: Any) -> bool:
    """Whether `name`, read from a file, is the name of one entry of a folder, and not a path to
    another folder.
    """
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or not name.isprintable()
        or {"/", "\\"} & set(name)
    ):
        return False
    # 255, less the suffixes of `write` and .jsonl
    return len(name.encode("utf-8", "surrogatepass")) <= 200


def refuse_special_files(folder: Path) -> None:
    """Raise UserError if a folder holds a pipe, a socket or a device: reading one may never end."""
    for entry in folder.iterdir():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise UserError(f"{entry}: is a pipe, a socket or a device; remove it from the folder")


def read_text(path: str | Path, max_bytes: int = MAX_YAML_BYTES) -> str:
    """Return the text of a UTF-8 file.
    Raises UserError if it is too large, not a regular file or cannot be read.
    """
    file = local_path(path)
    try:
        if file.exists() and not file.is_file():
            raise UserError(f"{path}: is not a regular file; name a file")
        with file.open("rb") as stream:
            # One byte more than allowed shows that a file is too large, without reading all of it.
            content = stream.read(max_bytes + 1)
    except OSError as error:
        # Of a failing disk or too many open files, permissions are not the cause: each has its own
        # remedy.
        of_machine = error.errno in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE)
        remedy = REMEDIES[error.errno or 0] if of_machine else "check the path and its permissions"
        raise UserError(f"{path}: cannot be read: {error.strerror}; {remedy}") from None
    if len(content) > max_bytes:
        remedy = "shorten this file"
        raise UserError(
            f"{path}: is larger than {max_bytes:,} bytes, the limit for this kind of file; {remedy}"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        remedy = "convert the file to UTF-8, or name another file"
        raise UserError(f"{path}:1 is not a text file in UTF-8; {remedy}") from None


def read_json(path: str | Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return a JSON file as plain data. Raises UserError if it is damaged or too large."""
    return parse_json(read_text(path, max_bytes), str(path))


def parse_json(text: str, name: str) -> Any:
    """Return JSON text as plain data. Raises UserError, with `name` for the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{name}:{error.lineno} cannot be read as JSON: {error.msg}; {CORRECT}"
        ) from None
    except (ValueError, RecursionError) as error:  # too many digits, too many levels
        raise UserError(f"{name}: cannot be read as JSON: {error}; {CORRECT}") from None


def read_checked(file: Path, kind: "TypeAdapter[Any]", remedy: str, max_bytes: int) -> Any:
    """Return the content of a JSON file of a known type.

    Raises UserError if it is missing, a link, damaged, or of another type.
    """
    from pydantic import ValidationError

    from .text import dotted

    if file.is_symlink() or not file.is_file():
        raise UserError(f"{file}: is missing; {remedy}")
    try:
        content = read_json(file, max_bytes=max_bytes)
        # Strict: a text in place of a number would fail later, in the middle of a table.
        kind.validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(
            f"{file} {dotted(first['loc'])[:80]}: {first['msg'][:120]}; {remedy}"
        ) from None
    return content


def is_text(value: str) -> bool:
    """Whether `value` can be encoded in UTF-8: half of a surrogate pair cannot."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically, a text in UTF-8: a reader sees the old content or the new one.

    A link is replaced, not followed.
    """
    # By process: two evaluations of one run write its card.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    # Exclusively below, so that a link that lies there is never written through.
    remove(temporary)
    with _naming(path):
        with temporary.open("xb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            # fsync before the rename: a power cut must not leave the new name without its content.
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)


def rename_durably(partial: Path, folder: Path) -> None:
    """Rename a complete folder; its files then have the modes of the umask and survive a loss of
    power.
    """
    umask = _umask()
    for file in [path for path in partial.rglob("*") if path.is_file()]:
        _settle(file, umask)
    # Contents first, then the names in the folder, then its own name: a power cut leaves the old
    # state or the new one.
    sync_folders(partial)
    partial.rename(folder)
    sync_folder(folder.parent)


def sync_folders(folder: Path) -> None:
    """Write the entries of a folder and of those below it to the disk."""
    for path in (*(entry for entry in folder.rglob("*") if entry.is_dir()), folder):
        sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk: the names of its files, not their content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems without such a call
            raise
    finally:
        os.close(descriptor)


def use_umask(file: Path, umask: int | None = None) -> None:
    """Give a new file the mode that the umask asks for: safetensors makes its files readable by
    their owner alone.

    umask: this process's; None: read here.
    """
    mode = 0o666 & ~(_umask() if umask is None else umask)
    if file.stat().st_mode & 0o777 != mode:
        with suppress(PermissionError):  # a file system without modes
            file.chmod(mode)


def _umask() -> int:
    umask = os.umask(0o077)  # it can be read only by setting it
    os.umask(umask)
    return umask


def _settle(file: Path, umask: int) -> None:
    """Give a complete file its mode, and write it to the disk."""
    use_umask(file, umask)
    with _naming(file), file.open("rb") as stream:
        os.fsync(stream.fileno())


def digest(content: Any) -> str:
    """Return the sha256 of plain data, as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def drop_incomplete_line(file: Path) -> None:
    """Remove the line that a process was appending when it was killed: no line after it could be
    read.
    """
    content = file.read_bytes() if file.is_file() else b""
    if content and not content.endswith(b"\n"):
        with file.open("r+b") as stream:
            stream.truncate(content.rfind(b"\n") + 1)


def file_sha256(file: Path) -> str:
    """Return the sha256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Content(TypedDict):
    """The identity of a file's content."""

    num_bytes: int
    tree_sha256: str
    """SHA-256 over the SHA-256 digests of its chunks of CHUNK_BYTES, which threads and ranks
    compute side by side."""


def contents(files: Iterable[Path], *, settle: bool = False) -> list[Content]:
    """Return the contents of files.
    settle: meanwhile give them the modes of the umask and write them to the disk.
    """
    files = [*files]
    sizes = [file.stat().st_size for file in files]
    digests = chunk_digests(
        chunk for file, size in zip(files, sizes, strict=True) for chunk in chunks_of(file, size)
    )
    if settle:  # this thread waits for the disk while the others hash
        umask = _umask()
        for file in files:
            _settle(file, umask)
    return [Content(num_bytes=size, tree_sha256=tree_sha256(digests, size)) for size in sizes]


def chunks_of(file: T, num_bytes: int) -> list[tuple[T, int]]:
    """Return (file, number) of each chunk of a file of this size."""
    return [(file, number) for number in range(-(-num_bytes // CHUNK_BYTES))]


def chunk_digests(chunks: Iterable[tuple[Path, int]]) -> Iterator[bytes]:
    """Compute the SHA-256 digests of chunks (file, number), by threads: hashlib releases Python's
    lock.

    Returns an iterator at once, which waits for each.
    """
    return _threads().map(_chunk_digest, chunks)


@cache
def _threads() -> "ThreadPoolExecutor":
    """Return the threads that hash, all of them started: once, early, when there is memory.

    CPython's Thread.start (3.11) waits for ever for a thread that ends for lack of memory as it
    begins.
    """
    from concurrent.futures import ThreadPoolExecutor

    number = min(_MAX_THREADS, os.cpu_count() or 1)
    threads, all_started = ThreadPoolExecutor(number), Barrier(number)
    try:
        for started in [threads.submit(all_started.wait) for _ in range(number)]:
            started.result()
    finally:
        all_started.abort()  # else threads would wait for one that could not be started
    return threads


os.register_at_fork(after_in_child=_threads.cache_clear)  # a fork has none of them


def tree_sha256(digests: Iterator[bytes], num_bytes: int) -> str:
    """Return `Content.tree_sha256` of a file of this size, taking the digests of its chunks from an
    iterator.
    """
    return hashlib.sha256(b"".join(next(digests) for _ in chunks_of(None, num_bytes))).hexdigest()


def _chunk_digest(chunk: tuple[Path, int]) -> bytes:
    file, number = chunk
    # One buffer that is filled again: a read of bytes would allocate each block anew.
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with _naming(file), file.open("rb") as stream:
        stream.seek(number * CHUNK_BYTES)
        for _ in range(CHUNK_BYTES // _BLOCK_BYTES):
            digest.update(block[: stream.readinto(block)])
    return digest.digest()


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raise UserError, which starts with `key`, if files cannot be created in a folder, which may
    be new.
    """
    existing = next(
        parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists()
    )
    if not existing.is_dir():
        raise UserError(
            f"{key}: {folder} cannot be created: {existing} is a file; name another folder"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        remedy = "name another folder"
        raise UserError(
            f"{key}: {existing} is read-only, or you have no permission to write into it; {remedy}"
        )


def append(path: Path, text: str) -> None:
    """Append to a file, which may be new."""
    with _naming(path), path.open("a", encoding="utf-8") as stream:
        stream.write(text)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an OSError within the block name the file: that of a write on a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link without its target.
    Does nothing if `path` does not exist.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
