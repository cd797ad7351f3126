"""Read files of unknown origin with limits, and write files atomically.

Whatever a YAML or JSON file contains, reading it takes seconds and returns plain data or raises UserError.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError
from .yaml_reader import MAX_DEPTH, MAX_YAML_BYTES, is_text, parse_yaml

MAX_JSON_BYTES = 1 << 26
MAX_JSON_DIGITS = 40


def local_path(text: str | Path) -> Path:
    """Return the path that `text` names, `~` expanded. Its exists(), is_file() and is_dir() then raise nothing.

    Raises UserError if it cannot be a path: an unknown user's home, a name too long, a NUL, a forbidden folder.
    """
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        raise UserError(f"{text}: cannot be used as a path: {error.strerror}") from None
    except (ValueError, RuntimeError) as error:  # a NUL, half of a surrogate pair; no home
        raise UserError(f"{text}: cannot be used as a path: {error}") from None
    return path


def default_cache_folder() -> Path:
    """Return $SOREN_ALIGN_CACHE, or else `soren-align` in the user's cache folder."""
    own = os.environ.get("SOREN_ALIGN_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "soren-align").expanduser()


def is_component(name: Any) -> bool:
    """Whether `name`, read from a file, is the name of one entry of a folder, and not a path to another folder."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and name.isprintable()
        and not {"/", "\\"} & set(name)
        and len(name.encode("utf-8", "surrogatepass")) <= 200  # 255, less the suffixes of `write` and .jsonl
    )


def refuse_special_files(folder: Path) -> None:
    """Raise UserError if a folder holds a pipe, a socket or a device: reading one may never end."""
    for entry in folder.iterdir():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise UserError(f"{entry}: not a regular file; remove it")


def read_text(path: str | Path, max_bytes: int = MAX_YAML_BYTES) -> str:
    """Return the text of a UTF-8 file. Raises UserError if it is too large, not a regular file or cannot be read."""
    file = local_path(path)
    try:
        if file.exists() and not file.is_file():
            raise UserError(f"{path}: not a file")
        with file.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise UserError(f"{path}: larger than {max_bytes:,} bytes, the limit for such a file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{file.name}:1 not a text file in UTF-8") from None


def read_json(path: str | Path, *, max_bytes: int = MAX_JSON_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """Return a JSON file as plain data. Raises UserError if it is damaged, too large or nested too deeply."""
    return parse_json(read_text(path, max_bytes), str(path), max_depth)


def parse_json(text: str, name: str, max_depth: int = MAX_DEPTH) -> Any:
    """Return JSON text as plain data. Raises UserError, with `name` for the file, if it exceeds the limits."""
    try:
        data = json.loads(text, parse_int=_json_int)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno} cannot be read as JSON: {error.msg}") from None
    except RecursionError:
        raise UserError(f"{name}: cannot be read as JSON: nested more than {max_depth} deep") from None
    except ValueError as error:
        raise UserError(f"{name}: cannot be read as JSON: {error}") from None
    level = [data]
    for _ in range(max_depth):
        if any(isinstance(value, str) and not is_text(value) for value in level):
            raise UserError(f"{name}: has half of a surrogate pair, which is not text")
        level = [child for value in level for child in _children(value)]
        if not level:
            return data
    raise UserError(f"{name}: cannot be read as JSON: nested more than {max_depth} deep")


def _json_int(digits: str) -> int:
    if len(digits) > MAX_JSON_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits; the limit is {MAX_JSON_DIGITS}")
    return int(digits)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def read_yaml(path: str | Path, name: str | None = None) -> Any:
    """Return a YAML 1.2 file as plain data: dicts with string keys, lists, strings, numbers, booleans and None.

    name: the file's name in messages; default: `path`. Raises UserError, with the line, if the file is not valid YAML
    or exceeds the limits of yaml_reader.
    """
    return parse_yaml(read_text(path), name or str(path))[0]


def write(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old content or the new one. A link is replaced, not followed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")  # two evaluations of a run write its card
    remove(temporary)
    with _naming(path):
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)


def refuse_unwritable(folder: Path, key: str) -> None:
    """Raise UserError, which starts with `key`, if files cannot be created in a folder, which may be new."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise UserError(f"{key}: {folder} cannot be created: {existing} is a file; name another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{key}: {existing}: read-only, or no permission to write there; name another folder")


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
    """Remove a file, a folder with its content, or a link without its target. Does nothing if `path` does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
