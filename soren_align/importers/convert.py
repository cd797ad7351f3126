"""Convert the flat YAML of TRL, the alignment handbook, Axolotl and LLaMA-Factory to a recipe.

Pure functions from a dict to a recipe's dict and one note per key: a key is unchanged, renamed, dropped with a reason,
or unknown. A dropped key that changes the trained weights is marked.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import UserError, closest
from ..core.optimizer_settings import BETAS
from ..recipe import trl
from ..tasks import TASKS, TaskName
from . import attention_keys, lora_keys, per_epoch_keys, streaming_keys, tool_defaults
from . import key_tables as names
from .data_keys import read_data, trains_completions
from .key_tables import Note, matches, number
from .task import task_of_source

_NESTED = ("model_init_kwargs", "special_tokens", "trl")  # sections whose keys are read as if at the top level
_BETAS = ("adam_beta1", "adam_beta2")
_BOOLS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}  # YAML 1.1's
_MIN_LR = "cosine_min_lr_ratio"


@dataclass
class Conversion:
    """A recipe made from another tool's file."""

    task: TaskName
    recipe: dict[str, dict[str, Any]]
    """The recipe's sections, `task` aside."""
    ours: dict[str, str] = field(default_factory=dict)
    """Dotted key of each value that is not from the source -> its reason."""
    notes: list[Note] = field(default_factory=list)
    """One per key of the source, and one per key inside a mixture."""
    template_path: str | None = None
    """Where an inline template may be written; None: nowhere."""
    template: str | None = None
    """The inline template to write there."""


def convert(
    source: dict[str, Any],
    name: str,
    folder: str = "",
    task: TaskName | None = None,
    template_path: str | None = None,
) -> Conversion:
    """The recipe that trains as `source` does.

    name, folder: the file's, without suffix; the task is taken from them if no key determines it. task: sft or dpo,
    instead of the source's own. template_path: for an inline template, which the caller writes. Raises UserError if the
    task is another or unknown, or if no dataset is named.
    """
    if isinstance(source.get("optimizer"), dict) or isinstance(source.get("trainer"), dict):
        raise UserError("this is a recipe already: the keys stand in sections")
    flat = flattened(source)
    task = task or task_of_source(flat, name, folder)
    data = read_data(flat, _evaluates(flat))
    sections: dict[str, dict[str, Any]] = {"model": {}, "data": data.section, "optimizer": {}, "trainer": {}, "run": {}}
    conversion = Conversion(task, sections, data.ours, data.notes, template_path)
    noted = {note.key for note in conversion.notes}
    # Current names first: of a current and an older name for one key, the current one counts.
    for key in sorted((k for k in flat if k not in noted), key=lambda k: _last(k) in names.RENAMED):
        conversion.notes.append(_convert_key(key, flat, conversion))
    _add_defaults(conversion, flat, name)
    return conversion


def flattened(source: dict[str, Any]) -> dict[str, Any]:
    """The source's keys, those inside _NESTED by dotted names. `convert` makes one note for each."""
    flat: dict[str, Any] = {}
    for key, value in source.items():
        inside = value if key in _NESTED and isinstance(value, dict) and value else None
        flat |= {f"{key}.{k}": v for k, v in inside.items()} if inside else {str(key): value}
    return flat


def tool_of(flat: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """("TRL's", "Axolotl's" or "LLaMA-Factory's"; its defaults that differ from TRL's)."""
    if "base_model" in flat:
        return "Axolotl's", tool_defaults.axolotl(flat)
    if not tool_defaults.is_llama_factory(flat):
        return "TRL's", {}
    has_precision = any(flat.get(key) for key in ("fp16", "bf16", "pure_bf16"))
    return "LLaMA-Factory's", {k: v for k, v in tool_defaults.LLAMA_FACTORY.items() if k != "bf16" or not has_precision}


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _evaluates(flat: dict[str, Any]) -> bool:
    """Whether the source computes a loss on held-out examples during training."""
    values = [flat.get(key) for key in ("eval_strategy", "evaluation_strategy", "evals_per_epoch")]
    if "base_model" in flat:  # Axolotl evaluates every eval_steps without a strategy
        values.append(flat.get("eval_steps"))
    return any(value not in (None, False, "no", 0) for value in values)


def _convert_key(key: str, flat: dict[str, Any], conversion: Conversion) -> Note:
    """Write one key of the source into `conversion`, and return the note on it."""
    name, value = _last(key), flat[key]
    target = names.RENAMED.get(name)
    lora = (
        lora_keys.convert(key, name, value, flat, conversion.recipe["model"]) if lora_keys.trains_lora(flat) else None
    )
    if special := lora or _special(key, name, value, flat, conversion):
        return special
    if target is None:
        for table, changes in ((names.DROPPED, False), (names.CHANGES, True)):
            for patterns, reason in table:
                if matches(name, patterns):
                    return _left_out(key, name, value, reason, changes, flat)
    known = trl.fields(conversion.task)
    if target is None and name not in known and name not in trl.ELSEWHERE:
        if any(name in trl.fields(task) for task in TASKS):
            return Note(key, "dropped", f"TRL's {TASKS[conversion.task].config} has no such key")
        similar = closest(name, [*names.RENAMED, *known], cutoff=0.8)
        return Note(key, "unknown", f"did you mean {similar}?" if similar else "")
    if target is None and name in trl.ELSEWHERE:
        return Note(key, "dropped", trl.ELSEWHERE[name])
    if value is None and not (name in known and "None" in known[name].types and known[name].default is not None):
        return Note(key, "dropped", "null has no effect")
    return _put(key, name, target or f"trainer.{name}", value, conversion)


def _special(key: str, name: str, value: Any, flat: dict[str, Any], conversion: Conversion) -> Note | None:
    """The note on a key whose value decides its target; None for any other key."""
    nullable = (*_NESTED, "optim", "optimizer", *_BETAS, "torch_dtype", "dtype", _MIN_LR)
    if value in (None, {}) and name in nullable:
        return Note(key, "dropped", "null has no effect")
    is_no_key = name in attention_keys.PACKING and "packing" not in trl.fields(conversion.task)
    for of_keys in (per_epoch_keys, streaming_keys, *([] if is_no_key else [attention_keys])):
        if note := of_keys.convert(key, name, value, flat, conversion.recipe):
            return note
    for special in (_optimizer_key, _model_key, _schedule_key):
        if note := special(key, name, value, flat, conversion):
            return note
    if name == "rl":
        if value == "ipo":
            conversion.recipe["trainer"]["loss_type"] = ["ipo"]
        return Note(key, "renamed", f"task: {conversion.task}")
    has_eval = "eval" in conversion.recipe["data"]
    if name in names.EARLY_STOPPING and value and {"early_stopping_patience", "early_stopping_steps"} & flat.keys():
        if not has_eval or any(flat.get(key) in ("no", False) for key in ("eval_strategy", "evaluation_strategy")):
            return Note(key, "dropped", "training runs to its end: nothing is evaluated during it", True)
        target = names.EARLY_STOPPING[name]
        conversion.recipe["run"].setdefault("early_stopping", {})[target] = number(value)
        return Note(key, "renamed", f"run.early_stopping.{target}")
    if matches(name, names.NEEDS_EVAL) and not has_eval and value not in (None, False, "no", 0):
        return Note(key, "dropped", "no held-out split is named; write data.eval", name == "load_best_model_at_end")
    return None


def _optimizer_key(key: str, name: str, value: Any, _: dict[str, Any], conversion: Conversion) -> Note | None:
    optimizer = conversion.recipe["optimizer"]
    if name in ("optim", "optimizer"):
        value = str(value)
        optimizer["name"] = "muon" if value == "muon" else "adamw"
        if value == "muon":
            return Note(key, "renamed", "optimizer.name: muon; adjust_lr_fn may differ from the source's", True)
        if matches(value, names.ADAMW):
            return Note(key, "renamed", "optimizer.name: adamw")
        if matches(value, names.ADAMW_8BIT):
            optimizer["states"] = "8bit"
            return Note(key, "renamed", "optimizer.name: adamw, optimizer.states: 8bit")
        return Note(key, "renamed", f"optimizer.name: adamw at the same rate; there is no {value} here", True)
    if name == "use_muon" and value is True:
        optimizer["name"] = "muon"
        return Note(key, "renamed", "optimizer.name: muon; adjust_lr_fn may differ from the source's", True)
    if name in _BETAS:
        optimizer.setdefault("betas", list(BETAS))[_BETAS.index(name)] = number(value)
        return Note(key, "renamed", "optimizer.betas")
    return None


def _model_key(key: str, name: str, value: Any, flat: dict[str, Any], conversion: Conversion) -> Note | None:
    model = conversion.recipe["model"]
    if name == "pure_bf16" and value is True:
        model["dtype"], conversion.recipe["trainer"]["bf16"] = "float32", True
        return Note(key, "renamed", f"trainer.bf16, model.dtype: float32; {names.DTYPE}", True)
    if name == "train_from_scratch" and value is True:
        seed = flat.get("seed")
        model["init_seed"] = seed if isinstance(seed, int) else tool_defaults.SEED
        return Note(key, "renamed", "model.init_seed")
    if name in ("torch_dtype", "dtype"):
        model["dtype"] = "float32"
        if value == "float32":
            return Note(key, "renamed", "model.dtype")
        conversion.ours["model.dtype"] = f"{value} in the source"
        return Note(key, "renamed", f"model.dtype: float32; {names.DTYPE}", True)
    if name == "chat_template" and isinstance(value, str) and _is_zephyr(value):
        model["chat_template"] = "zephyr"
        return Note(key, "renamed", "model.chat_template: zephyr")
    if name in ("chat_template", "chat_template_jinja") and isinstance(value, str) and "{{" in value:
        if conversion.template_path is None:
            reason = "the tokenizer's own chat template is used; with a DEST, this one is written beside the recipe"
            return Note(key, "dropped", reason, True)
        conversion.template, model["chat_template"] = value, conversion.template_path
        return Note(key, "renamed", f"model.chat_template: {conversion.template_path}")
    if name == "chat_template" and value == "jinja" and flat.get("chat_template_jinja"):
        return Note(key, "dropped", "the template is that of chat_template_jinja")
    if name == "chat_template_path" and value is not None and not str(value).endswith(".jinja"):
        explanation = f"{value}: only its template, as a .jinja file, can be named as model.chat_template"
        return Note(key, "dropped", explanation, True)
    return None


def _schedule_key(key: str, name: str, value: Any, flat: dict[str, Any], conversion: Conversion) -> Note | None:
    if name == "warmup_steps" and not value and flat.get("warmup_ratio"):
        return Note(key, "dropped", "replaced by warmup_ratio")
    has_min_lr = flat.get(_MIN_LR) is not None and flat.get("lr_scheduler") in (None, "cosine")
    if name == _MIN_LR and not has_min_lr:
        return Note(key, "dropped", "only the cosine schedule has a least rate", True)
    if name == _MIN_LR:
        conversion.recipe["trainer"] |= {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": number(value)},
        }
        return Note(key, "renamed", "trainer.lr_scheduler_kwargs")
    if name == "lr_scheduler" and has_min_lr:
        return Note(key, "renamed", "trainer.lr_scheduler_type: cosine_with_min_lr")
    return None


def _is_zephyr(template: str) -> bool:
    return hashlib.sha256("".join(template.split()).encode()).hexdigest() == names.ZEPHYR


def _left_out(key: str, name: str, value: Any, reason: str, changes: bool, flat: dict[str, Any]) -> Note:
    if changes and (value in (None, False, 0, "", "no") or value in ([], {}) or (name, value) in names.OFF):
        return Note(key, "dropped", "off in the source too")
    for patterns, flags in names.ONLY_WITH.items():
        if matches(name, patterns) and not any(flat.get(flag) for flag in flags):
            return Note(key, "dropped", f"has no effect without {' or '.join(flags)}")
    return Note(key, "dropped", reason, changes)


def _put(key: str, name: str, target: str, value: Any, conversion: Conversion) -> Note:
    """Write the value at the recipe's key `target`."""
    section, _, ours = target.partition(".")
    target_section = conversion.recipe[section]
    word = names.VALUES.get((name, value)) if isinstance(value, bool | int | str) else None
    value, effect = word or (value, "")
    if ours in target_section:
        return Note(key, "dropped", f"{target} is set by another key", target_section[ours] != value)
    if section == "trainer":
        known = trl.fields(conversion.task)
        if ours not in known:
            return Note(key, "dropped", f"TRL's {TASKS[conversion.task].config} has no {ours}")
        value = _typed(value, known[ours].types)
        if problem := trl.problems(conversion.task, {ours: value}).get(ours):
            if ours == "loss_type":  # another spelling would be another loss
                losses = ", ".join(map(str, value)) if isinstance(value, list) else value
                problem = f"{losses}: not a loss of TRL's {TASKS[conversion.task].config}, whose default is trained"
            return Note(key, "dropped", problem, not matches(ours, names.HARMLESS))
    elif section == "optimizer":
        value = number(value)
    target_section[ours] = value
    if name == ours and section == "trainer" and not word:
        return Note(key, "unchanged")
    if target == "optimizer.weight_decay" and value:
        effect = (
            "decays matrices only; in the source embeddings and head too (aux_weight_decay would decay norms as well)"
        )
    explanation = target + (f": {str(value).lower()}" if word else "") + (f"; {effect}" if effect else "")
    return Note(key, "renamed", explanation, bool(effect))


def _typed(value: Any, types: Iterable[str]) -> Any:
    """The value as TRL's command line would read the text; a single value where a list is needed is a list of one."""
    kinds = set(types) - {"None"}
    if kinds == {"list"} and not isinstance(value, list) and value is not None:
        return [value]
    if isinstance(value, str) and kinds == {"bool"}:
        return _BOOLS.get(value.lower(), value)
    if isinstance(value, str) and kinds & {"int", "float"} and "str" not in kinds:
        value = number(value)
        return int(value) if isinstance(value, float) and "float" not in kinds and value.is_integer() else value
    return value


def _add_defaults(conversion: Conversion, flat: dict[str, Any], name: str) -> None:
    """Add the keys that a recipe needs and the source leaves to its tool's defaults, or does not have."""
    optimizer = conversion.recipe["optimizer"]

    def add(section: str, key: str, value: Any, reason: str) -> None:
        if key not in conversion.recipe[section]:
            conversion.recipe[section][key] = value
            conversion.ours[f"{section}.{key}"] = reason

    if lora_keys.trains_lora(flat):
        conversion.ours |= lora_keys.defaults(flat, conversion.recipe["model"])
    tool, defaults = tool_of(flat)
    for key, value in defaults.items():
        add("trainer", key, value, f"{tool} default")
    if tool != "TRL's" and conversion.task == "sft" and not trains_completions(flat):
        add("trainer", "assistant_only_loss", True, f"{tool} default; needs a template that marks the answers")
    if strategy := attention_keys.default_strategy(flat, conversion.recipe["trainer"]):
        add("trainer", "packing_strategy", *strategy)
    if "base_model" in flat and "eval_steps" in conversion.recipe["trainer"]:
        add("trainer", "eval_strategy", "steps", "as Axolotl with eval_steps")
    add("optimizer", "name", "adamw", f"{tool} default")
    if tool == "LLaMA-Factory's":
        add("optimizer", "lr", tool_defaults.LLAMA_FACTORY_LR, "transformers' default, LLaMA-Factory's too")
    add("optimizer", "lr", trl.fields(conversion.task)["learning_rate"].default, "TRL's default")
    add("optimizer", "aux_lr", optimizer["lr"], "lr, for embeddings, head and norms")
    add("optimizer", "weight_decay", 0.0, f"{tool} default")
    add("run", "output_dir", f"runs/{name}", "the run folder")
