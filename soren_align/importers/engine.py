"""Convert the YAML of TRL, the alignment handbook, Axolotl, LLaMA-Factory and torchtune to a
recipe.

`convert` is a pure function from a dict to a recipe's dict and one note per key: a key is
unchanged, renamed, dropped with a reason, or unknown. A dropped key that changes the trained
weights is marked. keys.toml has the keys with one counterpart; the functions in SPECIAL are for
those whose value, or whose neighbours, decide the counterpart.
"""

import hashlib
import re
from typing import Any

from ..core.errors import UserError, closest
from ..core.optimizer_settings import BETAS
from ..recipe import trl
from ..recipe.checks import NOT_STREAMED
from ..recipe.model import attention_problems
from ..tasks import TASKS, TaskName
from . import torchtune
from .datasets import ROOTS, read_data
from .keys import (
    LEFT_OUT,
    ONLY_WITH,
    RENAMED,
    START,
    TABLES,
    VALUES,
    Conversion,
    Note,
    matches,
    number,
)

# sections whose keys are read as if at the top level
_NESTED = ("model_init_kwargs", "special_tokens", "trl")
_BETAS = ("adam_beta1", "adam_beta2")
# YAML 1.1's
_BOOLS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
_MIN_LR = "cosine_min_lr_ratio"
_DIGITS = 10**6
SEED = 42
"""Of transformers' TrainingArguments."""
# The handbook's Zephyr template, which recipes call zephyr: sha256 of it without white space
# (tests/importers).
ZEPHYR = "8705a1897ece1a1b355e1f4d36687f331d6680f5d897d1ae314b3fc506e136b8"
DTYPE = (
    "trainer.bf16 makes the arithmetic bfloat16. bfloat16 weights lose most small updates to rounding, except under "
    "ZeRO, which has float32 master weights"
)
MUON = "optimizer.name: muon; compare optimizer.adjust_lr_fn with the source's scale of updates, which may differ"
SDPA = "transformers chooses the attention, usually sdpa"
_REFERENCE = "the reference model is the model with this adapter, but in the source the model without an adapter"
_RSLORA = ("use_rslora", "peft_use_rslora")
_STREAMING = ("streaming", "dataset_streaming")
_PACKING = ("packing", "neat_packing")
_QUANTIZE: dict[tuple[str, int], str] = {
    ("load_in_4bit", True): "4bit",
    ("load_in_8bit", True): "8bit",
}
_QUANTIZE |= {("quantization_bit", 4): "4bit", ("quantization_bit", 8): "8bit"}


def convert(
    source: dict[str, Any],
    name: str,
    folder: str = "",
    task: TaskName | None = None,
    template_path: str | None = None,
) -> Conversion:
    """The recipe that trains as `source` does.

    name, folder: the file's, without suffix; the task is taken from them if no key determines it.
    task: sft or dpo, instead of the source's own. template_path: for an inline template, which the
    caller writes. Raises UserError if the task is another or unknown, or if no dataset is named.
    """
    tune = torchtune.read(source)
    if tune is None and (
        isinstance(source.get("optimizer"), dict) or isinstance(source.get("trainer"), dict)
    ):
        raise UserError(
            "this file is already a recipe, because its keys stand in sections; use the file as it is"
        )
    flat = flattened(source) if tune is None else tune.flat
    is_factory = any(
        key in flat for key in ("finetuning_type", "stage", "cutoff_len", "dataset_dir", "template")
    )
    tool = "Axolotl's" if "base_model" in flat else "LLaMA-Factory's" if is_factory else "TRL's"
    if tune is not None:
        tool = "torchtune's"
    known = task or (task_of_source(flat, name, folder) if tune is None else tune.task)
    task = known or "sft"
    # Axolotl evaluates every eval_steps without a strategy.
    when = (
        "eval_strategy",
        "evaluation_strategy",
        "evals_per_epoch",
        *["eval_steps"] * (tool == "Axolotl's"),
    )
    sections: dict[str, dict[str, Any]] = {
        "model": {},
        "data": {},
        "optimizer": {},
        "trainer": {},
        "run": {},
    }
    conversion = Conversion(task, sections, flat, tool, template_path=template_path)
    if known is None:
        assumed = "the task is assumed to be SFT, because neither the keys nor the file's name show it; add --task dpo "
        assumed += "for DPO"
        conversion.notes.append(Note("(the task)", "renamed", assumed, changes_training=True))
    read_data(
        conversion, evaluates=any(flat.get(key) not in (None, False, "no", 0) for key in when)
    )
    noted = {note.key for note in conversion.notes}
    # Current names first: of a current and an older name for one key, the current one counts.
    for key in sorted(
        (k for k in flat if k not in noted), key=lambda k: k.rpartition(".")[2] in RENAMED
    ):
        _convert_key(key, conversion)
    if tune is not None:
        conversion.notes = tune.renamed(conversion.notes)
        for key, value in tune.trainer.items():
            if key in trl.fields(task):
                sections["trainer"][key] = value
                conversion.ours[f"trainer.{key}"] = "the default of the source's dataset"
    _add_defaults(conversion, name)
    return conversion


def flattened(source: dict[str, Any]) -> dict[str, Any]:
    """The source's keys, those inside _NESTED by dotted names.
    `convert` makes one note for each.
    """
    flat: dict[str, Any] = {}
    for key, value in source.items():
        inside = value if key in _NESTED and isinstance(value, dict) and value else None
        flat |= {f"{key}.{k}": v for k, v in inside.items()} if inside else {str(key): value}
    return flat


def task_of_source(flat: dict[str, Any], name: str, folder: str) -> TaskName | None:
    """The source's task: by its keys, else by its columns, else by the names of file and folder;
    None if by none.

    TRL has one command for each task, so its files need not contain it. Raises UserError if the
    task is neither SFT nor DPO, or if keys of both are there.
    """
    rl, stage = flat.get("rl"), flat.get("stage")
    around = (
        name,
        folder,
        flat.get("output_dir"),
        flat.get("hub_model_id"),
        rl,
        stage,
        flat.get("pref_loss"),
    )
    words = {word for part in around if part for word in re.split(r"[^a-z0-9]+", str(part).lower())}
    flags = {
        key.removesuffix("_model")
        for key in ("reward_model", "process_reward_model")
        if flat.get(key)
    }
    others = (word for word in TABLES["other_tasks"].split() if word in words | flags)
    if other := next(others, None) or next(iter(flags), None):
        raise UserError(
            f"this file trains with {other.upper()}, but only SFT and DPO are supported; add --task dpo to convert the "
            "keys that DPO has too"
        )
    if stage in ("sft", "dpo"):
        return stage
    if rl or "base_model" in flat:
        return "dpo" if rl else "sft"
    sft, dpo = trl.fields("sft").keys(), trl.fields("dpo").keys()
    keys_of = {
        "sft": (sft - dpo | {"max_seq_length"}) & flat.keys(),
        "dpo": (dpo - sft | {"max_prompt_length"}) & flat.keys(),
    }
    if "loss_type" in flat:
        loss = flat["loss_type"]
        loss = loss[0] if isinstance(loss, list) and loss else loss
        keys_of["dpo" if loss in trl.fields("dpo")["loss_type"].choices else "sft"].add("loss_type")
    if keys_of["sft"] and keys_of["dpo"]:
        raise UserError(
            f"the file has keys of SFT ({', '.join(sorted(keys_of['sft']))}) and keys of DPO "
            f"({', '.join(sorted(keys_of['dpo']))}); add --task sft or --task dpo"
        )
    if keys_of["sft"] or keys_of["dpo"]:
        return "sft" if keys_of["sft"] else "dpo"
    for root in ROOTS:  # the names of columns and splits
        data = f"{flat.get(root)} {flat.get('dataset_splits')} {flat.get('dataset_train_split')}"
        if flat.get(root) and re.search(r"'chosen'|_prefs\b", data):
            return "dpo"
        if flat.get(root) and re.search(r"'messages'|_sft\b", data):
            return "sft"
    for place in (name, folder):
        tasks = {"sft", "dpo"} & set(re.split(r"[^a-z0-9]+", place.lower()))
        if len(tasks) == 1:
            return "sft" if "sft" in tasks else "dpo"
    return None


def _convert_key(key: str, c: Conversion) -> Note:
    """Write one key of the source into the recipe, and add and return the note on it."""
    name, value = key.rpartition(".")[2], c.flat[key]
    for special in SPECIAL:
        if note := special(key, name, value, c):
            return note
    known, config, target = trl.fields(c.task), TASKS[c.task].config, RENAMED.get(name)
    if target is None:
        if left_out := next((row for row in LEFT_OUT if matches(name, row[0])), None):
            _, reason, changes = left_out
            is_off = (
                value in (None, False, 0, "", "no")
                or value in ([], {})
                or [name, value] in TABLES["off"]
            )
            if changes and is_off:
                return c.drop(key, "is off in the source too")
            for names, flags in ONLY_WITH.items():
                if matches(name, names) and not any(c.flat.get(flag) for flag in flags):
                    return c.drop(key, f"has no effect without {' or '.join(flags)}")
            return c.drop(key, reason, changes)
        if name in trl.ELSEWHERE:
            return c.drop(key, _without_removal(trl.ELSEWHERE[name]))
        if name not in known:
            if any(name in trl.fields(task) for task in TASKS):
                return c.drop(key, f"TRL's {config} has no such key")
            similar = closest(name, [*RENAMED, *known], cutoff=0.8)
            return c.add(Note(key, "unknown", f"did you mean {similar}?" if similar else ""))
    if value is None and not (
        name in known and "None" in known[name].types and known[name].default is not None
    ):
        return c.drop(key, "null has no effect")
    target = target or f"trainer.{name}"
    section, _, ours = target.partition(".")
    values = c.recipe[section]
    word = VALUES.get((name, value)) if isinstance(value, bool | int | str) else None
    value, effect = word or (value, "")
    if ours in values:
        return c.drop(key, f"another key sets {target}", values[ours] != value)
    if section == "trainer":
        if ours not in known:
            return c.drop(key, f"TRL's {config} has no {ours}")
        # As TRL's command line would read the text; a single value where a list is needed is a list
        # of one.
        kinds = set(known[ours].types) - {"None"}
        if kinds == {"list"} and not isinstance(value, list) and value is not None:
            value = [value]
        elif isinstance(value, str) and kinds == {"bool"}:
            value = _BOOLS.get(value.lower(), value)
        elif isinstance(value, str) and kinds & {"int", "float"} and "str" not in kinds:
            value = number(value)
            value = (
                int(value)
                if isinstance(value, float) and "float" not in kinds and value.is_integer()
                else value
            )
        if problem := trl.problems(c.task, {ours: value}).get(ours):
            if ours == "loss_type":  # another spelling would be another loss
                losses = ", ".join(map(str, value)) if isinstance(value, list) else value
                problem = f"TRL's {config} does not have the loss {losses}; the recipe uses TRL's default loss"
            return c.drop(key, _without_removal(problem), not matches(ours, TABLES["harmless"]))
    elif section == "optimizer":
        value = number(value)
    values[ours] = value
    if name == ours and section == "trainer" and not word:
        return c.add(Note(key, "unchanged"))
    if target == "optimizer.weight_decay" and value:
        effect = "the recipe applies weight decay only to matrices, but the source also to embeddings and output head "
        effect += "(optimizer.aux_weight_decay would decay norms too)"
    explanation = (
        target + (f": {str(value).lower()}" if word else "") + (f"; {effect}" if effect else "")
    )
    return c.rename(key, explanation, bool(effect))


def _without_removal(problem: str) -> str:
    """A recipe's problem without the remedy "remove this key", as the import leaves the key out."""
    return re.sub(r"remove this key(, and| and|, or)? ?", "", problem).removesuffix("; ")


def _add_defaults(c: Conversion, name: str) -> None:
    """Add the keys that a recipe needs and the source leaves to its tool's defaults, or does not
    have.
    """
    flat, trainer, defaults = c.flat, c.recipe["trainer"], TABLES["defaults"][c.tool]

    def add(section: str, key: str, value: Any, reason: str) -> None:
        values = (
            c.recipe[section]
            if section != "model.lora"
            else c.recipe["model"].setdefault("lora", {})
        )
        if key not in values:
            values[key] = value
            c.ours[f"{section}.{key}"] = reason

    if c.trains_lora and not c.start:
        for key, value in defaults["lora"].items():
            add("model.lora", key, value, f"{c.tool} default")
        lora = c.recipe["model"]["lora"]
        r = lora["r"]
        if c.tool == "LLaMA-Factory's":
            add("model.lora", "alpha", 2.0 * (r if isinstance(r, int) else 8), f"{c.tool} default")
        reason = "not in the source; for some architectures, PEFT's default is fewer layers"
        add("model.lora", "target_modules", "all-linear", reason)
        is_scaled = any(flat.get(key) is True for key in _RSLORA) and isinstance(
            lora["alpha"], int | float
        )
        if is_scaled and isinstance(r, int) and r > 0:
            # rsLoRA multiplies the factors' product by alpha / sqrt(r), LoRA by alpha / r.
            lora["alpha"] = round(lora["alpha"] * r**0.5, 4)
    # Epochs have no effect where the source streams a number of steps.
    streams_steps = (
        c.tool == "Axolotl's" and flat.get("streaming") is True and flat.get("max_steps")
    )
    has_precision = any(flat.get(key) for key in ("fp16", "bf16", "pure_bf16"))
    for key, value in defaults["trainer"].items():
        if not (key == "num_train_epochs" and streams_steps) and not (
            key == "bf16" and has_precision
        ):
            # TOML has no null
            add("trainer", key, None if value == "null" else value, f"{c.tool} default")
    if c.tool != "TRL's" and c.task == "sft" and not c.trains_completions:
        add(
            "trainer",
            "assistant_only_loss",
            True,
            f"{c.tool} default; the chat template must mark the answers",
        )
    if trainer.get("packing") and c.tool != "Axolotl's":  # whose strategy is not TRL's
        tool = "as in LLaMA-Factory" if "finetuning_type" in flat else "TRL's default"
        reason = f"{tool}; truncates long examples (bfd_split keeps every token)"
        add("trainer", "packing_strategy", "bfd", reason)
    if c.tool == "Axolotl's" and "eval_steps" in trainer:
        add("trainer", "eval_strategy", "steps", "as Axolotl does with eval_steps")
    add("optimizer", "name", "adamw", f"{c.tool} default")
    if c.tool == "LLaMA-Factory's":
        add("optimizer", "lr", 5e-5, "LLaMA-Factory's default")
    add("optimizer", "lr", trl.fields(c.task)["learning_rate"].default, "TRL's default")
    # torch's own AdamW
    add("optimizer", "weight_decay", 0.01 if c.tool == "torchtune's" else 0.0, f"{c.tool} default")
    add("run", "output_dir", f"runs/{name}", "the run folder")


# Keys whose value, or whose neighbours, decide their counterpart: each function writes a key into
# the recipe, adds the note on it and returns it, or returns None for any other key.


def _lora(key: str, name: str, value: Any, c: Conversion) -> Note | None:
    """Of a source that trains a new adapter, or one further, whose rank, base and layers are then
    its own.
    """
    if not c.trains_lora:
        return None
    model, flat = c.recipe["model"], c.flat
    if c.start:
        model["name_or_path"] = c.start
        if name in START:
            is_dpo = flat.get("stage") == "dpo" or bool(flat.get("rl"))
            explanation = "model.name_or_path; training continues with this adapter"
            return c.rename(key, explanation + f"; {_REFERENCE}" * is_dpo, is_dpo)
        if name in ("model_name_or_path", "base_model"):
            return c.drop(key, "not needed, because the adapter's folder names its base model")
        if note := _quantization(key, name, value, c):
            return note
        if name in TABLES["lora"] or name == "finetuning_type" or matches(name, TABLES["adapters"]):
            return c.drop(key, "training continues with an adapter, which has this setting")
        return None
    lora = model.setdefault("lora", {})
    if name == "adapter" and value == "qlora":
        model["quantize"] = "4bit"
        return c.rename(key, "model.lora, model.quantize: 4bit")
    if name in ("use_peft", "adapter", "finetuning_type"):
        return c.rename(key, "model.lora")
    if note := _quantization(key, name, value, c):
        return note
    if name == "lora_target_linear" and value is True:
        lora["target_modules"] = "all-linear"
        return c.rename(key, "model.lora.target_modules: all-linear")
    if name == "lora_task_type":
        return c.drop(
            key, "soren-align trains only language models (CAUSAL_LM)", value != "CAUSAL_LM"
        )
    if name in _RSLORA and value is True:
        return c.rename(key, "model.lora.alpha, multiplied by sqrt(r): this gives rsLoRA's scale")
    target = TABLES["lora"].get(name)
    if (
        target is None
        and value not in (None, False, 0, "", [], {})
        and matches(name, TABLES["adapters"])
    ):
        return c.drop(key, "the recipe trains plain LoRA (model.lora), without this variant", True)
    if target is None or value in (None, []):
        return None
    if target == "modules_to_save" and isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if target == "target_modules":
        if flat.get("lora_target_linear"):
            return c.drop(key, "lora_target_linear sets the layers", value != "all-linear")
        value = "all-linear" if name == "lora_target" and value == "all" else value
        parts = value.replace(" ", "").split(",") if isinstance(value, str) else [""]
        value = parts if all(part.isidentifier() for part in parts) else value
        if isinstance(value, str) and value != "all-linear":
            return c.drop(
                key,
                "patterns are not supported; write model.lora.target_modules as a list of names",
                True,
            )
    if target in ("alpha", "dropout"):
        value = number(value)
        value = float(value) if type(value) is int else value
    lora[target] = value
    return c.rename(key, f"model.lora.{target}")


def _quantization(key: str, name: str, value: Any, c: Conversion) -> Note | None:
    """Of the frozen weights under an adapter."""
    if bits := _QUANTIZE.get((name, value)) if isinstance(value, bool | int) else None:
        c.recipe["model"]["quantize"] = bits
        return c.rename(key, f"model.quantize: {bits}")
    is_4bit = c.flat.get("load_in_4bit") is True or c.flat.get("quantization_bit") == 4
    if name in TABLES["same_4bit"] and is_4bit:
        reason = "model.quantize: 4bit is NF4 with double quantization"
        return c.drop(key, reason, value != TABLES["same_4bit"][name])
    if name == "quantization_method" and c.flat.get("quantization_bit") in (4, 8):
        return c.drop(
            key,
            "soren-align quantizes weights with bitsandbytes",
            value not in ("bnb", "bitsandbytes"),
        )
    if name in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage") and is_4bit:
        return c.drop(
            key, "trainer.bf16 and trainer.fp16 set the precision of products with 4-bit weights"
        )
    return None


def _steps(key: str, name: str, value: Any, c: Conversion) -> Note | None:
    """Null, evaluations and checkpoints per epoch, and streaming."""
    nullable = (*_NESTED, "optim", "optimizer", *_BETAS, "torch_dtype", "dtype", _MIN_LR)
    if value in (None, {}) and name in nullable:
        return c.drop(key, "null has no effect")
    flat, data = c.flat, c.recipe["data"]
    kind = {"evals_per_epoch": "eval", "saves_per_epoch": "save"}.get(name)
    if kind == "save" or (kind and "eval" in data):
        per_epoch = number(value)
        epochs = number(
            next(
                (flat[k] for k in ("num_epochs", "num_train_epochs") if flat.get(k) is not None), 1
            )
        )
        if value in (None, False, 0):
            return c.drop(key, "is off in the source too")
        is_number = all(
            isinstance(n, int | float) and not isinstance(n, bool) for n in (per_epoch, epochs)
        )
        # One per epoch has a word: VALUES.
        if per_epoch != 1 and is_number and 1 < per_epoch * epochs <= _DIGITS:
            if flat.get(f"{kind}_steps") is not None:
                return c.drop(key, f"{kind}_steps replaces this key")
            # As a fraction of all steps, which is how Axolotl reads them too. Rounded down:
            # transformers rounds the product with the number of steps up, and 0.166667 of 600 would
            # be 101.
            fraction = int(_DIGITS / (per_epoch * epochs)) / _DIGITS
            c.recipe["trainer"] |= {f"{kind}_strategy": "steps", f"{kind}_steps": fraction}
            return c.rename(key, f"trainer.{kind}_steps: {fraction:g} of all steps")
    # A source is streamed here where it names its number of steps, and no number of held-out
    # examples.
    steps, evaluation = number(flat.get("max_steps")), data.get("eval")
    counts_held_out = isinstance(evaluation, dict) and "examples" in evaluation
    has_steps = isinstance(steps, int | float) and steps > 0
    if not (any(flat.get(key) is True for key in _STREAMING) and has_steps) or counts_held_out:
        return None
    if name in _STREAMING and value is True:
        size = number(flat.get("buffer_size"))
        has_size = isinstance(size, int) and size > 0
        data["streaming"] = {"shuffle_buffer": size} if has_size else True
        return c.rename(key, "data.streaming")
    if name == "buffer_size":
        return c.rename(key, "data.streaming.shuffle_buffer")
    target = RENAMED.get(name, f"trainer.{name}").removeprefix("trainer.")
    if target in NOT_STREAMED and value not in NOT_STREAMED[target][0]:
        return c.drop(key, NOT_STREAMED[target][1].partition(";")[0])
    return None


def _attention(key: str, name: str, value: Any, c: Conversion) -> Note | None:
    """Which tokens attend to which: attention and packing."""
    model, trainer, flat = c.recipe["model"], c.recipe["trainer"], c.flat
    if matches(name, TABLES["attention"]):
        if value in (None, False, "auto"):
            return c.drop(key, SDPA)
        names = TABLES["attentions"]
        attention = names.get(name, name) if value is True else names.get(str(value), str(value))
        if "attn_implementation" in model:
            return c.drop(
                key, f"another key sets model.attn_implementation: {model['attn_implementation']}"
            )
        if attention_problems(attention, flat.get("use_cpu")):
            return c.drop(key, f"soren-align does not have the attention {attention}; {SDPA}")
        model["attn_implementation"] = attention
        return c.rename(key, f"model.attn_implementation: {attention}")
    if name in _PACKING and "packing" not in trl.fields(c.task):
        return None
    # LLaMA-Factory's
    if name == "neat_packing" or (name == "packing" and "finetuning_type" in flat):
        if not value:
            return c.drop(key, "examples are packed only with trainer.packing: true")
        trainer["packing"] = True
        is_neat = flat.get("neat_packing") is True
        effect = (
            ""
            if is_neat
            else "; packed examples attend to each other in LLaMA-Factory, but not in TRL"
        )
        return c.rename(key, f"trainer.packing{effect}", not is_neat)
    if name == "excess_length_strategy" and value == "truncate":
        if flat.get("sample_packing"):
            trainer["packing_strategy"] = "bfd"
            return c.rename(key, "trainer.packing_strategy: bfd, which truncates long examples")
        return c.drop(key, "TRL truncates long examples too")
    packs = any(
        flat.get(key) in (True, "on", "yes", "true") for key in (*_PACKING, "sample_packing")
    )
    if name in ("eval_packing", "eval_sample_packing") and value is True and not packs:
        return c.drop(
            key, "without packing in training, packed held-out examples would attend to each other"
        )
    return None


def _optimizer_and_model(key: str, name: str, value: Any, c: Conversion) -> Note | None:
    """Optimizers, dtypes, starting weights and chat templates."""
    optimizer, model, flat = c.recipe["optimizer"], c.recipe["model"], c.flat
    if name in ("optim", "optimizer"):
        value = str(value)
        optimizer["name"] = "muon" if value == "muon" else "adamw"
        if value == "muon":
            return c.rename(key, MUON, True)
        if matches(value, TABLES["adamw"]):
            return c.rename(key, "optimizer.name: adamw")
        if matches(value, TABLES["adamw_8bit"]):
            optimizer["states"] = "8bit"
            return c.rename(key, "optimizer.name: adamw, optimizer.states: 8bit")
        effect = f"soren-align does not have {value}"
        return c.rename(key, f"optimizer.name: adamw at the same learning rate; {effect}", True)
    if name == "use_muon" and value is True:
        optimizer["name"] = "muon"
        return c.rename(key, MUON, True)
    if name in _BETAS:
        optimizer.setdefault("betas", list(BETAS))[_BETAS.index(name)] = number(value)
        return c.rename(key, "optimizer.betas")
    if name == "pure_bf16" and value is True:
        model["dtype"], c.recipe["trainer"]["bf16"] = "float32", True
        return c.rename(key, f"trainer.bf16, model.dtype: float32; {DTYPE}", True)
    if name == "train_from_scratch" and value is True:
        seed = flat.get("seed")
        model["init_seed"] = seed if isinstance(seed, int) else SEED
        return c.rename(key, "model.init_seed")
    if name in ("torch_dtype", "dtype"):
        model["dtype"] = "float32"
        if value == "float32":
            return c.rename(key, "model.dtype")
        c.ours["model.dtype"] = f"{value} in the source"
        return c.rename(key, f"model.dtype: float32; {DTYPE}", True)
    if name == "chat_template" and isinstance(value, str):
        if hashlib.sha256("".join(value.split()).encode()).hexdigest() == ZEPHYR:
            model["chat_template"] = "zephyr"
            return c.rename(key, "model.chat_template: zephyr")
        if value == "jinja" and flat.get("chat_template_jinja"):
            return c.drop(key, "chat_template_jinja sets the template")
    if (
        name in ("chat_template", "chat_template_jinja")
        and isinstance(value, str)
        and "{{" in value
    ):
        if c.template_path is None:
            remedy = "to use the file's template, add a DEST, beside which the import writes this template"
            return c.drop(key, f"the recipe uses the tokenizer's own chat template; {remedy}", True)
        c.template, model["chat_template"] = value, c.template_path
        return c.rename(key, f"model.chat_template: {c.template_path}")
    if name == "chat_template_path" and value is not None and not str(value).endswith(".jinja"):
        remedy = "save its chat template as one, and write model.chat_template"
        return c.drop(key, f"{value} is no .jinja file; {remedy}", True)
    return None


def _schedule(key: str, name: str, value: Any, c: Conversion) -> Note | None:
    """Warmup, the least rate of a schedule, the early end, and evaluations without examples."""
    flat, has_eval = c.flat, "eval" in c.recipe["data"]
    if name == "warmup_steps" and not value and flat.get("warmup_ratio"):
        return c.drop(key, "warmup_ratio sets the warmup")
    has_min_lr = flat.get(_MIN_LR) is not None and flat.get("lr_scheduler") in (None, "cosine")
    if name == _MIN_LR and not has_min_lr:
        return c.drop(key, "only the cosine schedule has a minimum learning rate", True)
    if name == _MIN_LR:
        least = {"min_lr_rate": number(value)}
        c.recipe["trainer"] |= {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": least,
        }
        return c.rename(key, "trainer.lr_scheduler_kwargs")
    if name == "lr_scheduler" and has_min_lr:
        return c.rename(key, "trainer.lr_scheduler_type: cosine_with_min_lr")
    if name == "rl":
        if value == "ipo":
            c.recipe["trainer"]["loss_type"] = ["ipo"]
        return c.rename(key, f"task: {c.task}")
    target = TABLES["early_stopping"].get(name)
    if target and value and {"early_stopping_patience", "early_stopping_steps"} & flat.keys():
        if not has_eval or any(
            flat.get(key) in ("no", False) for key in ("eval_strategy", "evaluation_strategy")
        ):
            return c.drop(
                key,
                "training does not stop early, because nothing is evaluated during training",
                True,
            )
        c.recipe["run"].setdefault("early_stopping", {})[target] = number(value)
        return c.rename(key, f"run.early_stopping.{target}")
    if matches(name, TABLES["needs_eval"]) and not has_eval and value not in (None, False, "no", 0):
        return c.drop(
            key,
            "has no effect without held-out examples; add data.eval",
            name == "load_best_model_at_end",
        )
    return None


SPECIAL = (_lora, _steps, _attention, _optimizer_and_model, _schedule)
