"""A recipe's file, read as YAML 1.2 and checked to the last key.

Every mistake is reported at once, each with its file, line and key, what was found and what to write instead.
"""

import difflib
import io
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from .. import shipped
from ..errors import UserError
from ..files import local_path, read_text
from ..yaml_reader import Key, parse_yaml
from . import trl_config
from .checks import second_look
from .sections import ONE, SEVERAL, Recipe, resolve


def load(name_or_path: str, overrides: list[str] | None = None, task: str | None = None) -> Recipe:
    """The checked recipe of a file, or of a shipped name such as 'quickstart/sft'.

    overrides: 'section.key=value' texts, as after --set; values are YAML.
    task: the command's; a recipe of the other task is refused.
    Raises UserError with every mistake found.
    """
    raw, lines = _read(find(name_or_path))
    wrong: list[str] = []
    for text in overrides or []:
        _override(text, raw, lines, wrong)
    return _check(raw, lines, wrong, task)


def find(name_or_path: str) -> Path:
    """The recipe's file: an existing path first, then a shipped name. UserError, with what exists, if neither."""
    path = local_path(name_or_path)
    if path.is_file():
        if path.suffix not in (".yaml", ".yml"):  # what stands in another file, /etc/shadow, is not to be quoted
            raise UserError(f"{name_or_path}: a recipe is a .yaml file")
        return path
    known = shipped.recipes()
    if name_or_path in known:
        return known[name_or_path]
    close = difflib.get_close_matches(name_or_path, known, n=1, cutoff=0.6)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise UserError(f"{name_or_path}: no such file, nor a shipped recipe ({', '.join(known)}){hint}")


def task_of(path: Path) -> str | None:
    """The task that a recipe's file, or what it extends, names; the rest is not checked."""
    return _read(path)[0].get("task")


def load_text(text: str, name: str = "recipe") -> Recipe:
    """The checked recipe of YAML text, e.g. of one resolved in another process."""
    raw, lines = parse(text, name)
    return _check(raw, lines, [], None)


def load_resolved(path: Path) -> Recipe:
    """The recipe that a run wrote into its folder: checked when it was written, and read again from anywhere."""
    raw, _ = parse(read_text(path), str(path))
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(
            f"{path}: no recipe that this version of soren-align wrote: {_dotted(first['loc'])}: {first['msg']}"
        ) from None


def to_yaml(recipe: Recipe) -> str:
    """The recipe as resolved, every default written out; `load` reads it back to an equal recipe."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.width = 100
    yaml.dump(recipe.model_dump(), stream)
    return stream.getvalue()


def _read(path: Path, below: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[Key, str]]:
    """A file's data over those of the recipe that it `extends`, and where each key stands.

    Sections are merged key by key; everything else is replaced, lists too. `null` takes the default again.
    """
    raw, lines = parse(read_text(path), path.name)
    if "extends" not in raw:
        return raw, lines
    named, place = raw.pop("extends"), lines.pop(("extends",))
    if not isinstance(named, str):
        raise UserError(f"{place} extends: found {named!r}; write a recipe's file or a shipped name")
    try:
        beside = local_path(path.parent / named)
        base = find(str(beside if beside.is_file() else named))
    except UserError as error:
        raise UserError(f"{place} extends: {error}") from None
    if base.resolve() in (path.resolve(), *below):
        raise UserError(f"{place} extends: {named} extends this one in turn")
    there, their_lines = _read(base, (*below, path.resolve()))
    return _merged(there, raw), their_lines | lines


def _merged(there: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    both = there | here
    for key in there.keys() & here.keys():
        if isinstance(there[key], dict) and isinstance(here[key], dict):
            both[key] = _merged(there[key], here[key])
    return both


def parse(text: str, name: str) -> tuple[dict[str, Any], dict[Key, str]]:
    """A recipe's YAML as plain data, and where each key stands: ('optimizer', 'lr') -> 'my.yaml:14'."""
    raw, lines = parse_yaml(text, name)
    if not isinstance(raw, dict):
        raise UserError(f"{name}:1 a recipe is a mapping of sections (task, model, data, optimizer, run, ...)")
    return raw, lines


def _override(text: str, raw: dict[str, Any], lines: dict[Key, str], wrong: list[str]) -> None:
    key, equals, value = text.partition("=")
    keys: list[Any] = key.strip().split(".")
    if not equals or not all(keys) or len(keys) > 10:  # no section lies deeper
        wrong.append(f"--set {text}: write --set section.key=value")
        return
    try:
        parsed, _ = parse_yaml(value, "")
    except UserError as error:
        reason = str(error).partition("not valid YAML: ")[2] or "too long"
        wrong.append(f"--set {text}: the value is not valid YAML: {reason}")
        return
    node: Any = raw
    for i, part in enumerate(keys):
        if isinstance(node, list):  # data.train.0.limit: the first of a list
            if not (part.isdecimal() and len(part) < 9 and int(part) < len(node)):
                there = ".".join(map(str, keys[:i]))
                wrong.append(f"--set {text}: {there} is a list of {len(node)}; write {there}.0 for the first")
                return
            part = keys[i] = int(part)
        elif i + 1 < len(keys) and node.get(part) is None:
            node[part] = {}
        if i + 1 == len(keys):
            node[part] = parsed
        elif isinstance(node[part], dict | list):
            node = node[part]
        else:
            wrong.append(f"--set {text}: '{part}' is not a section")
            return
    for depth in range(1, len(keys) + 1):
        lines.setdefault(tuple(keys[:depth]), f"--set {text}")
    lines[tuple(keys)] = f"--set {text}"


def _check(raw: dict[str, Any], lines: dict[Key, str], wrong: list[str], task: str | None) -> Recipe:
    recipe = None
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        found = error.errors(include_url=False)
        errors = [{**e, "loc": tuple(part for part in e["loc"] if part not in (ONE, SEVERAL))} for e in found]
        wrong += [_say(e, lines) for e in _without_echoes(errors)]
    kind = raw.get("task")
    if isinstance(kind, str) and kind in trl_config.CLASSES:
        if task and kind != task:
            wrong.append(f"{_place(('task',), lines)} task: this is a recipe for `soren-align {kind}`, not {task}")
        trainer = raw.get("trainer")
        if isinstance(trainer, dict):
            for key, message in trl_config.problems(kind, trainer).items():
                wrong.append(f"{_place(('trainer', key), lines)} trainer.{key}: {message}")
    wrong += [f"{_place(key, lines)} {_dotted(key)}: {message}" for key, message in second_look(raw)]
    if wrong or recipe is None:
        raise UserError(*sorted(wrong, key=_line_number))
    return resolve(recipe)


def _line_number(problem: str) -> int:
    line = re.match(r"[^ ]+:(\d{1,9}) ", problem)
    return int(line[1]) if line else 10**9  # --set comes last


def _place(key: Key, lines: dict[Key, str]) -> str:
    """'file:line' of the key, or of the nearest section around it."""
    while key and key not in lines:
        key = key[:-1]
    return lines.get(key, "recipe")


def _dotted(key: Key) -> str:
    return ".".join(str(part) for part in key)


def _without_echoes(errors: list[Any]) -> list[Any]:
    """Without "is required" for a key that stands there misspelt: one mistake, one message."""
    meant = {(*e["loc"][:-1], _meant(e["loc"])) for e in errors if e["type"] == "extra_forbidden"}
    return [e for e in errors if not (e["type"] == "missing" and e["loc"] in meant)]


def _meant(key: Key) -> str | None:
    """The known key that an unknown one is close to."""
    known = _known_keys(key[:-1])
    words = {k: k for k in known} | {alias: k for alias, k in _ALIASES.items() if k in known}
    close = difflib.get_close_matches(str(key[-1]), words, n=1, cutoff=0.6)
    return words[close[0]] if close else None


_ALIASES = {"learning_rate": "lr", "model_name_or_path": "name_or_path", "dataset": "path", "torch_dtype": "dtype"}
_ALIASES |= {"rank": "r", "lora_r": "r"}
# What a refused value was probably after.
_INSTEAD: dict[Key, str] = {
    (
        "model",
        "dtype",
    ): " (bfloat16 parameters round small updates away; for bfloat16 arithmetic over float32 parameters "
    "write trainer: {bf16: true})",
    ("run", "parallel"): "; ZeRO and FSDP2 are not there yet",
}


def _say(error: Any, lines: dict[Key, str]) -> str:
    """One pydantic error as a sentence: place, key, finding, remedy."""
    key: Key = error["loc"]
    found = error.get("input")
    where = f"{_place(key, lines)} {_dotted(key)}:"
    match error["type"]:
        case "extra_forbidden":
            meant = _meant(key)
            hint = f"did you mean '{meant}'?" if meant else f"keys here: {', '.join(_known_keys(key[:-1]))}"
            return f"{where} unknown key; {hint}"
        case "missing":
            return f"{where} is required"
        case "literal_error":
            choices = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
            close = difflib.get_close_matches(str(found), choices, n=1, cutoff=0.5)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            return f"{where} found {found!r}; write {_or(choices)}{_INSTEAD.get(key, hint)}"
        case "model_type" if key == ("data", "eval") and isinstance(found, list):
            return f"{where} found a list; held-out rows are one split (data.train may be several)"
        case "model_type" | "dict_type":
            return f"{where} found {found!r}; write a section (indented keys below it)"

    def bound(name: str) -> Any:
        return error.get("ctx", {}).get(name, 0)

    what = {
        "int_type": "write a whole number",
        "float_type": "write a number",
        "string_type": "write a text",
        "bool_type": "write true or false",
        "list_type": "write a list",
        "greater_than": f"it must be more than {bound('gt'):g}",
        "greater_than_equal": f"it must be at least {bound('ge'):g}",
        "less_than": f"it must be less than {bound('lt'):g}",
        "less_than_equal": f"it must be at most {bound('le'):g}",
        "finite_number": "it must be finite",
        "string_too_short": "it is empty",
        "too_short": "it is empty" if bound("min_length") == 1 else f"write {bound('min_length')} values",
        "too_long": f"write {error.get('ctx', {}).get('max_length')} values",
    }.get(error["type"], error["msg"])
    hint = " (YAML's word for nothing is null)" if found == "None" else ""
    return f"{where} found {found!r}; {what}{hint}"


def _or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _known_keys(at: Key) -> list[str]:
    model: Any = Recipe
    for part in (part for part in at if isinstance(part, str)):
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        kinds = [annotation, *getattr(annotation, "__args__", ())]
        kinds = [getattr(kind, "__origin__", kind) for kind in kinds]  # Annotated
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), Recipe)
    return list(model.model_fields)
