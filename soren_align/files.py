"""YAML, JSON and paths that a person or a stranger wrote, read with limits.

Whatever stands in a file, reading it takes seconds and ends in plain data or a UserError. No tag of YAML is followed.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.resolver import implicit_resolvers

from .errors import UserError

Key = tuple[str | int, ...]
"""Where a value stands: ('optimizer', 'lr'), ('data', 'train', 0)."""

MAX_YAML_BYTES = 1 << 20
MAX_JSON_BYTES = 1 << 26
MAX_DEPTH = 50
MAX_NODES = 10_000
"""Keys and values of a YAML file, aliases expanded. The pure Python parser reads about 50,000 a second."""
MAX_KEYS = 1000
"""Of one YAML mapping: each unknown one is compared with all that are known."""
MAX_DIGITS = 18
"""Of a whole number in YAML: what an int64 holds."""
MAX_JSON_DIGITS = 40


def local_path(text: str | Path) -> Path:
    """The path that `text` names, `~` expanded. Asking whether it exists, is a file or a folder then raises nothing.

    UserError where it can be no path here: a home of nobody, a name too long, a NUL, a folder that may not be entered.
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


def is_component(name: Any) -> bool:
    """Whether `name`, read from a file, is the name of one entry of a folder, and no path that leads elsewhere."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and name.isprintable()
        and not {"/", "\\"} & set(name)
        and len(name.encode("utf-8", "surrogatepass")) <= 200  # 255, less what is written beside it (.part, .jsonl)
    )


def refuse_special_files(folder: Path) -> None:
    """UserError for a pipe, a socket or a device in a folder: to read one may never end."""
    for entry in folder.iterdir():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise UserError(f"{entry}: is no regular file")


def read_text(path: str | Path, max_bytes: int = MAX_YAML_BYTES) -> str:
    """The text of a file in UTF-8; UserError for one that is larger, is no regular file or cannot be read."""
    file = local_path(path)
    try:
        if file.exists() and not file.is_file():
            raise UserError(f"{path}: not a file")
        with file.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise UserError(f"{path}: larger than {max_bytes:,} bytes, the most that is read of such a file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{file.name}:1 not a text file in UTF-8") from None


def read_json(path: str | Path, *, max_bytes: int = MAX_JSON_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """Return a JSON file as plain data. Raises UserError if it is truncated, too large, nested too deeply or not UTF-8."""
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
        if any(isinstance(value, str) and not _is_text(value) for value in level):
            raise UserError(f"{name}: has half of a surrogate pair, which is no text")
        level = [inside for value in level for inside in _inside(value)]
        if not level:
            return data
    raise UserError(f"{name}: cannot be read as JSON: nested more than {max_depth} deep")


def _json_int(digits: str) -> int:
    if len(digits) > MAX_JSON_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits; the most is {MAX_JSON_DIGITS}")
    return int(digits)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def _is_text(value: str) -> bool:
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def read_yaml(path: str | Path, name: str | None = None) -> Any:
    """A YAML 1.2 file as plain data: dicts with texts as keys, lists, texts, numbers, booleans and None.

    name: of the file in messages; default: as given. UserError, with the line, for what is no such file or exceeds the
    limits above.
    """
    return parse_yaml(read_text(path), name or str(path))[0]


def parse_yaml(text: str, name: str) -> tuple[Any, dict[Key, str]]:
    """(YAML 1.2 text as plain data, where each key stands: ('optimizer', 'lr') -> 'my.yaml:14').

    A key is its text as written, also where it looks like a number. Dates are texts. Tags are refused.
    """
    if len(text) > MAX_YAML_BYTES:
        raise UserError(f"{name}: larger than {MAX_YAML_BYTES:,} bytes, the most that is read of such a file")
    reader = _Reader(name, YAML(typ="safe", pure=True).parse(text))
    try:
        data = reader.document()
    except UserError:
        raise
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = (error.problem or "cannot be read").splitlines()[0]
        raise UserError(f"{name}:{line} not valid YAML: {problem}") from None
    except YAMLError as error:
        raise UserError(f"{name}:1 not valid YAML: {str(error).splitlines()[0]}") from None
    except Exception as error:  # ruamel's parser, of text that is none: an escape beyond Unicode is an OverflowError
        raise UserError(f"{name}:1 not valid YAML: {str(error).splitlines()[0] or type(error).__name__}") from None
    return data, reader.lines


@dataclass
class _Anchor:
    data: Any
    num_nodes: int
    depth: int


@dataclass
class _Reader:
    """Plain data of the events of ruamel's parser, counted as it grows: the parser is lazy, so that a limit ends it."""

    name: str
    events: Iterator[Any]
    lines: dict[Key, str] = field(default_factory=dict)
    num_nodes: int = 0
    depth: int = 0
    """Of the deepest node so far, aliases expanded."""
    anchors: dict[str, _Anchor | None] = field(default_factory=dict)
    """None: not complete yet."""

    def document(self) -> Any:
        data = None
        num_documents = 0
        for event in self.events:
            if isinstance(event, events.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise self._invalid(event, "more than one document")
                if event.version not in (None, (1, 2)):
                    raise self._invalid(event, "files are read as YAML 1.2; leave the %YAML line out")
                data = self._node(next(self.events), (), 1)
        self.lines[()] = f"{self.name}:1"
        return data

    def _invalid(self, event: Any, problem: str) -> UserError:
        return UserError(f"{self._place(event)} not valid YAML: {problem}")

    def _place(self, event: Any) -> str:
        return f"{self.name}:{event.start_mark.line + 1}"

    def _node(self, event: Any, at: Key, depth: int) -> Any:
        if isinstance(event, events.AliasEvent):
            return self._alias(event, depth)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self._invalid(event, f"the tag {tag}; tags are not followed, leave it out (quotes make a text)")
        self._count(event, 1, depth)
        before, outer, self.depth = self.num_nodes, self.depth, depth
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        if isinstance(event, events.MappingStartEvent):
            data: Any = self._mapping(at, depth)
        elif isinstance(event, events.SequenceStartEvent):
            data = self._sequence(at, depth)
        else:
            data = self._scalar(event)
        if event.anchor is not None:
            self.anchors[event.anchor] = _Anchor(data, self.num_nodes - before + 1, self.depth - depth + 1)
        self.depth = max(self.depth, outer)
        return data

    def _alias(self, event: Any, depth: int) -> Any:
        if event.anchor not in self.anchors:
            raise self._invalid(event, f"found undefined alias '{event.anchor}'")
        anchor = self.anchors[event.anchor]
        if anchor is None:
            raise self._invalid(event, f"the alias '{event.anchor}' stands inside of what it names")
        self._count(event, anchor.num_nodes, depth + anchor.depth - 1)
        self.depth = max(self.depth, depth + anchor.depth - 1)
        return deepcopy(anchor.data)  # no two places share a list: one may be changed by --set

    def _count(self, event: Any, num_nodes: int, depth: int) -> None:
        self.num_nodes += num_nodes
        if self.num_nodes > MAX_NODES:
            raise self._invalid(
                event, f"more than {MAX_NODES:,} keys and values, aliases counted as often as they stand"
            )
        if depth > MAX_DEPTH:
            raise self._invalid(event, f"nested more than {MAX_DEPTH} deep")

    def _mapping(self, at: Key, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        while not isinstance(event := next(self.events), events.MappingEndEvent):
            if isinstance(event, events.AliasEvent) or not isinstance(event, events.ScalarEvent):
                raise self._invalid(event, "a key that is a list, a mapping or an alias; write a text")
            is_merge = event.value == "<<" and event.implicit[0]
            self._node(event, at, depth)  # counted as every other; as a key it is a text
            if is_merge:
                merged = self._merge(event, depth) | merged
                continue
            if event.value in own:
                raise self._invalid(event, f"found duplicate key '{event.value}'")
            if len(own) == MAX_KEYS:
                raise self._invalid(event, f"more than {MAX_KEYS:,} keys in one mapping")
            self.lines[(*at, event.value)] = self._place(event)
            own[event.value] = self._node(next(self.events), (*at, event.value), depth + 1)
        return merged | own

    def _merge(self, event: Any, depth: int) -> dict[str, Any]:
        """The keys that `<<` brings: a mapping's, or those of a list of mappings, the first of which counts."""
        found = self._node(next(self.events), (), depth + 1)
        several = found if isinstance(found, list) else [found]
        both: dict[str, Any] = {}
        for one in several:
            if not isinstance(one, dict):
                raise self._invalid(event, "<< merges mappings, and this is none")
            both = one | both
        return both

    def _sequence(self, at: Key, depth: int) -> list[Any]:
        found = []
        while not isinstance(event := next(self.events), events.SequenceEndEvent):
            self.lines[(*at, len(found))] = self._place(event)
            found.append(self._node(event, (*at, len(found)), depth + 1))
        return found

    def _scalar(self, event: Any) -> Any:
        text = event.value
        if not _is_text(text):
            raise self._invalid(event, "half of a surrogate pair, which is no text")
        kind = _kind(text) if event.implicit[0] else "str"
        plain = text.replace("_", "").lower()
        if kind == "int" and len(plain) > MAX_DIGITS + 2:
            raise self._invalid(event, f"a number of {len(plain)} digits; the most is {MAX_DIGITS}")
        try:
            if kind == "int":
                return int(plain, {"0b": 2, "0o": 8, "0x": 16}.get(plain.lstrip("+-")[:2], 10))
            if kind == "float":
                return float(plain.replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:  # '-_' and '._' are numbers by YAML's own patterns
            return text
        return {"bool": text.lower() == "true", "null": None}.get(kind, text)


_WORDS = "bool float int null"  # other scalars, dates among them, are texts
_PATTERNS = [
    (tag.rpartition(":")[2], pattern, set(first))
    for versions, tag, pattern, first in implicit_resolvers
    if (1, 2) in versions and tag.rpartition(":")[2] in _WORDS.split()
]


def _kind(text: str) -> str:
    """'bool', 'float', 'int' or 'null', as an unquoted scalar is read by YAML 1.2; else 'str'."""
    return next((kind for kind, pattern, first in _PATTERNS if text[:1] in first and pattern.match(text)), "str")
