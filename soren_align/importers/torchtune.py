"""Read a torchtune config as the flat keys of the other tools, which the engine converts.

torchtune's YAML has sections with `_component_`, the path of a class, and its arguments. keys.toml
has its keys with one counterpart; the functions here are for components, whose class decides. Read
at commit bd2a0fc; torchtune is no longer developed.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import UserError
from ..tasks import TaskName
from .keys import TABLES, Note, matches

_TABLE = TABLES["torchtune"]
_COMPONENT = "_component_"
_MODULES = {"output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]
_PASSED = ("split", "data_files", "name", "revision")


@dataclass
class Torchtune:
    """A torchtune config as the other tools' keys."""

    source: dict[str, Any]
    """Its keys, those in sections by dotted names."""
    task: TaskName = "sft"
    flat: dict[str, Any] = field(default_factory=dict)
    """The other tools' keys."""
    names: dict[str, str] = field(default_factory=dict)
    """The other tools' key -> torchtune's."""
    notes: list[Note] = field(default_factory=list)
    """On the keys that no other tool has."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Defaults of its datasets, as keys of the recipe's section trainer."""

    def put(self, name: str, value: Any, key: str) -> None:
        """Set the other tools' key `name`, which stands for torchtune's `key`."""
        self.flat[name], self.names[name] = value, key

    def renamed(self, notes: list[Note]) -> list[Note]:
        """The notes of the engine with torchtune's keys, one for each key of the source."""
        by_key = {note.key: note for note in self.notes}
        for note in notes:
            inside = re.fullmatch(r"(?:datasets|dataset_val)\[(\d+)\]\.(\w+)", note.key)
            key = self.names.get(note.key, note.key)
            if inside:
                place = (
                    f"dataset[{inside[1]}]"
                    if f"dataset[{inside[1]}].{_COMPONENT}" in self.source
                    else "dataset"
                )
                key = f"{place}.{_COMPONENT if inside[2] == 'type' else inside[2]}"
            is_renamed = note.outcome == "unchanged" and key != note.key
            explanation = f"trainer.{note.key}" if is_renamed else note.explanation
            outcome = "renamed" if is_renamed else note.outcome
            earlier = by_key.get(key)
            if earlier is None or (note.changes_training and not earlier.changes_training):
                by_key[key] = Note(key, outcome, explanation, note.changes_training)
        for key in self.source.keys() - by_key.keys():
            if matches(key, "dataset.* dataset[[]*"):
                by_key[key] = Note(key, "renamed", "data.train")
            elif key.startswith("dataset_val."):
                by_key[key] = Note(key, "renamed", "data.eval")
        return list(by_key.values())


def read(source: dict[str, Any]) -> Torchtune | None:
    """The config as keys of the other tools; None if no section of the file is a component of
    torchtune.

    Raises UserError for a training that is neither SFT nor DPO on texts.
    """
    if not any(isinstance(value, dict) and _COMPONENT in value for value in source.values()):
        return None
    tune = Torchtune(_resolved(source))
    for key, method in _TABLE["other_methods"].items():
        if key in source:
            raise UserError(
                f"{key}: this file trains with {method}, but only SFT and DPO on texts are supported"
            )
    loss = _component(tune, "loss")
    if loss.startswith("DPO"):
        tune.task = "dpo"
    elif loss and not matches(loss, _TABLE["sft_losses"]):
        raise UserError(f"loss.{_COMPONENT}: is {loss}, but only SFT and DPO are supported")
    key, name = f"model.{_COMPONENT}", _component(tune, "model")
    if name.startswith(("lora_", "qlora_")):
        tune.put("use_peft", True, key)
        if name.startswith("qlora_"):
            tune.put("load_in_4bit", True, key)
        modules = [
            _MODULES.get(module, module)
            for module in tune.source.get("model.lora_attn_modules") or ()
        ]
        modules += _MLP if tune.source.get("model.apply_lora_to_mlp") else []
        tune.put("lora_target_modules", modules, "model.lora_attn_modules")
        if "model.apply_lora_to_mlp" in tune.source:
            tune.notes.append(
                Note("model.apply_lora_to_mlp", "renamed", "model.lora.target_modules")
            )
    elif name:
        tune.notes.append(Note(key, "dropped", "checkpointer.checkpoint_dir names the model"))
    if optimizer := _component(tune, "optimizer"):
        tune.put("optim", _TABLE["optimizers"].get(optimizer, optimizer), f"optimizer.{_COMPONENT}")
    betas = tune.source.get("optimizer.betas")
    for name, value in zip(
        ("adam_beta1", "adam_beta2"), betas if isinstance(betas, list) else (), strict=False
    ):
        tune.put(name, value, "optimizer.betas")
    if schedule := _component(tune, "lr_scheduler"):
        tune.put(
            "lr_scheduler_type",
            "cosine" if "cosine" in schedule else schedule,
            f"lr_scheduler.{_COMPONENT}",
        )
    entries = (
        source["dataset"] if isinstance(source.get("dataset"), list) else [source.get("dataset")]
    )
    if entries != [None]:
        places = (
            [f"dataset[{index}]" for index in range(len(entries))]
            if len(entries) > 1
            else ["dataset"]
        )
        tune.put("datasets", [_entry(tune, place) for place in places], "dataset")
    if "dataset_val" in source:
        tune.put("test_datasets", [_entry(tune, "dataset_val")], "dataset_val")
        if steps := tune.source.get("run_val_every_n_steps"):
            tune.put("eval_strategy", "steps", "run_val_every_n_steps")
            tune.put("eval_steps", steps, "run_val_every_n_steps")
    if tune.source.get("dtype") == "bf16":  # of the weights too
        tune.put("pure_bf16", True, "dtype")
    if tune.source.get("max_steps_per_epoch"):
        steps = tune.source["max_steps_per_epoch"] * tune.source.get("epochs", 1)
        tune.put("max_steps", steps, "max_steps_per_epoch")
    named = {*tune.names.values(), *(note.key for note in tune.notes)}
    for key, value in tune.source.items():
        if key in named or key.startswith(("dataset.", "dataset[", "dataset_val.")):
            continue
        name, values = _TABLE["values"].get(key, (_TABLE["renamed"].get(key), {}))
        value = values.get(str(value), value)
        if name and not (values and value == "default"):
            tune.put(name, value, key)
            continue
        rows = [(names, reason, False) for reason, names in _TABLE["dropped"].items()]
        rows += [(names, reason, True) for reason, names in _TABLE["changes"].items()]
        row = next((row for row in rows if matches(key, row[0])), None)
        if row is None:
            tune.notes.append(Note(key, "unknown"))
        else:
            tune.notes.append(
                Note(key, "dropped", row[1], row[2] and value not in (None, False, 0, "", []))
            )
    return tune


def _resolved(source: dict[str, Any]) -> dict[str, Any]:
    """The keys of sections, and those of each dataset in a list, by dotted names.

    In the values `${key}` is replaced by the text of that key.
    """
    flat: dict[str, Any] = {}
    for key, value in source.items():
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            flat |= {
                f"{key}[{index}].{k}": v
                for index, entry in enumerate(value)
                for k, v in entry.items()
            }
        elif isinstance(value, dict) and value:
            flat |= {f"{key}.{k}": v for k, v in value.items()}
        else:
            flat[str(key)] = value

    values = json.dumps(flat, ensure_ascii=False)
    return json.loads(
        re.sub(r"\$\{([\w.]+)\}", lambda m: json.dumps(str(flat.get(m[1], m[0])))[1:-1], values)
    )


def _component(tune: Torchtune, section: str) -> str:
    """The name of a section's class, without its modules; empty if there is none."""
    return str(tune.source.get(f"{section}.{_COMPONENT}") or "").rpartition(".")[2]


def _entry(tune: Torchtune, place: str) -> dict[str, Any]:
    """A dataset as an entry of `datasets`, with the recipe's columns.
    Raises UserError for an unknown class.
    """
    keys = {
        key.removeprefix(place + "."): value
        for key, value in tune.source.items()
        if key.startswith(place + ".")
    }
    name = str(keys.pop(_COMPONENT, None) or "").rpartition(".")[2]
    if name not in _TABLE["datasets"]:
        known = ", ".join(_TABLE["datasets"])
        raise UserError(
            f"{place}.{_COMPONENT}: found {name or 'no class'}; write one of {known}, or convert by hand"
        )
    kind, path, columns = (
        _TABLE["datasets"][name].get(key) for key in ("kind", "source", "columns")
    )
    columns = dict(columns or {})
    own: Any = keys.get("column_map") if isinstance(keys.get("column_map"), dict) else {}
    theirs = {"input": "instruction", "output": "output"} if kind == "instruct" else {}
    columns |= {theirs.get(column, column): value for column, value in own.items()}
    if kind == "chat" and keys.get("conversation_column") not in (
        None,
        "messages",
        "conversations",
    ):
        columns["messages"] = keys["conversation_column"]
    if kind == "text" and keys.get("column") not in (None, "text"):
        columns["text"] = keys["column"]
    entry = {
        "path": keys.get("source") or path,
        **{key: keys[key] for key in _PASSED if keys.get(key)},
    }
    # whose prompts are not trained by default, unlike those of alpaca_dataset
    if kind in ("alpaca", "instruct"):
        entry["type"] = "alpaca"
    if columns:
        entry["names"] = {"columns": columns}
    if place == "dataset_val":
        return entry
    if keys.get("packed"):
        tune.put("packing", True, f"{place}.packed")
    trains_prompts = keys.get("train_on_input", kind == "alpaca")
    if kind == "text":
        tune.trainer["assistant_only_loss"] = False
    elif trains_prompts and tune.task == "sft":
        tune.trainer["assistant_only_loss" if kind == "chat" else "completion_only_loss"] = False
    for key, reason in _TABLE["dataset_changes"].items():
        if keys.get(key) is not None:
            tune.notes.append(Note(f"{place}.{key}", "dropped", reason, True))
    return entry
