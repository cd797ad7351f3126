"""Others' flat YAML as a recipe: TRL's, the alignment handbook's, Axolotl's.

Pure: a dict goes in, a recipe's dict comes out, with a note on what became of each key. No key is lost: it is kept,
renamed, dropped with a reason, or unknown. What cannot be carried over and would change the weights is marked.
"""

import difflib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from ..recipe import trl_config
from ..recipe.sections import Task
from . import key_tables as names
from . import lora_keys
from .data_keys import read_data
from .key_tables import Note, among, number
from .task import told_task

_NESTED = ("model_init_kwargs", "special_tokens", "trl")  # their keys are read as if they stood at the top
_BOOLS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}  # YAML 1.1's
_MIN_LR = "cosine_min_lr_ratio"


@dataclass
class Translation:
    """A recipe made of another tool's file."""

    task: Task
    recipe: dict[str, dict[str, Any]]
    """The recipe's sections, `task` aside."""
    ours: dict[str, str] = field(default_factory=dict)
    """Dotted keys that the source does not say -> why they stand there."""
    notes: list[Note] = field(default_factory=list)
    """One per key of the source, and more for what stands inside of a mixture."""


def translate(source: dict[str, Any], name: str, folder: str = "", task: Task | None = None) -> Translation:
    """The recipe that says what `source` says.

    name, folder: the file's, without suffix; they tell the task where its keys do not.
    task: sft or dpo, whatever the source looks like.
    UserError where the task is neither or cannot be told, and where no dataset is named.
    """
    if isinstance(source.get("optimizer"), dict) or isinstance(source.get("trainer"), dict):
        raise UserError("this is a recipe already: the keys stand in sections")
    flat = flattened(source)
    task = task or told_task(flat, name, folder)
    data = read_data(flat, _asks_for_eval(flat))
    sections: dict[str, dict[str, Any]] = {"model": {}, "data": data.section, "optimizer": {}, "trainer": {}, "run": {}}
    made = Translation(task, sections, data.ours, data.notes)
    noted = {note.key for note in made.notes}
    # What has its own name goes first: it is meant where an older name stands there too.
    for key in sorted((k for k in flat if k not in noted), key=lambda k: _last(k) in names.RENAMED):
        made.notes.append(_carry(key, flat, made))
    _complete(made, flat, name)
    return made


def flattened(source: dict[str, Any]) -> dict[str, Any]:
    """The source's keys, those of _NESTED brought to the top by dotted names: all that `translate` accounts for."""
    flat: dict[str, Any] = {}
    for key, value in source.items():
        inside = value if key in _NESTED and isinstance(value, dict) and value else None
        flat |= {f"{key}.{k}": v for k, v in inside.items()} if inside else {str(key): value}
    return flat


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _asks_for_eval(flat: dict[str, Any]) -> bool:
    asked = [flat.get(key) for key in ("eval_strategy", "evaluation_strategy", "evals_per_epoch")]
    if "base_model" in flat:  # Axolotl measures every eval_steps without being asked for a strategy
        asked.append(flat.get("eval_steps"))
    return any(value not in (None, False, "no", 0) for value in asked)


def _carry(key: str, flat: dict[str, Any], made: Translation) -> Note:
    """What becomes of one key, which is done to `made`."""
    name, value = _last(key), flat[key]
    target = names.RENAMED.get(name)
    lora = lora_keys.carry(key, name, value, flat, made.recipe["model"]) if lora_keys.is_asked(flat) else None
    if special := lora or _special(key, name, value, flat, made):
        return special
    if target is None:
        for table, changes in ((names.DROPPED, False), (names.CHANGES, True)):
            for reason, patterns in table.items():
                if among(name, patterns):
                    return _left_out(key, name, value, reason, changes, flat)
    known = trl_config.fields(made.task)
    if target is None and name not in known and name not in trl_config.ELSEWHERE:
        if any(name in trl_config.fields(task) for task in trl_config.CLASSES):
            return Note(key, "dropped", f"TRL's {trl_config.CLASSES[made.task]} has no such key")
        close = difflib.get_close_matches(name, [*names.RENAMED, *known], n=1, cutoff=0.8)
        return Note(key, "unknown", f"did you mean {close[0]}?" if close else "")
    if target is None and name in trl_config.ELSEWHERE:
        return Note(key, "dropped", trl_config.ELSEWHERE[name])
    if value is None and not (name in known and "None" in known[name].types and known[name].default is not None):
        return Note(key, "dropped", "null says nothing")
    return _put(key, name, target or f"trainer.{name}", value, made)


def _special(key: str, name: str, value: Any, flat: dict[str, Any], made: Translation) -> Note | None:
    """Keys whose value decides what they become."""
    optimizer, betas = made.recipe["optimizer"], ("adam_beta1", "adam_beta2")
    if value in (None, {}) and name in (*_NESTED, "optim", "optimizer", *betas, "torch_dtype", "dtype", _MIN_LR):
        return Note(key, "dropped", "null says nothing")
    if name in ("optim", "optimizer"):
        value = str(value)
        optimizer["name"] = "muon" if value == "muon" else "adamw"
        if value == "muon":
            return Note(key, "renamed", "optimizer.name: muon; adjust_lr_fn may not be what it was there", True)
        if among(value, names.ADAMW):
            return Note(key, "renamed", "optimizer.name: adamw")
        states = "with float32 states" if "adamw" in value and "bit" in value else "at the same rate"
        return Note(key, "renamed", f"optimizer.name: adamw {states}; there is no {value} here", True)
    if name in betas:
        optimizer.setdefault("betas", [0.9, 0.999])[betas.index(name)] = number(value)
        return Note(key, "renamed", "optimizer.betas")
    if name in ("torch_dtype", "dtype"):
        made.recipe["model"]["dtype"] = "float32"
        if value == "float32":
            return Note(key, "renamed", "model.dtype")
        made.ours["model.dtype"] = f"{value} in the source"
        return Note(key, "renamed", f"model.dtype: float32; {names.DTYPE}", True)
    if name == "chat_template" and isinstance(value, str) and _is_zephyr(value):
        made.recipe["model"]["chat_template"] = "zephyr"
        return Note(key, "renamed", "model.chat_template: zephyr")
    if name == "chat_template_path" and value is not None and not str(value).endswith(".jinja"):
        words = f"{value}: only its template, as a .jinja file, can be named as model.chat_template"
        return Note(key, "dropped", words, True)
    if name == "dataset_text_field" and value not in (None, "text"):
        return Note(key, "dropped", f"{value}: plain text is read from the column text, and from no other", True)
    if name == "warmup_steps" and not value and flat.get("warmup_ratio"):
        return Note(key, "dropped", "warmup_ratio says it")
    if name == "rl":
        if value == "ipo":
            made.recipe["trainer"]["loss_type"] = ["ipo"]
        return Note(key, "renamed", f"task: {made.task}")
    has_min_lr = flat.get(_MIN_LR) is not None and flat.get("lr_scheduler") in (None, "cosine")
    if name == _MIN_LR and not has_min_lr:
        return Note(key, "dropped", "only cosine has one", True)
    if name == _MIN_LR:
        made.recipe["trainer"] |= {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": number(value)},
        }
        return Note(key, "renamed", "trainer.lr_scheduler_kwargs")
    if name == "lr_scheduler" and has_min_lr:
        return Note(key, "renamed", "trainer.lr_scheduler_type: cosine_with_min_lr")
    if among(name, names.NEEDS_EVAL) and "eval" not in made.recipe["data"] and value not in (None, False, "no", 0):
        return Note(key, "dropped", "no held-out split is named; write data.eval", name == "load_best_model_at_end")
    return None


def _is_zephyr(template: str) -> bool:
    return hashlib.sha256("".join(template.split()).encode()).hexdigest() == names.ZEPHYR


def _left_out(key: str, name: str, value: Any, reason: str, changes: bool, flat: dict[str, Any]) -> Note:
    if changes and (value in (None, False, 0, "", "no") or value in ([], {}) or (name, value) in names.OFF):
        return Note(key, "dropped", "off there too")
    for patterns, flags in names.ONLY_WITH.items():
        if among(name, patterns) and not any(flat.get(flag) for flag in flags):
            return Note(key, "dropped", f"nobody reads it without {' or '.join(flags)}")
    return Note(key, "dropped", reason, changes)


def _put(key: str, name: str, target: str, value: Any, made: Translation) -> Note:
    section, _, ours = target.partition(".")
    there = made.recipe[section]
    word = names.VALUES.get((name, value)) if isinstance(value, bool | int | str) else None
    value, effect = word or (value, "")
    if ours in there:
        return Note(key, "dropped", f"{target} is said by another key", there[ours] != value)
    if section == "trainer":
        known = trl_config.fields(made.task)
        if ours not in known:
            return Note(key, "dropped", f"TRL's {trl_config.CLASSES[made.task]} has no {ours}")
        value = _typed(value, known[ours].types)
        if problem := trl_config.problems(made.task, {ours: value}).get(ours):
            return Note(key, "dropped", problem, not among(ours, names.HARMLESS))
    elif section == "optimizer":
        value = number(value)
    there[ours] = value
    if name == ours and section == "trainer" and not word:
        return Note(key, "kept")
    if target == "optimizer.weight_decay" and value:
        effect = "here matrices decay, there embeddings and head too (aux_weight_decay has norms with them)"
    words = target + (f": {str(value).lower()}" if word else "") + (f"; {effect}" if effect else "")
    return Note(key, "renamed", words, bool(effect))


def _typed(value: Any, types: Iterable[str]) -> Any:
    """As TRL's own reader of commands takes a text, and as one value stands for a list of one."""
    kinds = set(types) - {"None"}
    if kinds == {"list"} and not isinstance(value, list) and value is not None:
        return [value]
    if isinstance(value, str) and kinds == {"bool"}:
        return _BOOLS.get(value.lower(), value)
    if isinstance(value, str) and kinds & {"int", "float"} and "str" not in kinds:
        value = number(value)
        return int(value) if isinstance(value, float) and "float" not in kinds and value.is_integer() else value
    return value


def _complete(made: Translation, flat: dict[str, Any], name: str) -> None:
    """What a recipe needs and the source leaves to its tool, or does not know."""
    optimizer, trainer = made.recipe["optimizer"], made.recipe["trainer"]

    def say(section: dict[str, Any], key: str, value: Any, why: str) -> None:
        if key not in section:
            section[key] = value
            made.ours[f"{next(n for n, s in made.recipe.items() if s is section)}.{key}"] = why

    if lora_keys.is_asked(flat):
        made.ours |= lora_keys.defaults(flat, made.recipe["model"])
    tool = "Axolotl's" if "base_model" in flat else "TRL's"
    if "base_model" in flat:
        for key, value in names.AXOLOTL.items():
            say(trainer, key, value, "Axolotl's default")
        if made.task == "sft":
            say(trainer, "assistant_only_loss", True, "Axolotl's default; needs a template that marks the answers")
        if "eval_steps" in trainer:
            say(trainer, "eval_strategy", "steps", "as Axolotl takes eval_steps")
    say(optimizer, "name", "adamw", f"{tool} default")
    say(optimizer, "lr", trl_config.fields(made.task)["learning_rate"].default, "TRL's default")
    say(optimizer, "aux_lr", optimizer["lr"], "lr, for embeddings, head and norms")
    say(optimizer, "weight_decay", 0.0, f"{tool} default")
    say(made.recipe["run"], "output_dir", f"runs/{name}", "where the run is written")
