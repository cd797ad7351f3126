"""Read YAML with limits: any text gives plain data or a UserError within seconds, and no tag is
followed.

ruamel's parser is lazy: its events are counted while the data is built, so that a limit stops it
early. Its loaders build everything first, which takes 6 seconds for 100,000 numbers, and number
neither nodes nor depth.
"""

import re
from collections.abc import Iterator
from copy import copy
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.resolver import implicit_resolvers

from .errors import UserError
from .files import MAX_DEPTH, MAX_YAML_BYTES, is_text

Key = tuple[str | int, ...]
"""The position of a value: ('optimizer', 'lr'), ('data', 'train', 0)."""

_LINE_END = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
MAX_NODES = 10_000
"""Keys and values of a YAML file, aliases expanded. The pure Python parser reads about 50,000 a
second."""
MAX_KEYS = 1000
"""Keys of one YAML mapping: each unknown key is compared with all known ones."""
MAX_DIGITS = 18
"""Digits of an integer in YAML: an int64 holds them."""


def parse_yaml(text: str, name: str) -> tuple[Any, dict[Key, str]]:
    """Return (YAML 1.2 text as plain data, the line of each key: ('optimizer', 'lr') ->
    'my.yaml:14').

    name: the file's name in messages. A key is its text as written, also if it looks like a number.
    Dates are strings. Raises UserError, with the line, for tags, invalid YAML and text beyond the
    limits above.
    """
    if len(text) > MAX_YAML_BYTES:
        remedy = "shorten this file"
        raise UserError(
            f"{name}: is larger than {MAX_YAML_BYTES:,} bytes, the limit for a YAML file; {remedy}"
        )
    reader = _Reader(name, YAML(typ="safe", pure=True).parse(text))
    mark = None
    try:
        return reader.document(), reader.lines
    except UserError:
        raise
    except MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem or "cannot be read"
    # from ruamel's parser: an escape beyond Unicode raises OverflowError
    except Exception as error:
        problem = str(error) or type(error).__name__
    line, problem = mark.line + 1 if mark else 1, problem.splitlines()[0]
    if "\\t" in problem:
        problem += "; indent with spaces instead of tabs"
    elif any(words in problem for words in ("block", "mapping values", "expected ':'")):
        problem += "; correct the indentation"
    else:
        problem += "; correct the syntax"
    excerpt = []
    lines = dict(enumerate(_LINE_END.split(text))) if mark and name else {}
    if mark and lines.get(mark.line, "").strip():  # not the text's end
        # The line between the line before it and a caret below the column.
        width, start = len(str(line)), max(0, mark.column - 40)
        shown = [number for number in (mark.line - 1, mark.line) if number in lines]
        excerpt = [
            f"  {number + 1:{width}} | {lines[number][start : start + 70]}" for number in shown
        ]
        excerpt.append(f"  {' ' * width} | {' ' * (mark.column - start)}^")
    raise UserError(f"{name}:{line} not valid YAML: {problem}", *excerpt)


class _Reader:
    """Build plain data from the events of ruamel's parser.
    Each alias is replaced by the events of its anchor.
    """

    def __init__(self, name: str, parsed: Iterator[Any]):
        self.name, self.parsed = name, parsed
        self.lines: dict[Key, str] = {}
        self.num_nodes = 0
        self.expanded: list[Any] = []
        """Events of an alias, the next one last; they come before the parser's."""
        self.history: list[Any] = []
        """All events until now, aliases replaced. It is bounded as the number of nodes is."""
        self.anchors: dict[str, list[Any] | None] = {}
        """The events of each anchor; None while its node is being read."""

    def document(self) -> Any:
        data, num_documents = None, 0
        for event in self.parsed:
            if isinstance(event, events.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise self._invalid(
                        event, "the file has more than one document; remove the second '---'"
                    )
                if event.version not in (None, (1, 2)):
                    raise self._invalid(event, "only YAML 1.2 is supported; remove the %YAML line")
                data = self._node(self._next(), (), 1)
        self.lines[()] = f"{self.name}:1"
        return data

    def _next(self) -> Any:
        self.history.append(self.expanded.pop() if self.expanded else next(self.parsed))
        return self.history[-1]

    def _invalid(self, event: Any, problem: str) -> UserError:
        return UserError(f"{self._place(event)} not valid YAML: {problem}")

    def _place(self, event: Any) -> str:
        return f"{self.name}:{event.start_mark.line + 1}"

    def _node(self, event: Any, at: Key, depth: int) -> Any:
        if isinstance(event, events.AliasEvent):
            if event.anchor not in self.anchors:
                problem = (
                    f"found undefined alias '{event.anchor}'; write the value instead of the alias"
                )
                raise self._invalid(event, problem)
            if (anchored := self.anchors[event.anchor]) is None:
                problem = f"the alias '{event.anchor}' stands for a value that contains this alias; remove the alias"
                raise self._invalid(event, problem)
            self.history.pop()
            for original in reversed(anchored):
                self.expanded.append(expanded := copy(original))
                expanded.start_mark = event.start_mark
                if isinstance(expanded, events.NodeEvent):
                    expanded.anchor = None
            event = self._next()
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self._invalid(
                event, f"the tag {tag} is not supported; remove the tag (for a text, write quotes)"
            )
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            problem = f"the file has more than {MAX_NODES:,} keys and values, with aliases expanded; shorten this file"
            raise self._invalid(event, problem)
        if depth > MAX_DEPTH:
            raise self._invalid(
                event, f"a value is nested more than {MAX_DEPTH} levels deep; remove levels"
            )
        start = len(self.history) - 1
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        if isinstance(event, events.MappingStartEvent):
            data: Any = self._mapping(at, depth)
        elif isinstance(event, events.SequenceStartEvent):
            data = []
            while not isinstance(item := self._next(), events.SequenceEndEvent):
                self.lines[(*at, len(data))] = self._place(item)
                data.append(self._node(item, (*at, len(data)), depth + 1))
        else:
            data = self._scalar(event)
        if event.anchor is not None:
            self.anchors[event.anchor] = self.history[start:]
        return data

    def _mapping(self, at: Key, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        while not isinstance(event := self._next(), events.MappingEndEvent):
            if not isinstance(event, events.ScalarEvent):
                raise self._invalid(
                    event, "a key is a list, a mapping or an alias; write a text as the key"
                )
            self._node(event, at, depth)  # counted like a value; as a key it stays a string
            if event.value == "<<" and event.implicit[0]:
                # The keys of one mapping, or of a list of mappings, where the first one wins. Own
                # keys win over both.
                node = self._node(self._next(), (*at, "<<"), depth + 1)
                for mapping in node if isinstance(node, list) else [node]:
                    if not isinstance(mapping, dict):
                        raise self._invalid(
                            event, f"'<<' merges a {type(mapping).__name__}; write a mapping"
                        )
                    merged = mapping | merged
                continue
            if event.value in own:
                raise self._invalid(
                    event, f"found duplicate key '{event.value}'; remove one of the two"
                )
            if len(own) == MAX_KEYS:
                raise self._invalid(
                    event, f"a mapping has more than {MAX_KEYS:,} keys; remove keys"
                )
            self.lines[(*at, event.value)] = self._place(event)
            own[event.value] = self._node(self._next(), (*at, event.value), depth + 1)
        return merged | own

    def _scalar(self, event: Any) -> Any:
        text = event.value
        if not is_text(text):
            raise self._invalid(
                event, "a text contains half of a surrogate pair; remove this character"
            )
        # A quoted scalar is a string; another one has the kind of YAML 1.2's first pattern that
        # matches.
        kinds = (
            kind for kind, pattern, first in _PATTERNS if text[:1] in first and pattern.match(text)
        )
        kind = next(kinds, "str") if event.implicit[0] else "str"
        plain = text.replace("_", "").lower()
        if kind == "int" and len(plain) > MAX_DIGITS + 2:
            raise self._invalid(
                event, f"a number has {len(plain)} digits; write at most {MAX_DIGITS}"
            )
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
