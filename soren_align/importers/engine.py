"""Convert the YAML of TRL, the alignment handbook, Axolotl and LLaMA-Factory to a recipe.

`convert` is a pure function from a dict to a recipe's dict and one note per key: a key is
unchanged, renamed, dropped with a reason, left to the user with its value, or unknown. keys.toml
has the keys with one counterpart; the functions in SPECIAL are for those whose value, or whose
neighbours, decide the counterpart.
"""

import re
from typing import Any

from ..core.errors import UserError, closest
from ..core.optimizer_settings import BETAS
from ..recipe import trl
from ..recipe.model import attention_problems
from ..tasks import TASKS, TaskName
from .datasets import ROOTS, read_data
from .keys import NOT_CONVERTED, RENAMED, TABLES, VALUES, Conversion, Note, Tool, matches, number

# Sections whose keys are read as if at the top level.
_NESTED = ("model_init_kwargs", "special_tokens", "trl")
_BETAS = ("adam_beta1", "adam_beta2")
# YAML 1.1's
_BOOLS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
_LAYERS = ("model.lora.target_modules", "model.lora.modules_to_save")
_OFF = (None, False, 0, "", "no", [], {})
_NEVER = (None, False, 0, "no")
_DIGITS = 10**6
_EVALUATIONS = ("eval_strategy", "evaluation_strategy", "evals_per_epoch")
_EPOCHS = ("num_epochs", "num_train_epochs")
FLOAT32 = (
    "trainer.bf16 makes the arithmetic bfloat16. bfloat16 weights lose most small updates to "
    "rounding, except under ZeRO, which has float32 master weights"
)
MUON = "optimizer.name: muon; compare optimizer.adjust_lr_fn with the source's scale of updates"
SDPA = "transformers chooses the attention, usually sdpa"
QUANTIZE: dict[tuple[str, Any], str] = {
    ("adapter", "qlora"): "4bit",
    ("load_in_4bit", True): "4bit",
    ("load_in_8bit", True): "8bit",
    ("quantization_bit", 4): "4bit",
    ("quantization_bit", 8): "8bit",
}


def convert(
    source: dict[str, Any],
    name: str,
    folder: str = "",
    task: TaskName | None = None,
    template_path: str | None = None,
) -> Conversion:
    """The recipe that trains as `source` does.

    name, folder: the file's, without suffix; the task is taken from them if no key determines it.
    task: sft, dpo or kto, instead of the source's own. template_path: for an inline template, which
    the caller writes. Raises UserError if the task is another or unknown, or if no dataset is named.
    """
    sections = [
        source[key] for key in ("optimizer", "trainer") if isinstance(source.get(key), dict)
    ]
    if any("_component_" in section for section in sections):
        raise UserError(
            "this is a torchtune config, which is not converted; write a recipe by hand"
        )
    if sections:
        raise UserError("this file is already a recipe; use the file as it is")
    # The tools share most keys, and their files can be mixed; what differs are the defaults, so
    # that the tool is recognized by one key of its own.
    flat = flattened(source)
    is_factory = {"finetuning_type", "stage", "cutoff_len", "dataset_dir", "template"} & flat.keys()
    tool: Tool = "Axolotl" if "base_model" in flat else "LLaMA-Factory" if is_factory else "TRL"
    known = task or task_of_source(flat, name, folder)
    c = Conversion(known or "sft", flat, tool, template_path)
    if known is None:
        assumed = "the task is assumed to be SFT, because neither the keys nor the file's name "
        assumed += "show it; add --task dpo for DPO"
        c.rename("(the task)", assumed, changes_training=True)
    # Data first: whether there is a held-out split decides about the keys of evaluations. Axolotl
    # evaluates every eval_steps without a strategy.
    evaluations = (*_EVALUATIONS, *["eval_steps"] * (tool == "Axolotl"))
    read_data(c, evaluates=any(flat.get(key) not in _OFF for key in evaluations))
    noted = {note.key for note in c.notes}
    # Current names first: of a current and an older name for one key, the current one counts.
    for key in sorted(
        flat.keys() - noted, key=lambda k: (_last(k) in RENAMED, list(flat).index(k))
    ):
        _convert_key(key, c)
    # The source's tool fills what the file leaves out, with other values than TRL: they are written
    # into the recipe, or the training would be another one.
    _add_defaults(c, name)
    return c


def flattened(source: dict[str, Any]) -> dict[str, Any]:
    """The source's keys, those inside _NESTED by dotted names.
    `convert` makes one note for each.
    """
    flat: dict[str, Any] = {}
    for key, value in source.items():
        inside = value if key in _NESTED and isinstance(value, dict) and value else None
        flat |= {f"{key}.{k}": v for k, v in inside.items()} if inside else {str(key): value}
    return flat


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def task_of_source(flat: dict[str, Any], name: str, folder: str) -> TaskName | None:
    """The source's task: by its keys, else by its columns, else by the names of file and folder;
    None if by none.

    TRL has one command for each task, so its files need not contain it. Raises UserError if the
    task is another than SFT, DPO and KTO, or if keys of two are there.
    """
    # From certain to likely: what the tool itself goes by, then keys that only one task has, then
    # columns, then names. A task of neither kind is refused first, whatever else the file has.
    rl, stage = flat.get("rl"), flat.get("stage")
    around = [flat.get(key) for key in ("output_dir", "hub_model_id", "rl", "stage", "pref_loss")]
    words = _words(name, folder, *around)
    flags = {
        key.removesuffix("_model")
        for key in ("reward_model", "process_reward_model")
        if flat.get(key)
    }
    others = [word for word in TABLES["other_tasks"].split() if word in words | flags]
    if others or flags:
        raise UserError(
            f"this file trains with {[*others, *flags][0].upper()}, but only SFT, DPO and KTO are "
            "supported; add --task dpo to convert the keys that DPO has too"
        )
    if stage in ("sft", "dpo", "kto"):
        return stage
    if rl or "base_model" in flat:
        return "kto" if rl == "kto" else "dpo" if rl else "sft"
    sft, dpo, kto = (trl.fields(task).keys() for task in ("sft", "dpo", "kto"))
    # TRL's own files do not name the task: keys that only one trainer has decide.
    loss = flat.get("loss_type")
    if (kto - dpo) & flat.keys() or loss in trl.fields("kto")["loss_type"].choices:
        return "kto"
    keys_of = {
        "sft": (sft - dpo | {"max_seq_length"}) & flat.keys(),
        "dpo": (dpo - sft | {"max_prompt_length"}) & flat.keys(),
    }
    if "loss_type" in flat:
        loss = loss[0] if isinstance(loss, list) and loss else loss
        keys_of["dpo" if loss in trl.fields("dpo")["loss_type"].choices else "sft"].add("loss_type")
    if keys_of["sft"] and keys_of["dpo"]:
        raise UserError(
            f"the file has keys of SFT ({', '.join(sorted(keys_of['sft']))}) and keys of DPO "
            f"({', '.join(sorted(keys_of['dpo']))}); add --task sft or --task dpo"
        )
    if keys_of["sft"] or keys_of["dpo"]:
        # KTO's other keys are those of DPO too.
        names_kto = "kto" in words and keys_of["dpo"] <= kto
        return "sft" if keys_of["sft"] else "kto" if names_kto else "dpo"
    # The names of columns and splits, then those of file and folder.
    data = " ".join(
        str(flat[key]) for key in (*ROOTS, "dataset_splits", "dataset_train_split") if flat.get(key)
    )
    patterns: dict[TaskName, str] = {
        "kto": r"\bkto\b",
        "dpo": r"'chosen'|_prefs\b",
        "sft": r"'messages'|_sft\b",
    }
    for task, pattern in patterns.items():
        if re.search(pattern, data):
            return task
    for place in (name, folder):
        tasks: list[TaskName] = [task for task in patterns if task in _words(place)]
        if len(tasks) == 1:
            return tasks[0]
    return None


def _words(*texts: Any) -> set[str]:
    return {word for text in texts for word in re.split(r"[^a-z0-9]+", str(text or "").lower())}


def _convert_key(key: str, c: Conversion) -> None:
    """Write one key of the source into the recipe, and add the note on it."""
    name, value = _last(key), c.flat[key]
    # Keys that depend on neighbours come first: the tables know a key alone.
    if any(special(key, name, value, c) for special in SPECIAL):
        return
    target = RENAMED.get(name)
    if target is None and (row := next((r for r in NOT_CONVERTED if matches(name, r[0])), None)):
        _, reason, outcome = row
        needed = [flags for names, flags in TABLES["only_with"].items() if matches(name, names)]
        if outcome == "dropped":
            c.drop(key, reason)
        elif value in _OFF or [name, value] in TABLES["off"]:
            c.drop(key, "means the same in a recipe")
        elif needed and not any(c.flat.get(flag) for flag in needed[0]):
            c.drop(key, f"has no effect without {' or '.join(needed[0])}")
        else:
            c.leave(key, value, reason)
    elif target is None and name not in (known := trl.fields(c.task)):
        if name in trl.ELSEWHERE:
            c.drop(key, trl.ELSEWHERE[name])
        elif any(name in trl.fields(task) for task in TASKS):
            c.drop(key, f"TRL's {TASKS[c.task].config} has no such key")
        else:
            similar = closest(name, [*RENAMED, *known], cutoff=0.8)
            c.notes.append(Note(key, "unknown", f"did you mean {similar}?" if similar else ""))
    else:
        _write(key, name, value, target or f"trainer.{name}", c)


def _write(key: str, name: str, value: Any, target: str, c: Conversion) -> None:
    """Write a value as the recipe's key `target`, in the recipe's words."""
    known, path = trl.fields(c.task), target.split(".")
    section, ours = path[0], path[-1]
    if value is None and not (
        name in known and "None" in known[name].types and known[name].default is not None
    ):
        c.drop(key, "null has no effect")
        return
    if c.task == "kto" and ours == "train_sampling_strategy":
        c.drop(key, "KTO's batches are those of one random order")
        return
    if section == "trainer" and ours not in known:
        c.drop(key, f"TRL's {TASKS[c.task].config} has no {ours}")
        return
    # The section may be nested, as model.lora is.
    values = c.recipe[section]
    for part in path[1:-1]:
        values = values.setdefault(part, {})
    word = VALUES.get((name, value)) if isinstance(value, bool | int | str) else None
    value, effect = word or (value, "")
    if ours in values:
        is_same = values[ours] == value
        reason = f"another key sets {target}"
        c.drop(key, reason) if is_same else c.leave(key, value, reason)
        return
    # A value that TRL refuses would stop the whole recipe: it is left to the user instead.
    if section == "trainer":
        value = _read_as(known[ours].types, value)
        if problem := trl.problems(c.task, {ours: value}).get(ours):
            if matches(ours, TABLES["harmless"]):
                c.drop(key, problem)
            elif ours == "loss_type":  # a similar name would be another loss
                c.leave(key, value, f"TRL's {TASKS[c.task].config} does not have this loss")
            else:
                c.leave(key, value, problem)
            return
    elif section == "optimizer":
        value = number(value)
    values[ours] = value
    if name == ours and section == "trainer" and not word:
        c.notes.append(Note(key, "unchanged"))
        return
    if target == "optimizer.weight_decay" and value:
        effect = "the recipe applies weight decay only to matrices, but the source also to "
        effect += "embeddings and output head (optimizer.aux_weight_decay would decay norms too)"
    explanation = f"{target}: {str(value).lower()}" if word else target
    c.rename(key, f"{explanation}; {effect}" if effect else explanation, bool(effect))


def _read_as(types: frozenset[str], value: Any) -> Any:
    """The value as TRL's command line would read its text; a single value where a list is needed
    is a list of one.
    """
    kinds = set(types) - {"None"}
    if kinds == {"list"} and not isinstance(value, list) and value is not None:
        return [value]
    if isinstance(value, str) and kinds == {"bool"}:
        return _BOOLS.get(value.lower(), value)
    if isinstance(value, str) and kinds & {"int", "float"} and "str" not in kinds:
        value = number(value)
        is_whole = isinstance(value, float) and value.is_integer() and "float" not in kinds
        return int(value) if is_whole else value
    return value


def _add_defaults(c: Conversion, name: str) -> None:
    """Add the keys that a recipe needs and the source leaves to its tool's defaults, or does not
    have.
    """
    trainer, defaults, reason = (
        c.recipe["trainer"],
        TABLES["defaults"][c.tool],
        f"{c.tool}'s default",
    )

    def add(section: str, key: str, value: Any, reason: str = reason) -> None:
        values = c.recipe["model"].get("lora", {}) if section == "model.lora" else c.recipe[section]
        if key not in values:
            values[key] = value
            c.ours[f"{section}.{key}"] = reason

    # An adapter's scale is alpha / r: both are written, also where the source has neither.
    if c.trains_lora:
        lora = c.recipe["model"].setdefault("lora", {})
        for key, value in defaults["lora"].items():
            add("model.lora", key, value)
        if c.tool == "LLaMA-Factory":
            add("model.lora", "alpha", 2.0 * (lora["r"] if isinstance(lora["r"], int) else 8))
        why = "not in the source; for some architectures, PEFT's default is fewer layers"
        add("model.lora", "target_modules", "all-linear", why)
    has_precision = any(c.flat.get(key) for key in ("fp16", "bf16", "pure_bf16"))
    for key, value in defaults["trainer"].items():
        if key != "bf16" or not has_precision:
            add("trainer", key, value)
    # Axolotl and LLaMA-Factory train the answers alone, TRL all tokens.
    if c.tool != "TRL" and c.task == "sft" and not _has_completions(c):
        why = f"{reason}; the chat template must mark the answers"
        add("trainer", "assistant_only_loss", True, why)
    if trainer.get("packing") and c.tool != "Axolotl":  # whose strategy is not TRL's
        why = f"{reason}; truncates long examples (bfd_split keeps every token)"
        add("trainer", "packing_strategy", "bfd", why)
    if c.tool == "Axolotl" and "eval_steps" in trainer:
        add("trainer", "eval_strategy", "steps", "as Axolotl does with eval_steps")
    add("optimizer", "name", "adamw")
    if c.tool == "LLaMA-Factory":
        add("optimizer", "lr", 5e-5)
    add("optimizer", "lr", trl.fields(c.task)["learning_rate"].default, "TRL's default")
    add("optimizer", "weight_decay", 0.0)
    add("run", "output_dir", f"runs/{name}", "the run folder")


def _has_completions(c: Conversion) -> bool:
    """Whether all examples are prompts and completions, of which the completions alone are trained
    anyway: Alpaca's form, which is LLaMA-Factory's default.
    """
    root = next((key for key in ("datasets", "dataset") if isinstance(c.flat.get(key), list)), None)
    kinds = [entry.get("type") for entry in c.flat[root]] if root else [None]
    if root == "dataset":
        return all(entry.get("formatting") != "sharegpt" for entry in c.flat[root])
    return all(isinstance(kind, dict) or str(kind).startswith("alpaca") for kind in kinds)


# Keys whose value, or whose neighbours, decide their counterpart: each function writes a key into
# the recipe, adds the note on it and returns True, or returns False for any other key.


def _lora(key: str, name: str, value: Any, c: Conversion) -> bool:
    """Convert the keys of an adapter that differ by tool, and quantized weights under it."""
    target = RENAMED.get(name, "")
    if not c.trains_lora:
        if target.startswith("model.lora."):
            c.drop(key, "has no effect without an adapter")
            return True
        return False
    model = c.recipe["model"]
    lora = model.setdefault("lora", {})
    if isinstance(value, bool | int | str) and (name, value) in QUANTIZE:
        model["quantize"] = QUANTIZE[name, value]
        c.rename(key, f"model.quantize: {model['quantize']}")
    elif name in ("use_peft", "adapter", "finetuning_type"):
        c.rename(key, "model.lora")
    elif target in _LAYERS and value in _OFF:
        c.drop(key, "null has no effect")
    elif target in _LAYERS and isinstance(value, str) and value not in ("all", "all-linear"):
        names = value.replace(" ", "").split(",")
        if all(part.isidentifier() for part in names):
            lora[target.rpartition(".")[2]] = names
            c.rename(key, target)
        else:
            c.leave(key, value, f"write {target} as a list of names, not as a pattern")
    elif target in ("model.lora.alpha", "model.lora.dropout") and value is not None:
        c.flat[key] = number(value)
        return False
    else:
        return False
    return True


def _evaluations(key: str, name: str, value: Any, c: Conversion) -> bool:
    """Convert evaluations and checkpoints per epoch, and drop keys of evaluations without data."""
    has_eval, flat = "eval" in c.recipe["data"], c.flat
    if matches(name, TABLES["needs_eval"]) and not has_eval and value not in _NEVER:
        remedy = "has no effect without held-out examples; add data.eval"
        is_best = name == "load_best_model_at_end"
        c.leave(key, value, remedy) if is_best else c.drop(key, remedy)
        return True
    kind = {"evals_per_epoch": "eval", "saves_per_epoch": "save"}.get(name)
    if kind is None or value == 1:  # one per epoch has a word: VALUES
        return False
    epochs = number(next((flat[k] for k in _EPOCHS if flat.get(k) is not None), 1))
    per_epoch = number(value)
    if value in _OFF:
        c.drop(key, "is off in the source too")
    elif (
        isinstance(epochs, int | float)
        and isinstance(per_epoch, int | float)
        and per_epoch is not True
        and 1 < per_epoch * epochs <= _DIGITS
        and flat.get(f"{kind}_steps") is None
    ):
        # As a fraction of all steps, which is how Axolotl reads them too. Rounded down:
        # transformers rounds the product with the number of steps up, and 0.166667 of 600 would
        # be 101.
        # Checked in tests/importers against TrainerState for 2,520 and 25,200 steps.
        fraction = int(_DIGITS / (per_epoch * epochs)) / _DIGITS
        c.recipe["trainer"] |= {f"{kind}_strategy": "steps", f"{kind}_steps": fraction}
        c.rename(key, f"trainer.{kind}_steps: {fraction:g} of all steps")
    else:
        c.leave(key, value, f"write trainer.{kind}_steps")
    return True


def _attention(key: str, name: str, value: Any, c: Conversion) -> bool:
    """Convert the keys that decide which tokens attend to which: attention and packing."""
    model = c.recipe["model"]
    if name in ("packing", "neat_packing") and c.tool == "LLaMA-Factory" and c.task == "sft":
        if value in _OFF:
            c.drop(key, "examples are packed only with trainer.packing: true")
            return True
        c.recipe["trainer"]["packing"] = True
        is_neat = c.flat.get("neat_packing") is True
        effect = "" if is_neat else "; in LLaMA-Factory, packed examples attend to each other"
        c.rename(key, f"trainer.packing{effect}", not is_neat)
        return True
    if not matches(name, TABLES["attention"]):
        return False
    names = TABLES["attentions"]
    attention = names.get(name, name) if value is True else names.get(str(value), str(value))
    if value in (None, False, "auto"):
        c.drop(key, SDPA)
    elif "attn_implementation" in model:
        c.drop(key, f"another key sets model.attn_implementation: {model['attn_implementation']}")
    elif attention_problems(attention, c.flat.get("use_cpu")):
        c.drop(key, f"soren-align does not have the attention {attention}; {SDPA}")
    else:
        model["attn_implementation"] = attention
        c.rename(key, f"model.attn_implementation: {attention}")
    return True


def _optimizer_and_task(key: str, name: str, value: Any, c: Conversion) -> bool:
    """Convert optimizers, and the task's own keys."""
    optimizer = c.recipe["optimizer"]
    if name in ("optim", "optimizer") and value is not None:
        optimizer["name"] = "muon" if value == "muon" else "adamw"
        if value == "muon":
            c.rename(key, MUON, True)
        elif matches(str(value), TABLES["adamw"]):
            c.rename(key, "optimizer.name: adamw")
        elif matches(str(value), TABLES["adamw_8bit"]):
            c.rename(key, "optimizer.name: adamw, with states in float32", True)
        else:
            c.ours["optimizer.name"] = f"{value} in the source"
            c.leave(key, value, "soren-align does not have it; the recipe has AdamW at its rate")
    elif name == "use_muon" and value is True:
        optimizer["name"] = "muon"
        c.rename(key, MUON, True)
    elif name in _BETAS and value is not None:
        optimizer.setdefault("betas", list(BETAS))[_BETAS.index(name)] = number(value)
        c.rename(key, "optimizer.betas")
    elif name == "warmup_steps" and not value and c.flat.get("warmup_ratio"):
        c.drop(key, "warmup_ratio sets the warmup")
    elif name == "rl":
        if value == "ipo":
            c.recipe["trainer"]["loss_type"] = ["ipo"]
        c.rename(key, f"task: {c.task}")
    elif value in (None, {}) and name in (*_NESTED, *_BETAS, "optim", "optimizer"):
        c.drop(key, "null has no effect")
    else:
        return False
    return True


def _model(key: str, name: str, value: Any, c: Conversion) -> bool:
    """Convert dtypes and chat templates."""
    model = c.recipe["model"]
    is_inline = isinstance(value, str) and "{{" in value
    if name in ("torch_dtype", "dtype") and value is not None:
        model["dtype"] = "float32"
        if value == "float32":
            c.rename(key, "model.dtype")
        else:
            c.ours["model.dtype"] = f"{value} in the source"
            c.rename(key, f"model.dtype: float32; {FLOAT32}", True)
    elif name in ("torch_dtype", "dtype"):
        c.drop(key, "null has no effect")
    elif name == "pure_bf16" and value is True:
        model["dtype"], c.recipe["trainer"]["bf16"] = "float32", True
        c.rename(key, f"trainer.bf16, model.dtype: float32; {FLOAT32}", True)
    elif name == "chat_template" and value == "jinja" and c.flat.get("chat_template_jinja"):
        c.drop(key, "chat_template_jinja sets the template")
    elif name in ("chat_template", "chat_template_jinja") and is_inline and c.template_path:
        c.template, model["chat_template"] = value, c.template_path
        c.rename(key, f"model.chat_template: {c.template_path}")
    elif name in ("chat_template", "chat_template_jinja") and is_inline:
        c.leave(key, "a template", "add a DEST, beside which the import writes this template")
    elif name == "chat_template_path" and value and not str(value).endswith(".jinja"):
        c.leave(key, value, "save its chat template as a .jinja file; write model.chat_template")
    else:
        return False
    return True


SPECIAL = (_lora, _evaluations, _attention, _optimizer_and_task, _model)
