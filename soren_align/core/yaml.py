"""Read YAML 1.2 as plain data, with the line of each key.

ruamel's composer resolves aliases and tags, and its nodes know their lines. Its loaders lose the
lines, or convert a key that looks like a number.
"""

from typing import Any

from ruamel.yaml import YAML, MappingNode, SequenceNode
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from .errors import UserError

Key = tuple[str | int, ...]
"""The position of a value: ('optimizer', 'lr'), ('data', 'train', 0)."""
_TAG = "tag:yaml.org,2002:"


class InvalidYamlError(UserError):
    """Text that is not YAML; `reason` is the message without the file and the line."""

    def __init__(self, place: str, reason: str, *excerpt: str):
        self.reason = reason
        super().__init__(f"{place} not valid YAML: {reason}", *excerpt)


def parse_yaml(text: str, name: str) -> tuple[Any, dict[Key, str]]:
    """Return (YAML 1.2 text as plain data, the line of each key: ('optimizer', 'lr') ->
    'my.yaml:14').

    name: the file's name in messages. A key is its text as written, also if it looks like a number.
    Dates are strings. Raises InvalidYamlError.
    """
    yaml = YAML(typ="safe", pure=True)
    reader, mark = _Reader(name, yaml.constructor), None
    try:
        node = yaml.compose(text)
        return (None if node is None else reader.value(node, ())), reader.lines
    except MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem or "cannot be read"
    except RecursionError:
        problem = "a value contains itself by an alias, or is nested too deeply"
    except (YAMLError, OverflowError) as error:  # a character that YAML forbids, a bad escape
        problem = str(error)
    line = mark.line + 1 if mark else 1
    rows = [*enumerate(text.splitlines(), 1)][max(0, line - 2) : line]
    # ruamel names the token that it did not expect; the cause is mostly the indentation
    is_tab = bool(rows) and rows[-1][1].lstrip(" ").startswith("\t")
    remedy = "indent with spaces instead of tabs" if is_tab else "correct the syntax or indentation"
    excerpt = []
    if mark and name and rows[-1][0] == line:  # not the text's end
        # The line between the line before it and a caret below the column.
        width, start = len(str(line)), max(0, mark.column - 40)
        excerpt = [f"  {number:{width}} | {row[start : start + 70]}" for number, row in rows]
        excerpt.append(f"  {' ' * width} | {' ' * (mark.column - start)}^")
    raise InvalidYamlError(f"{name}:{line}", f"{problem.splitlines()[0]}; {remedy}", *excerpt)


class _Reader:
    """Build plain data from ruamel's nodes, and collect the lines of keys."""

    def __init__(self, name: str, constructor: Any):
        self.name, self.constructor = name, constructor
        self.lines: dict[Key, str] = {(): f"{name}:1"}

    def value(self, node: Any, at: Key) -> Any:
        """Return the data of the node at a key. Data of an alias are a copy."""
        kind = str(node.tag).removeprefix(_TAG)
        if isinstance(node, MappingNode) and kind == "map":
            return self._mapping(node, at)
        if isinstance(node, SequenceNode) and kind == "seq":
            for number, item in enumerate(node.value):
                self.lines[(*at, number)] = self._place(item)
            return [self.value(item, (*at, number)) for number, item in enumerate(node.value)]
        if kind in ("str", "timestamp"):
            return node.value
        if kind in ("null", "bool", "int", "float"):
            try:
                return self.constructor.construct_object(node)
            except (ValueError, LookupError):  # '!!int zero'
                raise self._invalid(
                    node, f"found {node.value!r}; write the value in quotes"
                ) from None
        tag = str(node.tag).replace(_TAG, "!!")
        problem = f"the tag {tag} is not supported; remove the tag (for a text, write quotes)"
        raise self._invalid(node, problem)

    def _mapping(self, node: MappingNode, at: Key) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, content in node.value:
            if not isinstance(key.value, str):
                raise self._invalid(key, "a key is a list or a mapping; write a text as the key")
            if str(key.tag) == f"{_TAG}merge":
                # The keys of one mapping, or of a list of mappings, where the first one wins. Own
                # keys win over both.
                value = self.value(content, (*at, key.value))
                for mapping in value if isinstance(value, list) else [value]:
                    if not isinstance(mapping, dict):
                        problem = f"'<<' merges a {type(mapping).__name__}; write a mapping"
                        raise self._invalid(key, problem)
                    merged = mapping | merged
                continue
            if key.value in own:
                problem = f"found duplicate key '{key.value}'; remove one of the two"
                raise self._invalid(key, problem)
            self.lines[(*at, key.value)] = self._place(key)
            own[key.value] = self.value(content, (*at, key.value))
        return merged | own

    def _place(self, node: Any) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def _invalid(self, node: Any, reason: str) -> InvalidYamlError:
        return InvalidYamlError(self._place(node), reason)
