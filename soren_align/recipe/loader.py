"""A recipe's file, read as YAML 1.2 and checked to the last key.

All mistakes are reported together, each with its file, line and key, the finding and the remedy.
"""

import functools
import hashlib
import io
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from ..core import shipped
from ..core.document import Key, dotted, parse_yaml, sentences
from ..core.errors import UserError, did_you_mean
from ..core.files import local_path, read_text, write
from ..core.shipped import MODELINE
from ..tasks import TASKS
from . import trl
from .checks import problems_beyond_schema
from .merge import Notify, merged, override
from .messages import messages
from .model import inherit_quantization
from .optimizer import MAPS
from .schema import Recipe, resolve

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
    if isinstance(kind, str) and kind in TASKS:
        if task and kind != task:
            more.append((("task",), f"this is a recipe for `soren-align {kind}`, not {task}"))
        trainer = raw.get("trainer")
        if isinstance(trainer, dict):
            more += [(("trainer", key), message) for key, message in trl.problems(kind, trainer).items()]
    for key, message in problems_beyond_schema(raw, reads_data=on_missing is None):
        if on_missing and message.startswith(MISSING):
            on_missing(f"{dotted(key)}: {message}")
        else:
            more.append((key, message))
    if problems or more or recipe is None:
        raise UserError(*sentences(more, lines), *problems)  # those of --set come last
    return inherit_quantization(resolve(recipe))


# ---
# Whether two recipes train the same weights: the condition for resuming a run.

# Keys of `trainer` that do not change the trained weights: logging, evaluation and saving may change at a resume. With
# run.early_stopping, evaluation does change them.
_EVALUATION = {"eval_strategy", "eval_steps", "eval_on_start", "eval_delay"}
_NO_EFFECT_ON_WEIGHTS = {
    "logging_steps",
    "logging_first_step",
    "logging_strategy",
    "save_steps",
    "save_strategy",
    "save_total_limit",
    "report_to",
    "run_name",
    "project",
    "trackio_space_id",
    "trackio_bucket_id",
    "trackio_static_space_id",
    "hub_private_repo",
}


def training_part(recipe: Recipe) -> dict[str, Any]:
    """The part of the recipe that determines the trained weights: a run resumes only with an equal one."""
    part = recipe.model_dump(include={"task", "model", "data", "optimizer", "trainer"})
    part["run"] = recipe.run.model_dump(include={"parallel", "global_batch_size", "early_stopping"})
    del part["data"]["cache"], part["data"]["retention"]
    evaluation = part["data"].pop("eval") or {}
    if "path" not in evaluation and evaluation:  # the other examples are trained on
        part["data"]["eval"] = evaluation
    if recipe.data.streaming:  # refused and dropped examples are equal up to the first one, which ends the run
        sources = part["data"]["train"]
        for source in sources if isinstance(sources, list) else [sources]:
            del source["bad_examples"]
    ignored = _NO_EFFECT_ON_WEIGHTS if recipe.run.early_stopping else _NO_EFFECT_ON_WEIGHTS | _EVALUATION
    part["trainer"] = {k: v for k, v in part["trainer"].items() if k not in ignored}
    return part


def recipe_hash(recipe: Recipe) -> str:
    """A hash of `training_part` without the optimizer: equal for runs that differ in the optimizer alone."""
    part = {key: value for key, value in training_part(recipe).items() if key != "optimizer"}
    return hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()[:16]


def differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> list[str]:
    """Where two nested dicts differ: ['optimizer.lr: 0.003 there, 0.001 here', ...]."""
    lines = []
    for key in sorted(there.keys() | here.keys()):
        a, b = there.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a!r} there, {b!r} here")
    return lines


# ---
# JSON Schema of a recipe, for editors.

SCHEMA_FILE = "recipe.schema.json"
"""The schema's file beside a recipe. A copied recipe names it by this relative path, which is right on every machine
that the two files are copied to; the path of the installed package is not, and the schema has no address on the web."""
SCHEMA_COMMENT = "Written by `soren-align schema`."
SCHEMA_VERSION = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "dict": "object", "list": "array"}


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe's file; `trainer` lists the keys of the installed TRL."""
    schema = Recipe.model_json_schema()
    properties = schema["properties"]
    properties["extends"] |= {"type": ["string", "array"]}
    properties["trainer"] |= {"properties": _trainer_properties(), "additionalProperties": False}
    soren = schema["$defs"]["SorenSettings"]["properties"]["map"]
    soren["anyOf"] = [*soren.pop("oneOf"), {"enum": list(MAPS)}]
    schema["$defs"]["Data"]["properties"]["streaming"]["anyOf"].append({"type": "boolean"})
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["extends"]}]
    return {"$schema": SCHEMA_VERSION, "$comment": SCHEMA_COMMENT} | schema


def schema_text() -> str:
    """The text of SCHEMA_FILE."""
    return json.dumps(json_schema(), indent=2) + "\n"


def with_modeline(text: str, reference: str = SCHEMA_FILE) -> str:
    """Return a file's text whose first line names the schema `reference`, in the place of an earlier such line."""
    if text.startswith(MODELINE):
        text = text.partition("\n")[2]
    return f"{MODELINE}{reference}\n{text}"


def write_schema(file: Path, text: str) -> bool:
    """Write a schema's text, over an earlier one of ours. Returns False, writing nothing, if the file is another's."""
    if file.is_symlink() or (
        file.exists() and SCHEMA_COMMENT not in file.read_text(encoding="utf-8", errors="replace")
    ):
        return False
    write(file, text)
    return True


def _trainer_properties() -> dict[str, Any]:
    """The schema of each key of `trainer`."""
    properties: dict[str, Any] = {}
    for task in TASKS:
        for field in trl.fields(task).values():
            if field.name in trl.ELSEWHERE:
                continue
            entry: dict[str, Any] = {"description": field.help}
            if field.choices:
                entry["enum"] = [*field.choices, *([None] if "None" in field.types else [])]
            elif field.types <= _TYPES.keys() | {"None"}:
                entry["type"] = sorted(_TYPES.get(t, "null") for t in field.types)
            properties[field.name] = entry
    return properties
