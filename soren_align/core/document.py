"""Read YAML with limits: any text gives plain data or a UserError within seconds, and no tag is followed.

ruamel's parser is lazy: its events are counted while the data is built, so that a limit stops it early.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.resolver import implicit_resolvers

from .errors import UserError

Key = tuple[str | int, ...]
"""The position of a value: ('optimizer', 'lr'), ('data', 'train', 0)."""

MAX_YAML_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_NODES = 10_000
"""Keys and values of a YAML file, aliases expanded. The pure Python parser reads about 50,000 a second."""
MAX_KEYS = 1000
"""Keys of one YAML mapping: each unknown key is compared with all known ones."""
MAX_DIGITS = 18
"""Digits of an integer in YAML: an int64 holds them."""


def dotted(key: Iterable[str | int]) -> str:
    """Return a key as it is written after --set: 'data.train.0.path'."""
    return ".".join(map(str, key))


def place(key: Key, lines: dict[Key, str]) -> str:
    """Return 'file:line' of the key, or of the nearest section around it. lines: of `parse_yaml`."""
    while key not in lines:
        key = key[:-1]
    return lines[key]


def sentences(problems: list[tuple[Key, str]], lines: dict[Key, str]) -> list[str]:
    """Return the problems with their places and keys, in the order of lines; those of --set come last."""
    placed = [(place(key, lines), f"{dotted(key)}: {message}") for key, message in problems]
    return [f"{at} {sentence}" for at, sentence in sorted(placed, key=lambda each: _line_number(each[0]))]


def _line_number(place: str) -> int:
    number = "" if place.startswith("--set") else place.rpartition(":")[2]
    return int(number) if number.isdecimal() else 10**9


def parse_yaml(text: str, name: str) -> tuple[Any, dict[Key, str]]:
    """Return (YAML 1.2 text as plain data, the line of each key: ('optimizer', 'lr') -> 'my.yaml:14').

    name: the file's name in messages. A key is its text as written, also if it looks like a number. Dates are strings.
    Raises UserError, with the line, for tags, invalid YAML and text beyond the limits above.
    """
    if len(text) > MAX_YAML_BYTES:
        raise UserError(f"{name}: larger than {MAX_YAML_BYTES:,} bytes, the limit for such a file")
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
    except Exception as error:  # from ruamel's parser: an escape beyond Unicode raises OverflowError
        raise UserError(f"{name}:1 not valid YAML: {str(error).splitlines()[0] or type(error).__name__}") from None
    return data, reader.lines


@dataclass
class _Anchor:
    data: Any
    num_nodes: int
    depth: int


@dataclass
class _Reader:
    """Build plain data from the events of ruamel's parser and count its nodes."""

    name: str
    events: Iterator[Any]
    lines: dict[Key, str] = field(default_factory=dict)
    num_nodes: int = 0
    depth: int = 0
    """Depth of the deepest node read until now, aliases expanded."""
    anchors: dict[str, _Anchor | None] = field(default_factory=dict)
    """None while the node is being read."""

    def document(self) -> Any:
        data = None
        num_documents = 0
        for event in self.events:
            if isinstance(event, events.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise self._invalid(event, "more than one document")
                if event.version not in (None, (1, 2)):
                    raise self._invalid(event, "files are read as YAML 1.2; remove the %YAML line")
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
            raise self._invalid(event, f"the tag {tag} is not supported; remove it (quotes make a string)")
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
            raise self._invalid(event, f"the alias '{event.anchor}' stands inside its own anchor")
        self._count(event, anchor.num_nodes, depth + anchor.depth - 1)
        self.depth = max(self.depth, depth + anchor.depth - 1)
        return deepcopy(anchor.data)  # a copy: --set may change a list in one place

    def _count(self, event: Any, num_nodes: int, depth: int) -> None:
        self.num_nodes += num_nodes
        if self.num_nodes > MAX_NODES:
            raise self._invalid(event, f"more than {MAX_NODES:,} keys and values, each alias expanded")
        if depth > MAX_DEPTH:
            raise self._invalid(event, f"nested more than {MAX_DEPTH} deep")

    def _mapping(self, at: Key, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        while not isinstance(event := next(self.events), events.MappingEndEvent):
            if isinstance(event, events.AliasEvent) or not isinstance(event, events.ScalarEvent):
                raise self._invalid(event, "a key that is a list, a mapping or an alias; write a string")
            is_merge = event.value == "<<" and event.implicit[0]
            self._node(event, at, depth)  # counted like a value; as a key it stays a string
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
        """Return the keys that `<<` merges: of one mapping, or of a list of mappings, where the first one wins."""
        node = self._node(next(self.events), (), depth + 1)
        merged: dict[str, Any] = {}
        for mapping in node if isinstance(node, list) else [node]:
            if not isinstance(mapping, dict):
                raise self._invalid(event, f"<< merges mappings; found {type(mapping).__name__}")
            merged = mapping | merged
        return merged

    def _sequence(self, at: Key, depth: int) -> list[Any]:
        items = []
        while not isinstance(event := next(self.events), events.SequenceEndEvent):
            self.lines[(*at, len(items))] = self._place(event)
            items.append(self._node(event, (*at, len(items)), depth + 1))
        return items

    def _scalar(self, event: Any) -> Any:
        text = event.value
        if not is_text(text):
            raise self._invalid(event, "half of a surrogate pair, which is not text")
        kind = _kind(text) if event.implicit[0] else "str"
        plain = text.replace("_", "").lower()
        if kind == "int" and len(plain) > MAX_DIGITS + 2:
            raise self._invalid(event, f"a number of {len(plain)} digits; the limit is {MAX_DIGITS}")
        try:
            if kind == "int":
                return int(plain, {"0b": 2, "0o": 8, "0x": 16}.get(plain.lstrip("+-")[:2], 10))
            if kind == "float":
                return float(plain.replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:  # '-_' and '._' match YAML's patterns for numbers
            return text
        return {"bool": text.lower() == "true", "null": None}.get(kind, text)


_KINDS = "bool float int null"  # other scalars, such as dates, are read as strings
_PATTERNS = [
    (tag.rpartition(":")[2], pattern, set(first))
    for versions, tag, pattern, first in implicit_resolvers
    if (1, 2) in versions and tag.rpartition(":")[2] in _KINDS.split()
]


def _kind(text: str) -> str:
    """Return how YAML 1.2 reads an unquoted scalar: 'bool', 'float', 'int', 'null' or 'str'."""
    return next((kind for kind, pattern, first in _PATTERNS if text[:1] in first and pattern.match(text)), "str")


def is_text(value: str) -> bool:
    """Whether `value` can be encoded in UTF-8: half of a surrogate pair cannot."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False
