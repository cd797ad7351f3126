"""A recipe's file, read as YAML 1.2 and checked to the last key.

All mistakes are reported together, each with its file, line and key, the finding and the remedy.
"""

import functools
import io
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from .. import shipped
from ..errors import UserError, did_you_mean
from ..files import local_path, read_text
from ..yaml_reader import Key, dotted, parse_yaml, sentences
from . import trl_config
from .checks import problems_beyond_schema
from .merging import Notify, merged, override
from .messages import messages
from .quantization import inherit_quantization
from .sections import Recipe, resolve

MISSING = ("no file ", "no folder ", "no suite ", "there is no ")
"""The first words of problems of files and folders that another machine may have."""


def _ignore(_: str) -> None:
    """Drop a notice."""


def load(
    name_or_path: str, overrides: list[str] | None = None, task: str | None = None, notify: Notify = _ignore
) -> Recipe:
    """The checked recipe of a file, or of a shipped name such as 'quickstart/sft'.

    overrides: 'section.key=value' texts, as after --set; values are YAML. task: the command's; a recipe of the other
    task is an error. notify: receives one line for each inherited key that a new optimizer or map does not have.
    Raises UserError with every mistake.
    """
    raw, lines = _read(find(name_or_path), notify)
    problems = override(raw, lines, overrides or [], notify)
    return _checked(raw, lines, problems, task)


def find(name_or_path: str) -> Path:
    """The recipe's file: an existing path, else a shipped name. Raises UserError if it is neither."""
    return find_yaml(name_or_path, shipped.recipes(), "recipe")


def find_yaml(name_or_path: str, known: dict[str, Path], kind: str) -> Path:
    """An existing .yaml file, else the shipped file of that name. Raises UserError if it is neither.

    known: the shipped files by name. kind: of file, for messages.
    """
    path = local_path(name_or_path)
    if path.is_file():
        if path.suffix not in (".yaml", ".yml"):  # errors would quote any other file, such as /etc/shadow
            raise UserError(f"{name_or_path}: a {kind} is a .yaml file")
        return path
    if name_or_path in known:
        return known[name_or_path]
    beside = [str(file) for file in path.parent.glob("*.yaml")]
    hint = did_you_mean(name_or_path, [*beside, *known], otherwise="`soren-align recipes` lists the shipped ones")
    raise UserError(f"{name_or_path}: no such file, nor a shipped {kind}{hint}")


def task_of(path: Path) -> str | None:
    """The task in a recipe's file, or in the recipe that it extends; nothing else is checked."""
    return _read(path, _ignore)[0].get("task")


def load_text(text: str, name: str = "recipe", on_missing: Notify | None = None) -> Recipe:
    """The checked recipe of YAML text, e.g. of a recipe resolved in another process.

    on_missing: receives the problem of each missing file or folder, and no data are read; None: they are errors.
    """
    raw, lines = parse(text, name)
    return _checked(raw, lines, [], None, on_missing)


def load_resolved(path: Path) -> Recipe:
    """The recipe in a run folder, of this version; its files and models need not exist any more."""
    return _resolved(read_text(path), str(path))


@functools.lru_cache(maxsize=512)  # a study reads the recipe of each of its runs several times, 10 ms each
def _resolved(text: str, path: str) -> Recipe:
    raw, _ = parse(text, path)
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise UserError(
            f"{path}: not a recipe that this version of soren-align can read:",
            *(f"  {dotted(key)}: {message}" for key, message in messages(error)[:3]),
        ) from None


def to_yaml(recipe: Recipe | dict[str, Any]) -> str:
    """The resolved recipe, every default written out; `load` reads it back to an equal recipe."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.width = 100
    yaml.dump(recipe if isinstance(recipe, dict) else recipe.model_dump(), stream)
    return stream.getvalue()


def parse(text: str, name: str) -> tuple[dict[str, Any], dict[Key, str]]:
    """A recipe's YAML as plain data, and the place of each key: ('optimizer', 'lr') -> 'my.yaml:14'."""
    raw, lines = parse_yaml(text, name)
    if not isinstance(raw, dict):
        raise UserError(f"{name}:1 a recipe is a mapping of sections (task, model, data, optimizer, run, ...)")
    return raw, lines


def _read(path: Path, notify: Notify, extending: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[Key, str]]:
    """A file's data merged over the recipe that it `extends`, and the place of each key.

    `extends` is then the list of these recipes. extending: the files that extend this one.
    """
    raw, lines = parse(read_text(path), str(path))
    base_name = raw.get("extends")
    is_resolved = isinstance(base_name, list) and raw.keys() >= Recipe.model_fields.keys()  # from a run folder
    if "extends" not in raw or is_resolved:
        return raw, lines
    where = lines[("extends",)]
    if not isinstance(base_name, str):
        raise UserError(f"{where} extends: found {base_name!r}; write a recipe's file or a shipped name")
    try:
        beside = local_path(path.parent / base_name)
        base_path = find(str(beside if beside.is_file() else base_name))
    except UserError as error:
        raise UserError(f"{where} extends: {error}") from None
    if base_path.resolve() in (path.resolve(), *extending):
        raise UserError(f"{where} extends: {base_name} extends this one in turn")
    base, base_lines = _read(base_path, notify, (*extending, path.resolve()))
    raw["extends"] = [base_name, *base.pop("extends", [])]
    return merged(base, raw, notify), base_lines | lines


def _checked(
    raw: dict[str, Any],
    lines: dict[Key, str],
    problems: list[str],
    task: str | None,
    on_missing: Notify | None = None,
) -> Recipe:
    """The resolved recipe; raises UserError with `problems` and all others, in the order of lines."""
    recipe, more = None, list[tuple[Key, str]]()
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        more += messages(error)
    kind = raw.get("task")
    if isinstance(kind, str) and kind in trl_config.CLASSES:
        if task and kind != task:
            more.append((("task",), f"this is a recipe for `soren-align {kind}`, not {task}"))
        trainer = raw.get("trainer")
        if isinstance(trainer, dict):
            more += [(("trainer", key), message) for key, message in trl_config.problems(kind, trainer).items()]
    for key, message in problems_beyond_schema(raw, reads_data=on_missing is None):
        if on_missing and message.startswith(MISSING):
            on_missing(f"{dotted(key)}: {message}")
        else:
            more.append((key, message))
    if problems or more or recipe is None:
        raise UserError(*sentences(more, lines), *problems)  # those of --set come last
    return inherit_quantization(resolve(recipe))
