"""Trees written as YAML that no emitter would write: tags, aliases, keys twice, keys that are no texts."""

import json
import math
from typing import Any


class Raw(str):
    """YAML that is written as it stands."""


class Pairs(list):
    """A mapping as a list of (key, value): a key may stand there twice."""


def dump(node: Any, indent: str = "") -> str:
    """Block YAML of a tree of Pairs, lists and scalars."""
    if isinstance(node, Pairs):
        return "".join(f"{indent}{_key(key)}:{_below(value, indent)}" for key, value in node) or f"{indent}{{}}\n"
    if isinstance(node, list):
        return "".join(f"{indent}-{_below(value, indent)}" for value in node) or f"{indent}[]\n"
    return f"{indent}{_scalar(node)}\n"


def pairs(node: Any) -> Any:
    """The tree with each dict as Pairs."""
    if isinstance(node, dict):
        return Pairs([(key, pairs(value)) for key, value in node.items()])
    return [pairs(value) for value in node] if isinstance(node, list) else node


def plain(node: Any) -> Any:
    """The tree as JSON can hold it: Pairs as dicts, the last of two keys."""
    if isinstance(node, Pairs):
        return {str(key): plain(value) for key, value in node}
    return [plain(value) for value in node] if isinstance(node, list) else node


def _below(value: Any, indent: str) -> str:
    if isinstance(value, list) and value:
        return "\n" + dump(value, indent + "  ")
    return f" {dump(value).strip(chr(10))}\n" if isinstance(value, list) else f" {_scalar(value)}\n"


def _key(key: Any) -> str:
    return str(key) if isinstance(key, Raw) or (isinstance(key, str) and key.isidentifier()) else _scalar(key)


def _scalar(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf")
    return json.dumps(value, default=str)
