"""Conversion of datasets to `data.train` and `data.eval`.

Each training split of a mixture becomes a source with its weight. A split whose name is a test split's is never trained
on; it becomes data.eval if the source evaluates during training. Settings without a counterpart are noted.
"""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import UserError
from ..recipe.data_files import is_test_split
from ..recipe.model import is_local
from .data_formats import FIELDS, axolotl_names
from .key_tables import AS_HERE, AS_READ, COLUMNS, OTHERWISE, OTHERWISE_BECAUSE, RECOGNISED, Note, matches, number

# Keys that name datasets; the first that is present counts, as in the handbook and in TRL.
ROOTS = ("dataset_mixture", "dataset_mixer", "datasets", "dataset_name", "dataset")
BESIDE = "dataset_splits dataset_configs dataset_config dataset_train_split dataset_test_split test_split_size "
BESIDE += "val_set_size val_size test_datasets eval_dataset dataset_dir dataset_text_field max_samples mask_history"
_EVAL_DATA = ("dataset_test_split", "test_datasets", "eval_dataset")
FILE_FORMATS = ("json", "parquet", "csv", "text")
"""Formats that `path` names where `data_files` names the files."""
_ENTRY = ("path", "split", "at", "revision", "config", "data_files", "weight", "fraction", "names", "not_read")
_FIRST = re.compile(r"([^\[]+)\[:(\d+)\]")


@dataclass
class Data:
    """The recipe's data section, the reasons of values that are not from the source (by dotted key), and the notes."""

    section: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def drop(self, key: str, reason: str, changes_training: bool = False) -> None:
        """Add the note that `key` was dropped."""
        self.notes.append(Note(key, "dropped", reason, changes_training))


def read_data(source: dict[str, Any], evaluates: bool) -> Data:
    """The data section, with a note on each key of the source that is about data.

    evaluates: whether the source computes a loss on held-out examples during training. Raises UserError if no dataset
    is named, or only test splits.
    """
    root = next((key for key in ROOTS if source.get(key)), None)
    if root is None:
        raise UserError("no dataset is named: write dataset_name (or datasets, dataset_mixture)")
    data, entries = Data(), _entries(source, root)
    held_out = [e for e in entries if is_test_split(e["split"])]
    train = [e for e in entries if e not in held_out]
    if not train:
        raise UserError(f"{root}: only test splits are named; name one to train on")
    if held_out:
        names = ", ".join(f"{e['path']} {e['split']}" for e in held_out)
        data.drop(f"{root}[test]", f"the official test split would be trained on; left out: {names}", True)
    text_column = source.get("dataset_text_field")
    splits = [_split(entry, root, data, text_column) for entry in train]
    for split in splits:
        if (limit := number(source.get("max_samples"))) and "limit" not in split:
            split["limit"] = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        if source.get("mask_history"):
            split["mask_history"] = True
    data.section["train"] = splits if len(splits) > 1 else splits[0]
    known = {*AS_READ, *_ENTRY, *FIELDS}
    for entry in entries:
        unknown = [key for key in entry if key not in known and not matches(key, OTHERWISE)]
        data.notes += [Note(f"{entry['at']}.{key}", "unknown") for key in unknown]
    data.notes.append(Note(root, "renamed", "data.train"))
    if evaluates or source.get("eval_dataset"):
        _eval(source, root, train, held_out, data)
    _hold_out(source, root, data)
    _note_others(source, root, data)
    several = {f"train[{i}]": split for i, split in enumerate(splits)} if len(splits) > 1 else {"train": splits[0]}
    for name, split in (several | {k: v for k, v in data.section.items() if k == "eval"}).items():
        if "path" in split and not is_local(str(split["path"])):
            split["bad_examples"] = "drop"
            data.ours[f"data.{name}.bad_examples"] = "reported and counted; a file of your own is better fixed"
    return data


def _entries(source: dict[str, Any], root: str) -> list[dict[str, Any]]:
    """One dict per dataset and split: its keys, with `path`, `split`, and `at`, its place in the source."""
    datasets = source[root]
    if root == "dataset_mixture":
        datasets = datasets.get("datasets") if isinstance(datasets, dict) else None
    elif root == "dataset_mixer" and isinstance(datasets, dict):
        splits = _list(source.get("dataset_splits") or "train")
        configs = [*_list(source.get("dataset_configs") or []), *[None] * len(datasets)]
        parts = zip(datasets.items(), configs, strict=False)  # more configurations than datasets, never fewer
        datasets = [{"path": p, "weight": w, "config": c, "split": s} for (p, w), c in parts for s in splits]
    elif root == "dataset" and not isinstance(datasets, list):
        raise UserError(
            f"dataset: found {datasets!r}; LLaMA-Factory's names stand in dataset_info.json, beside the file"
        )
    elif root == "dataset_name":
        split = source.get("dataset_train_split") or "train"
        datasets = [{"path": datasets, "split": split, "config": source.get("dataset_config")}]
    if not isinstance(datasets, list) or not all(isinstance(e, dict) for e in datasets):
        raise UserError(f"{root}: found {source[root]!r}; write a list of datasets")
    alias = {"id": "path", "name": "config"}
    entries = [{alias.get(key, key): value for key, value in entry.items()} for entry in datasets]
    return [
        {**file, "split": split.strip(), "at": f"{root}[{i}]"}
        for i, e in enumerate(entries)
        for split in str(e.get("split") or "train").split("+")
        for file in _files(e, split.strip(), f"{root}[{i}]")
    ]


def _files(entry: dict[str, Any], split: str, at: str) -> list[dict[str, Any]]:
    """The entry, or one for each of its `data_files`, if these are files of this machine: a path names one here."""
    path, files = entry.get("path"), entry.get("data_files")
    files = _list(files.get(split) if isinstance(files, dict) else files)
    folder = path if isinstance(path, str) and is_local(path) else ""
    if all(isinstance(file, str) for file in files) and (folder or path in (None, *FILE_FORMATS)):
        rest = {key: value for key, value in entry.items() if key != "data_files"}
        return [{**rest, "path": os.path.join(folder, file)} for file in files]
    if path is None:
        raise UserError(f"{at}: names no data; write path, or data_files")
    return [entry]


def trains_completions(source: dict[str, Any]) -> bool:
    """Whether all examples are read as prompts and completions, of which the completions alone are trained anyway."""
    root = next(key for key in ROOTS if source.get(key))
    if root not in ("datasets", "dataset"):
        return False
    kinds = [entry.get("type") for entry in _entries(source, root)]
    return all(isinstance(kind, dict) or str(kind).startswith("alpaca") for kind in kinds)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _split(entry: dict[str, Any], root: str, data: Data, text_column: Any) -> dict[str, Any]:
    """The recipe's split for an entry; keys without a counterpart are noted. text_column: of plain texts."""
    at = entry["at"]
    config = "dataset_config" if root == "dataset_name" else f"{at}.config"
    path = entry["path"]
    part, is_cut = _part(path, entry["split"])
    if is_cut:
        data.drop(f"{at}.split", f"{entry['split']}: a file is taken whole; write limit", True)
    names, explained = axolotl_names(entry)
    part |= entry.get("names") or names
    if text_column not in (None, "text") and "columns" not in part:
        part["columns"] = {"text": str(text_column)}
    for key, value in entry.items():
        if value is None:
            continue
        if key == "revision":
            part["revision"] = value
        elif key == "config" and is_local(str(path)):
            data.drop(config, "a file has no configuration")
        elif key == "config":
            part["name"] = str(value)
            data.notes.append(Note(config, "renamed", "data.train.name"))
        elif key == "data_files":
            data.drop(f"{at}.{key}", f"{value}: the dataset's own files are loaded", True)
        elif key == "weight":
            if value != 1:
                part["weight"] = value
                data.notes.append(Note(f"{at}.{key}", "renamed", "weight, in data.train; drawn by trainer.seed"))
        elif key == "fraction":
            reason = f"{value}: a share of the mixture; write the weight, a multiple of the source's own examples"
            data.drop(f"{at}.{key}", reason, True)
        elif key not in _ENTRY:
            _note_form(key, value, explained.get(key), at, data)
        elif key == "not_read":
            data.drop(f"{at}.columns", f"{value}: not read", True)
    return part


def _note_form(key: str, value: Any, explained: tuple[str, bool] | None, at: str, data: Data) -> None:
    """Note a key about the form of examples. explained: explanation and change of a key that is read."""
    if key == "type" and value == "completion":
        cut = "plain text; an example longer than max_length is truncated, in the source continued in a next one"
        data.drop(f"{at}.{key}", cut, True)
    elif explained is not None:
        outcome = "renamed" if explained[0].startswith("data.train") else "dropped"
        data.notes.append(Note(f"{at}.{key}", outcome, *explained))
    elif value in AS_READ.get(key, ()) or (key == "columns" and _are_read(value)):
        data.drop(f"{at}.{key}", AS_HERE.get(key, "the recipe's columns are recognised"))
    elif key in AS_READ or matches(key, OTHERWISE):
        reason = next((reason for names, reason in OTHERWISE_BECAUSE.items() if matches(key, names)), RECOGNISED)
        data.drop(f"{at}.{key}", f"{value}: {reason}", True)


def _part(path: Any, split: str) -> tuple[dict[str, Any], bool]:
    """(path, split and limit of a recipe; whether the split is a part that a recipe cannot express)."""
    if first := _FIRST.fullmatch(split):
        number = int(first[2])
        return {"path": path, "split": first[1], "limit": number}, False
    if is_local(str(path)) and "[" in split:
        return {"path": path, "split": split.partition("[")[0]}, True
    return {"path": path, "split": split}, False


def _are_read(columns: Any) -> bool:
    return isinstance(columns, list) and all(column in COLUMNS for column in columns)


def _eval(
    source: dict[str, Any], root: str, train: list[dict[str, Any]], held_out: list[dict[str, Any]], data: Data
) -> None:
    """Write data.eval if the source has a split for it: the first test split of a dataset that is trained on."""
    theirs = source.get("test_datasets")
    paths = [entry["path"] for entry in train]
    same = [e for e in held_out if e["path"] in paths]
    if isinstance(theirs, list) and len(theirs) == 1:
        same = _entries({"datasets": theirs}, "datasets")
    elif root == "dataset":
        same = source.get("eval_dataset") or []
    elif root == "dataset_name":
        split = source.get("dataset_test_split") or "test"
        same = [{"path": paths[0], "split": split, "config": source.get("dataset_config")}]
    if same:
        data.section["eval"] = _part(same[0]["path"], str(same[0]["split"]))[0]
        if same[0].get("config") and not is_local(str(same[0]["path"])):
            data.section["eval"]["name"] = str(same[0]["config"])
        data.section["eval"] |= same[0].get("names") or axolotl_names(same[0])[0]
        if same[0] in held_out:
            data.ours["data.eval.split"] = "the source splits examples off its mixture"


SPLIT_KEYS = {"max_samples": "limit", "mask_history": "mask_history"}
"""LLaMA-Factory's keys about every dataset -> the recipe's."""
SIZES = ("test_split_size", "val_set_size", "val_size")


def _hold_out(source: dict[str, Any], root: str, data: Data) -> None:
    """Write data.eval as a fraction or a number, if the source takes one out of its training examples."""
    inside = source[root] if root == "dataset_mixture" else {}
    sizes = (_held_out(where.get(key)) for where in (source, inside) for key in SIZES)
    if (held_out := next(filter(None, sizes), None)) and "eval" not in data.section:
        data.section["eval"] = held_out


def _held_out(size: Any) -> dict[str, Any] | None:
    """data.eval for such a size; None if it is no number of examples and no fraction of them."""
    if not isinstance(size, int | float) or size is True or not 0 < size < math.inf:
        return None
    return {"fraction": size} if size < 1 else {"examples": int(size)}


def _note_others(source: dict[str, Any], root: str, data: Data) -> None:
    """Note the remaining keys about data."""
    has_eval = "eval" in data.section
    inside = source[root] if root == "dataset_mixture" else {}
    sizes = {**dict.fromkeys(SIZES, source), f"{root}.test_split_size": inside}
    for key, where in sizes.items():
        size = where.get(key.rpartition(".")[2])
        if (held_out := _held_out(size)) and data.section.get("eval") == held_out:
            data.notes.append(Note(key, "renamed", f"data.eval.{next(iter(held_out))}; a hash of each example chooses"))
        elif isinstance(size, int) and size >= 1 and has_eval and "path" in data.section["eval"]:
            data.section["eval"]["limit"] = size
            data.notes.append(Note(key, "renamed", "data.eval.limit"))
        elif size and not has_eval:
            data.drop(
                key,
                f"{size} of the examples were held out; here all are trained on, unless data.eval names others",
                True,
            )
        elif size is not None or key in source:
            data.drop(key, "replaced by data.eval" if has_eval else "no examples are held out")
    if "seed" in inside:
        data.drop(f"{root}.seed", "examples are shuffled by trainer.seed")
    known = ("datasets", "seed", "test_split_size")
    data.notes += [Note(f"{root}.{key}", "unknown") for key in inside if key not in known]
    splits = "dataset_splits" if root == "dataset_mixer" else "dataset_train_split" if root == "dataset_name" else ""
    noted = {note.key for note in data.notes}
    for key in [key for key in source if key not in noted]:
        if key == splits:
            data.notes.append(Note(key, "renamed", "data.train.split"))
        elif key == "dataset_text_field":
            is_mapped = source[key] not in (None, "text")
            data.notes.append(
                Note(
                    key,
                    *("renamed", "data.train.columns")
                    if is_mapped
                    else ("dropped", "the recipe's columns are recognised"),
                )
            )
        elif key == "dataset_dir" and root == "dataset":
            data.notes.append(Note(key, "renamed", "data.train.path"))
        elif key in SPLIT_KEYS and source[key]:
            data.notes.append(Note(key, "renamed", f"data.train.{SPLIT_KEYS[key]}"))
        elif key in _EVAL_DATA and has_eval:
            data.notes.append(Note(key, "renamed", "data.eval"))
        elif key in _EVAL_DATA:
            data.drop(key, "no evaluation during training")
        elif key in ROOTS or matches(key, BESIDE):
            data.drop(key, f"set by {root}")
