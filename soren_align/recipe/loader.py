"""Load a recipe: merge the recipes that it extends and `--set`, and check every key.

All mistakes are reported together, each with its file, line and key, the finding and the remedy.
Sections are merged key by key; everything else is replaced, lists too. Where a section is a member
of a union and its `name` changes, inherited keys that the new member does not have are ignored and
reported. `data.eval` is replaced where a split becomes a fraction, or the other way round.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from ..core import document, shipped
from ..core.document import Document, Key, Setting, tag_of, value_at
from ..core.errors import MissingError, UserError
from ..core.files import PREFIX, local_path, read_text, resolve_path
from ..core.text import dotted, join_words
from ..tasks import TASKS
from . import trl
from .checks import problems_beyond_schema
from .data_files import labelled_columns, question_columns, thumbs_of
from .data_section import kind_of_eval
from .model import is_local, recorded_quantization, refuse_unusable
from .optimizer import MAP_SECTIONS, OPTIMIZER_SECTIONS
from .schema import Recipe, resolve

UNIONS: dict[Key, dict[str, Any]] = {
    ("optimizer",): OPTIMIZER_SECTIONS,
    ("optimizer", "map"): MAP_SECTIONS,
}
Notify = Callable[[str], object]


OPTIONS: dict[str, tuple[str, ...]] = {
    "--model": ("model", "name_or_path"),
    "--data": ("data", "train", "path"),
    "--output": ("run", "output_dir"),
    "--overwrite": ("run", "overwrite"),
}
"""The keys that have an option of their own. The first three are a run without a recipe's file."""


def load(
    name_or_path: str | None,
    overrides: list[str] | None = None,
    task: str | None = None,
    notify: Notify = lambda _: None,
    options: Mapping[str, Any] | None = None,
    columns: tuple[str | None, str | None] = (None, None),
) -> Recipe:
    """The checked recipe of a file, or of a shipped name such as 'quickstart/sft'; None: of
    `options` alone.

    overrides: 'section.key=value' texts, as after --set; values are YAML. task: the command's; a
    recipe of the other task is an error. notify: receives one line for each inherited key that a
    new optimizer or map does not have.
    options: the values of OPTIONS by name; they come before the overrides. columns: of the
    questions and answers. Raises UserError with every mistake.
    """
    # typer's options are None where they were not written.
    values = {name: value for name, value in (options or {}).items() if value is not None}
    source = _source(name_or_path, task, values, notify)
    # Before any key is checked: each of another tool's keys would be an error.
    refuse_foreign(name_or_path, source.content)
    # Options are settings too, in front of --set: the later one wins. A bare path in data.train
    # becomes a section first, since an option sets one key of it.
    settings = [Setting(name, OPTIONS[name], value) for name, value in values.items()]
    data = source.content.get("data")
    if "--data" in values and isinstance(data, dict) and not isinstance(data.get("train"), dict):
        data["train"] = {}  # a bare path, or several splits
    # A recipe of random weights with another model's name means that model's weights, but for a
    # pre-training.
    model = source.content.get("model") or {}
    if "--model" in values and source.content.get("task") != "pretrain" and "init_seed" in model:
        notify(f"--model {values['--model']}: ignored model.init_seed, which makes random weights")
        del model["init_seed"]
    settings += source.settings(overrides or [])
    suite = value_at(source.content, ("eval", "suite"))
    # A name changes which keys a section may have: keys of the file that the new optimizer or map
    # lacks are dropped before --set is applied, so that those of --set are never dropped.
    for at, union in UNIONS.items():
        parent = value_at(source.content, at[:-1])
        if not isinstance(parent, dict) or at[-1] not in parent:
            continue
        names = [setting.value for setting in settings if setting.key == (*at, "name")]
        if any(setting.key[:-1] == at for setting in settings):  # a bare name becomes a section
            parent[at[-1]] = _as_section(parent[at[-1]], at)
            settings = [
                s._replace(value=_as_section(s.value, at)) if s.key == at else s for s in settings
            ]
        if names and isinstance(section := parent[at[-1]], dict):
            _drop_foreign_keys(section, union, names[-1], at, notify)
    for setting in settings:
        if setting.key != ("extends",):
            source.apply(setting)
            continue
        source.bad_settings.append(
            f"{setting.text}: extends cannot be set here; write this key into a recipe's file"
        )
    _name_columns(source, name_or_path, task, columns, notify)
    recipe = _checked(source, task)
    if recipe.eval is None and isinstance(suite, str):
        recipe._skipped_suite = suite
    return recipe


def _source(
    name_or_path: str | None, task: str | None, values: dict[str, Any], notify: Notify
) -> Document:
    """Return a recipe's file, merged with those that it extends; without a name, the settings of
    the task. values: of OPTIONS.
    """
    if name_or_path is None:  # a task's settings for any model and data, which the options name
        path, needed = shipped.ROOT / f"configs/start/{task}.yaml", [*OPTIONS][:3]
        if not path.is_file() or not values.keys() & needed:
            example = f", or no recipe and {join_words(needed)}" if path.is_file() else ""
            raise UserError(
                f"name a recipe{example}; `soren-align recipes` lists the shipped recipes"
            )
        if missing := [name for name in needed if name not in values]:
            raise UserError(
                f"a command without a recipe needs {join_words(needed)}; add {join_words(missing)}"
            )
        return parse(read_text(path), f"configs/start/{task}.yaml")
    return _read(find(name_or_path), notify)


def _name_columns(
    source: Document,
    name_or_path: str | None,
    task: str | None,
    columns: tuple[str | None, str | None],
    notify: Notify,
) -> None:
    """Set the columns of a file of questions and answers, named by options or recognized."""
    # Values of a wrong type are left: the schema reports them.
    is_sft = source.content.get("task") == "sft"
    is_named, train = any(columns), value_at(source.content, ("data", "train"))
    if is_named and (source.content.get("task") == "dpo" or isinstance(train, list)):
        raise UserError(
            "--question, --answer: are for sft or kto on one file; write `columns` into the recipe's"
            " data section"
        )
    split: dict[str, Any] = train if isinstance(train, dict) else {}
    finds = {"sft": question_columns, "kto": labelled_columns}.get(str(source.content.get("task")))
    may_name = is_named or (name_or_path is None and "columns" not in split)
    path = split.get("path")
    if name_or_path is None and is_sft and isinstance(path, str) and (label := thumbs_of(path)):
        notify(
            f"--data {path}: column '{label}' has thumbs, which sft does not read: it trains bad"
            " answers like good ones. To learn from both, run `soren-align kto`"
        )
    if isinstance(path, str) and may_name and finds and (own := finds(path, *columns)):
        split["columns"] = own
        if not is_named:
            text = (
                "column '{instruction}' is read as the instruction, column '{output}' as the answer"
            ) + ", column '{label}' as its label" * ("label" in own)
            notify(f"--data {path}: {text.format(**own)}")


SOME_EXAMPLES = "shipped:recipes/quickstart/data/chat_train.jsonl"
"""The examples of a recipe whose data are not read."""


def load_for_model(
    model: str, overrides: list[str] | None = None, notify: Notify = lambda _: None
) -> Recipe:
    """The recipe of an SFT of `model` without a recipe's file, whose data are not to be read.

    A folder may lack weights and tokenizer (`refuse_unusable` names these); it has a config.json,
    or an adapter.
    """
    values = [
        "data.eval=null",
        "trainer.eval_strategy=no",
        "trainer.eval_on_start=false",
        *(overrides or []),
    ]
    options = dict(zip(OPTIONS, (model, SOME_EXAMPLES, "runs/inspect", None), strict=True))
    # A folder that cannot be trained is inspected too: what is wrong with it is the answer.
    is_usable = True
    try:
        refuse_unusable(model, None)
    except UserError:
        if not (resolve_path(model) / "config.json").is_file():
            raise
        is_usable = False
    try:
        return load(None, values, "sft", notify, options)
    except UserError:
        if is_usable:
            raise
        # With the name of a hub model in its place, of which no file is looked for.
        recipe = load(None, values, "sft", notify, options | {"--model": "any/model"})
        return recipe.model_copy(
            update={"model": recipe.model.model_copy(update={"name_or_path": model})}
        )


FOREIGN_KEYS = {
    "base_model": "an Axolotl file",
    "finetuning_type": "a LLaMA-Factory file",
    "dataset_mixer": "a file of the alignment handbook",
    "model_name_or_path": "a TRL config",
}
"""Keys by which another tool's file is recognized; a recipe has none of them at its top."""


def refuse_foreign(name: str | None, content: Mapping[str, Any]) -> None:
    """Raise UserError with the command for another tool's file or a study, if this is one."""
    if "candidates" in content and "task" not in content:
        raise UserError(
            f"{name}: is a study, not a recipe; run `soren-align compare {name}`, or name a recipe"
        )
    kind = next((kind for key, kind in FOREIGN_KEYS.items() if key in content), None)
    if kind and not content.keys() & {"task", "run"}:
        remedy = f"run `soren-align import {name} recipe.yaml` to convert the file"
        raise UserError(f"{name}: is {kind}, not a recipe; {remedy}")


def find(name_or_path: str) -> Path:
    """The recipe's file: an existing path, else a shipped name.
    Raises UserError if it is neither.
    """
    # The content is checked when the file is read: no file is read to find this one.
    return document.find(name_or_path, shipped.recipes_and_studies(), "recipe")


def merged_text(path: Path) -> str:
    """The text of a recipe of ours, with the keys that it extends; the comments stay."""
    # The round-trip loader, since `recipes copy` writes this text for people: everywhere else YAML
    # is read without its comments (`core.yaml`), in less time.
    recipe: Any = YAML().load(read_text(path))
    if isinstance(name := recipe.pop("extends", None), str):
        base, over = YAML().load(merged_text(find(name))), recipe
        explanations = (base.ca.comment or [None, None])[1] or []
        _merge(base, over, lambda _: None)
        # The modeline and the title are those of `path`.
        base.ca.comment = [None, [*over.ca.comment[1], *explanations[2:]]]
        recipe = base
    return document.dump(recipe)


def load_text(text: str, name: str = "recipe", on_missing: Notify | None = None) -> Recipe:
    """The checked recipe of YAML text, e.g. of a recipe resolved in another process.

    on_missing: receives the problem of each missing file or folder, and no data are read; None:
    they are errors.
    """
    return _checked(parse(text, name), None, on_missing)


def load_resolved(path: Path) -> Recipe:
    """The recipe in a run folder, of this version; its files and models need not exist any more."""
    return _resolved(read_text(path), str(path))


# Cached: a study reads the recipe of each of its runs several times, 10 ms each.
@functools.lru_cache(maxsize=512)
def _resolved(text: str, path: str) -> Recipe:
    source = parse(text, path)
    # Keys that have left: earlier versions wrote them into every run's recipe, mostly as null.
    run = source.content.get("run")
    if isinstance(run, dict):
        run.pop("published", None)  # it had no effect on the weights
        if run.get("perturb") is None:
            run.pop("perturb", None)
    recipe = source.validate(Recipe)
    if recipe is None:
        raise UserError(
            f"{path}: not a recipe that this version of soren-align can read:",
            *(f"  {dotted(problem.key)}: {problem.message}" for problem in source.problems[:3]),
        )
    return recipe


def to_yaml(recipe: Recipe | dict[str, Any]) -> str:
    """The resolved recipe, every default written out; `load` reads it back to an equal recipe."""
    return document.dump(recipe if isinstance(recipe, dict) else recipe.model_dump())


def parse(text: str, name: str) -> Document:
    """A recipe's YAML as a document, which is not checked."""
    return document.parse(
        text, name, "a recipe is a mapping of sections (task, model, data, optimizer, run, ...)"
    )


def _read(path: Path, notify: Notify, extending: tuple[Path, ...] = ()) -> Document:
    """A file's document merged over the recipe that it `extends`.

    `extends` is then the list of these recipes. extending: the files that extend this one.
    """
    source = parse(read_text(path), str(path))
    raw, lines = source.content, source.lines
    base_name = raw.get("extends")
    _look_beside(path, raw, notify)
    # A map's file is looked for beside the recipe that names it, and then in the working directory.
    own_map = value_at(raw, ("optimizer", "map"))
    if isinstance(own_map, dict) and isinstance(file := own_map.get("file"), str):
        beside = local_path(path.parent / file)
        own_map["file"] = str(beside) if beside.is_file() else file
        own_map.setdefault("name", "file")  # in place of an inherited one
    # A run folder's recipe.yaml has every key and lists what it extended, for the record: merging
    # again would change it if a shipped recipe has changed since.
    is_resolved = isinstance(base_name, list) and raw.keys() >= Recipe.model_fields.keys()
    if "extends" not in raw or is_resolved:
        return source
    where = lines[("extends",)]
    if not isinstance(base_name, str):
        raise UserError(
            f"{where} extends: found {base_name!r}; write a recipe's file or a shipped name"
        )
    try:
        # Beside the file first, then from the working directory, then among the shipped names: a
        # copied folder of recipes stays whole wherever a command is started.
        beside = local_path(path.parent / base_name)
        base_path = find(str(beside if beside.is_file() else base_name))
    except UserError as error:
        raise UserError(f"{where} extends: {error}") from None
    if base_path.resolve() in (path.resolve(), *extending):
        remedy = "remove `extends` from one of them"
        raise UserError(f"{where} extends: this recipe and {base_name} extend each other; {remedy}")
    # Depth first: what the base itself extends is merged under it before it is merged under this
    # one.
    base = _read(base_path, notify, (*extending, path.resolve()))
    raw["extends"] = [base_name, *base.content.pop("extends", [])]
    _merge(base.content, raw, notify)
    return Document(base.content, base.lines | lines)


BESIDE: tuple[Key, ...] = (
    *(("data", split, *end) for split in ("train", "eval") for end in ((), ("path",))),
    ("run", "samples", "prompts"),
    ("eval", "suite"),
)
"""Keys whose paths are looked for in the working directory, and then beside the recipe."""
WITH_THEM: tuple[Key, ...] = (("model", "name_or_path"), ("run", "output_dir"))
"""Keys of runs, which belong to the folder of the data."""


def _look_beside(path: Path, raw: dict[str, Any], notify: Notify) -> None:
    """If data or suite of a recipe lie only beside it, make its paths those of its folder."""
    moved = False
    for section, key, text in _paths(path, raw, BESIDE):
        beside, here = path.parent / text, Path(text)
        if not beside.exists() or text in shipped.suites():
            continue
        if here.exists():
            notify(f"{path} {key}: {here} is read; {beside} exists too, beside the recipe")
        else:
            section[key.rpartition(".")[2]], moved = str(beside), True
    if not moved:
        return
    for section, key, text in _paths(path, raw, WITH_THEM):
        # A run of this folder, whether it is there yet or not; else a model's name on the hub.
        if key == "run.output_dir" or (path.parent / text).exists() or is_local(text):
            section[key.rpartition(".")[2]] = str(path.parent / text)
    notify(f"{path}: its paths are those of its folder, {path.parent}")


def _paths(
    path: Path, raw: dict[str, Any], keys: tuple[Key, ...]
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """(section, dotted key, path) of each key whose path another folder would change."""
    for key in keys:
        section, text = value_at(raw, key[:-1]), value_at(raw, key)
        if not isinstance(section, dict) or not isinstance(text, str) or "\0" in text:
            continue
        if text.startswith((PREFIX, "~")) or (path.parent / text).resolve() == Path(text).resolve():
            continue
        yield section, dotted(key), text


def _merge(base: Any, over: Any, notify: Notify, at: Key = ()) -> None:
    """Write the values of `over` into `base`, with the comments of those that have some.
    at: the key of both.
    """
    if at in UNIONS:
        # `optimizer: {name: muon}` over a recipe of Soren keeps lr and drops `map`, which Muon does
        # not have. A key that is written in the new file itself is never dropped: there it is a
        # mistake.
        _drop_foreign_keys(base, UNIONS[at], over.get("name"), at, notify)
    for key, value in over.items():
        where = (*at, key)
        inherited = _as_section(base.get(key), where)
        # A split merged with a fraction would be neither.
        is_other = where == ("data", "eval") and kind_of_eval(inherited) != kind_of_eval(value)
        if isinstance(inherited, dict) and isinstance(value, dict) and not is_other:
            _merge(inherited, value, notify, where)
            value = inherited
        base[key] = value
    if isinstance(base, CommentedMap):
        base.ca.items.update(over.ca.items)


def _as_section(value: Any, at: Key) -> Any:
    """The bare name of a union's member as a section; anything else unchanged."""
    return {"name": value} if at in UNIONS and isinstance(value, str) else value


def _drop_foreign_keys(
    section: dict[str, Any], union: dict[str, Any], name: Any, at: Key, notify: Notify
) -> None:
    """Delete the keys of `section` that other members of its union have and the member `name` does
    not.
    """
    if not isinstance(name, str) or name not in union or name == (old := tag_of(section, union)):
        return
    # Only keys that some member has: a misspelt key stays, and is reported
    # (test_a_misspelt_key_of_the_base_is_not_left_out_silently).
    others = {key for member in union.values() for key in member.model_fields}
    foreign = [key for key in section if key in others - union[name].model_fields.keys()]
    if foreign:
        notify(
            f"{dotted(at)}.name={name}: ignored {', '.join(foreign)} of {old}, which {name} does"
            " not have"
        )
    for key in foreign:
        del section[key]


def _checked(source: Document, task: str | None, on_missing: Notify | None = None) -> Recipe:
    """The resolved recipe; raises UserError with all problems, in the order of lines."""
    # Types and unknown keys first, on the validated recipe; TRL's keys, files and conflicts on the
    # raw data; then all of it as one error.
    recipe, raw = source.validate(Recipe), source.content
    kind, trainer = raw.get("task"), raw.get("trainer")
    if isinstance(kind, str) and kind in TASKS:
        if task and kind != task:
            source.report(
                ("task",), f"found {kind}, but the command is {task}; run `soren-align {kind}`"
            )
        if isinstance(trainer, dict):
            for key, message in trl.problems(kind, trainer).items():
                source.report(("trainer", key), message)
    # Files and conflicts are checked on the raw data too: every mistake in one error, also beside
    # wrong types. An import reports files of another machine and continues.
    for problem in problems_beyond_schema(raw, reads_data=on_missing is None):
        if on_missing and problem.kind == MissingError.kind:
            on_missing(f"{dotted(problem.key)}: {problem.message}")
        else:
            source.problems.append(problem)
    source.refuse_problems()
    assert recipe is not None
    recipe = resolve(recipe)
    # The quantization that the starting adapter was trained on.
    if recorded := recorded_quantization(recipe.model.name_or_path):
        model = recipe.model.model_copy(update={"quantize": recorded.quantize})
        recipe = recipe.model_copy(update={"model": model})
    return recipe


# Keys of `trainer` that do not change the trained weights: logging, evaluation and saving may
# change at a resume. With run.early_stopping, evaluation does change them.
_EVALUATION = {"eval_strategy", "eval_steps", "eval_on_start", "eval_delay"}
_NO_EFFECT_ON_WEIGHTS = {
    "logging_steps",
    "logging_first_step",
    "logging_strategy",
    "report_to",
    "run_name",
    "project",
}
_NO_EFFECT_ON_WEIGHTS |= {"save_steps", "save_strategy", "save_total_limit", "hub_private_repo"}
_NO_EFFECT_ON_WEIGHTS |= {"trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"}


def training_part(recipe: Recipe) -> dict[str, Any]:
    """The part of the recipe that determines the trained weights: a run resumes only with an equal
    one.
    """
    # Whole sections, and then without what cannot change weights: a new key counts until somebody
    # has decided that it does not.
    part = recipe.model_dump(include={"task", "model", "data", "optimizer", "trainer"})
    part["run"] = recipe.run.model_dump(include={"parallel", "global_batch_size", "early_stopping"})
    # None of these changes weights: the cache is a copy, and retention examples are only measured.
    del part["data"]["cache"], part["data"]["retention"], part["data"]["eval_part"]
    evaluation = part["data"].pop("eval") or {}
    if "path" not in evaluation and evaluation:  # the other examples are trained on
        part["data"]["eval"] = evaluation
    # Refusing and dropping are equal up to the first bad example, which ends the run.
    if recipe.data.streaming:
        sources = part["data"]["train"]
        for source in sources if isinstance(sources, list) else [sources]:
            del source["bad_examples"]
    ignored = (
        _NO_EFFECT_ON_WEIGHTS if recipe.run.early_stopping else _NO_EFFECT_ON_WEIGHTS | _EVALUATION
    )
    part["trainer"] = {k: v for k, v in part["trainer"].items() if k not in ignored}
    return part


def recipe_hash(recipe: Recipe, *, with_optimizer: bool = False) -> str:
    """A hash of `training_part`; without the optimizer it is equal for runs that differ in the
    optimizer alone.

    Keys without a value do not count, so that a run has the same hash in a later version with more
    optional keys.
    """
    part = {
        key: value
        for key, value in training_part(recipe).items()
        if with_optimizer or key != "optimizer"
    }
    # The value null means the same as a missing key. Before this a new key made every earlier study
    # unreadable (notes/log.md, 2026-11-26).
    part = _without_nulls(part)
    return hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list | tuple) else value


def differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> list[str]:
    """Describe where two nested dicts differ: ['optimizer.lr: 0.001 instead of 0.003', ...]; the
    second value is that of `there`.
    """
    lines = []
    for key in sorted(there.keys() | here.keys()):
        a, b = there.get(key), here.get(key)
        if key == "composition" and a != b:  # of a map: hundreds of digits
            lines.append(f"{prefix}composition: the content of the map's file has changed")
        elif isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {b!r} instead of {a!r}")
    return lines


SCHEMA_FILE = "recipe.schema.json"
"""The schema's file beside a recipe. A copied recipe names it by this relative path, which is right
on every machine that the two files are copied to; the path of the installed package is not, and the
schema has no address on the web."""
_TYPES = {
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "str": "string",
    "dict": "object",
    "list": "array",
}


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe's file; `trainer` lists the keys of the installed TRL."""
    trainer: dict[str, Any] = {}
    for field in (field for task in TASKS for field in trl.fields(task).values()):
        if field.name in trl.ELSEWHERE:
            continue
        entry: dict[str, Any] = {"description": field.help}
        trainer[field.name] = entry
        if field.choices:
            entry["enum"] = [*field.choices, *([None] if "None" in field.types else [])]
        elif field.types <= _TYPES.keys() | {"None"}:
            entry["type"] = sorted(_TYPES.get(t, "null") for t in field.types)
    # pydantic's schema is of the complete, strict recipe. An editor shows it for a file, in which
    # some values are shorter: names in place of sections, and whatever `extends` has.
    schema = Recipe.model_json_schema()
    properties = schema["properties"]
    properties["extends"] |= {"type": ["string", "array"]}
    properties["trainer"] |= {"properties": trainer, "additionalProperties": False}
    soren = schema["$defs"]["SorenSettings"]["properties"]["map"]
    soren["anyOf"] = [*soren.pop("oneOf"), {"enum": list(MAP_SECTIONS)}]
    schema["$defs"]["Data"]["properties"]["streaming"]["anyOf"].append({"type": "boolean"})
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["extends"]}]
    return schema
