"""One recipe over another: `extends` and `--set`.

Sections are merged key by key; everything else is replaced, lists too. Where a section is a member of a union and its
`name` changes, inherited keys that the new member does not have are ignored and reported. `data.eval` is replaced where
a split becomes a fraction, or the other way round.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.document import Key, dotted, parse_yaml
from ..core.errors import UserError
from .base import tag_of
from .optimizer import MAPS, OPTIMIZERS
from .schema import kind_of_eval

UNIONS: dict[Key, dict[str, Any]] = {("optimizer",): OPTIMIZERS, ("optimizer", "map"): MAPS}
MAX_DEPTH = 10
"""Parts of a key in --set; no section is nested deeper."""
Notify = Callable[[str], object]


def merged(base: dict[str, Any], over: dict[str, Any], notify: Notify, at: Key = ()) -> dict[str, Any]:
    """The values of `over`, and those of `base` where it has none. Neither is modified.

    notify: receives one line for each `name` whose change leaves keys of `base` out. at: the key of both sections.
    """
    base = _without_foreign_keys(base, over.get("name"), at, notify)
    both = base | over
    for key in base.keys() & over.keys():
        inherited = _as_section(base[key], (*at, key))
        if isinstance(inherited, dict) and isinstance(over[key], dict):
            if (*at, key) == ("data", "eval") and kind_of_eval(inherited) != kind_of_eval(over[key]):
                continue
            both[key] = merged(inherited, over[key], notify, (*at, key))
    return both


def _as_section(value: Any, at: Key) -> Any:
    """The bare name of a union's member as a section; anything else unchanged."""
    return {"name": value} if at in UNIONS and isinstance(value, str) else value


def _without_foreign_keys(section: dict[str, Any], name: Any, at: Key, notify: Notify) -> dict[str, Any]:
    """`section` without the keys that other members of its union have and the member `name` does not."""
    union = UNIONS.get(at)
    if union is None or not isinstance(name, str) or name not in union or name == (old := tag_of(section, union)):
        return section
    others = {key for member in union.values() for key in member.model_fields}
    foreign = [key for key in section if key in others - union[name].model_fields.keys()]
    if foreign:
        notify(f"{dotted(at)}.name={name}: ignored {', '.join(foreign)} of {old}, which {name} does not have")
    return {key: value for key, value in section.items() if key not in foreign}


@dataclass(frozen=True)
class _Setting:
    """One `--set`: its text, key and value."""

    text: str
    key: tuple[str, ...]
    value: Any


def override(raw: dict[str, Any], lines: dict[Key, str], texts: list[str], notify: Notify) -> list[str]:
    """Change `raw` and the places in `lines` by 'section.key=value' texts; returns what is wrong with the texts."""
    problems: list[str] = []
    settings = []
    for text in texts:
        try:
            settings.append(_parsed(text))
        except UserError as error:
            problems.append(str(error))
    for at in UNIONS:
        names = [setting.value for setting in settings if setting.key == (*at, "name")]
        parent = _section(raw, at[:-1])
        if names and at[-1] in parent and isinstance(section := _as_section(parent[at[-1]], at), dict):
            parent[at[-1]] = _without_foreign_keys(section, names[-1], at, notify)
    for setting in settings:
        try:
            key = _set(raw, setting)
        except UserError as error:
            problems.append(str(error))
            continue
        for depth in range(1, len(key)):
            lines.setdefault(key[:depth], f"--set {setting.text}")
        lines[key] = f"--set {setting.text}"
    return problems


def _section(raw: dict[str, Any], at: Key) -> dict[str, Any]:
    """The section at a key; an empty one if there is none."""
    node: Any = raw
    for part in at:
        node = node.get(part) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _parsed(text: str) -> _Setting:
    name, equals, value = text.partition("=")
    key = tuple(name.strip().split("."))
    if not equals or not all(key) or len(key) > MAX_DEPTH:
        raise UserError(f"--set {text}: write --set section.key=value")
    if key == ("extends",):
        raise UserError(f"--set {text}: a file extends another; write it into a recipe's file")
    try:
        return _Setting(text, key, parse_yaml(value, "")[0])
    except UserError as error:
        reason = str(error).partition("not valid YAML: ")[2] or "too long"
        raise UserError(f"--set {text}: the value is not valid YAML: {reason}") from None


def _set(raw: dict[str, Any], setting: _Setting) -> Key:
    """Write the value into `raw`, with the sections around it; returns the key, indices of lists as ints."""
    node: Any = raw
    key: list[Any] = []
    for i, name in enumerate(setting.key):
        part: Any = name
        if isinstance(node, list):  # data.train.0.limit: the first of a list
            if not (name.isdecimal() and len(name) < 9 and int(name) < len(node)):
                there = dotted(key)
                raise UserError(
                    f"--set {setting.text}: {there} is a list of {len(node)}; write {there}.0 for the first"
                )
            part = int(name)
        key.append(part)
        if i + 1 == len(setting.key):
            node[part] = setting.value
            break
        if isinstance(node, dict):
            node[part] = _as_section({} if node.get(part) is None else node[part], tuple(key))
        if not isinstance(node[part], dict | list):
            raise UserError(f"--set {setting.text}: '{part}' is not a section")
        node = node[part]
    return tuple(key)
