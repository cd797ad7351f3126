"""Convert the datasets of other tools to `data.train` and `data.eval`.

Each training split of a mixture becomes a source with its weight. A split whose name is a test
split's is never trained on; it becomes data.eval if the source evaluates during training. Other
names of columns and roles, and formats, are left to the user.
"""

import math
import os
from pathlib import Path
from typing import Any

from ..core.errors import UserError, did_you_mean
from ..core.files import read_json
from ..recipe.data_files import is_test_split
from ..recipe.model import is_local
from .keys import TABLES, Conversion, Note, matches, number

# Keys that name datasets; the first that is present counts, as in the handbook and in TRL.
ROOTS = ("dataset_mixture", "dataset_mixer", "datasets", "dataset_name", "dataset")
BESIDE = "dataset_splits dataset_configs dataset_config dataset_train_split dataset_test_split "
BESIDE += "test_split_size val_set_size val_size test_datasets eval_dataset dataset_dir"
SIZES = ("test_split_size", "val_set_size", "val_size")
FILE_FORMATS = ("json", "parquet", "csv", "text")
"""Formats that `path` names where `data_files` names the files."""
INFO = "dataset_info.json"
_EVALUATION = ("dataset_test_split", "test_datasets", "eval_dataset")


def read_data(c: Conversion, evaluates: bool) -> None:
    """Write the data section, and a note on each key of the source that is about data.

    evaluates: whether the source computes a loss on held-out examples during training. Raises
    UserError if no dataset is named, or only test splits.
    """
    source, data = c.flat, c.recipe["data"]
    root = next((key for key in ROOTS if source.get(key)), None)
    if root is None:
        raise UserError("the file names no dataset; add dataset_name, datasets or dataset_mixture")
    entries = _entries(source, root)
    # Training on a test split would make later scores on it worthless, whatever the source does.
    held_out = [entry for entry in entries if is_test_split(entry["split"])]
    train = [entry for entry in entries if entry not in held_out]
    if not train:
        raise UserError(f"{root}: all splits are test splits; add a split to train on")
    # Scores of a model that was trained on a test split mean nothing: the first note states it.
    c.rename(root, "data.train")
    if held_out:
        names = ", ".join(f"{entry['path']} {entry['split']}" for entry in held_out)
        reason = f"the source trains on test splits, which the recipe leaves out: {names}"
        c.notes.append(Note(f"{root}[test]", "dropped", reason, changes_training=True))
    # The keys of all entries are noted, once where several splits share them.
    parts = [(entry, _split(entry, c)) for entry in entries]
    c.notes = [note for i, note in enumerate(c.notes) if note not in c.notes[:i]]
    splits = [split for entry, split in parts if entry in train]
    data["train"] = splits if len(splits) > 1 else splits[0]
    inside = source[root] if root == "dataset_mixture" else {}
    if evaluation := _evaluation(root, train, held_out, evaluates, c):
        data["eval"] = evaluation
    else:
        sizes = (_held_out(where.get(key)) for where in (source, inside) for key in SIZES)
        if size := next(filter(None, sizes), None):
            data["eval"] = size  # taken out of the training examples
    _note_others(root, inside, c)
    # Strangers' data often have some bad examples; in one's own file each is an error to fix.
    places = {"train": splits[0]} if len(splits) == 1 else {}
    places |= {f"train[{i}]": split for i, split in enumerate(splits) if len(splits) > 1}
    for place, split in (places | {"eval": data.get("eval", {})}).items():
        if "path" in split and not is_local(str(split["path"])):
            split["bad_examples"] = "drop"
            reason = "bad examples are dropped and counted; to keep one, fix it in your own file"
            c.ours[f"data.{place}.bad_examples"] = reason


def _entries(source: dict[str, Any], root: str) -> list[dict[str, Any]]:
    """One dict per dataset, split and file: its keys, with `path`, `split`, and `at`, its place in
    the source.
    """
    datasets = source[root]
    if root == "dataset_mixture":
        datasets = datasets.get("datasets") if isinstance(datasets, dict) else None
    elif root == "dataset_mixer" and isinstance(datasets, dict):
        splits = _list(source.get("dataset_splits") or "train")
        configs = [*_list(source.get("dataset_configs") or []), *[None] * len(datasets)]
        # More configurations than datasets, never fewer.
        parts = zip(datasets.items(), configs, strict=False)
        datasets = [
            {"path": p, "weight": w, "config": c, "split": s} for (p, w), c in parts for s in splits
        ]
    elif root == "dataset_name":
        split = source.get("dataset_train_split") or "train"
        datasets = [{"path": datasets, "split": split, "config": source.get("dataset_config")}]
    if not isinstance(datasets, list) or not all(isinstance(e, dict) for e in datasets):
        raise UserError(f"{root}: found {source[root]!r}; write a list of datasets")
    alias = {"id": "path", "name": "config"}
    entries = []
    for i, dataset in enumerate(datasets):
        entry = {alias.get(key, key): value for key, value in dataset.items()}
        # Local files of a format are one entry each, because a path names one file.
        files = [entry.get("path")]
        if files[0] in (None, *FILE_FORMATS) and entry.get("data_files"):
            files = _list(entry.pop("data_files"))
        if not all(isinstance(file, str) for file in files):
            raise UserError(f"{root}[{i}]: names no data; add path or data_files")
        # `a+b` is the hub's syntax for several splits. Each is an entry, since one of them may be a
        # test split.
        for split in str(entry.get("split") or "train").split("+"):
            place = {"split": split.strip(), "at": f"{root}[{i}]"}
            entries += [{**entry, "path": file, **place} for file in files]
    return entries


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _split(entry: dict[str, Any], c: Conversion) -> dict[str, Any]:
    """The recipe's split for an entry; each of its keys without a counterpart is noted."""
    at, path, tables = entry["at"], entry["path"], TABLES["datasets"]
    split = {"path": path, "split": entry["split"]}
    # A part of a split is the hub's syntax; a file has no splits.
    if is_local(path) and "[" in entry["split"]:
        c.leave(f"{at}.split", entry["split"], "a file is read whole; write data.train.limit")
        split["split"] = entry["split"].partition("[")[0]
    if c.flat.get("dataset_text_field") not in (None, "text"):
        split["columns"] = {"text": str(c.flat["dataset_text_field"])}
    if limit := number(c.flat.get("max_samples")):
        whole = isinstance(limit, float) and limit.is_integer()
        split["limit"] = int(limit) if whole else limit
    for key, value in entry.items():
        place = f"{at}.{key}"
        if value is None or key in ("path", "split", "at"):
            continue
        if key == "revision":
            split["revision"] = value
        elif key == "config" and not is_local(path):
            split["name"] = str(value)
            c.rename(place, "data.train.name")
        elif key == "config":
            c.drop(place, "has no effect, because a file has no configurations")
        elif key == "weight" and value != 1:
            split["weight"] = value
            c.rename(place, "weight in data.train; the examples are drawn with trainer.seed")
        elif value in tables["as_here"].get(key, ()):
            c.drop(place, "means the same in a recipe")
        elif remedy := [text for names, text in tables["yours"].items() if matches(key, names)]:
            c.leave(place, value, remedy[0])
        elif key != "weight":
            c.notes.append(Note(place, "unknown"))
    return split


def _evaluation(
    root: str,
    train: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    evaluates: bool,
    c: Conversion,
) -> dict[str, Any] | None:
    """The held-out split that the source names, or a test split of a dataset it trains on."""
    theirs: Any = c.flat.get("eval_dataset")
    # LLaMA-Factory names its held-out data, Axolotl a list of them, TRL a split; the handbook holds
    # out a part of its mixture.
    if root == "dataset" and theirs:
        entries = _entries({"datasets": theirs}, "datasets")
    elif not evaluates:
        return None
    elif isinstance(theirs := c.flat.get("test_datasets"), list) and len(theirs) == 1:
        entries = _entries({"datasets": theirs}, "datasets")
    elif root == "dataset_name":
        entries = [{**train[0], "split": c.flat.get("dataset_test_split") or "test"}]
    else:
        trained = [entry["path"] for entry in train]
        entries = [entry for entry in held_out if entry["path"] in trained]
        if entries:
            reason = "this split is evaluated; the source holds out examples of its mixture instead"
            c.ours["data.eval.split"] = reason
    if not entries:
        return None
    evaluation = {"path": entries[0]["path"], "split": str(entries[0]["split"])}
    if entries[0].get("config") and not is_local(entries[0]["path"]):
        evaluation["name"] = str(entries[0]["config"])
    return evaluation


def _held_out(size: Any) -> dict[str, Any] | None:
    """data.eval for such a size; None if it is no number of examples and no fraction of them."""
    if not isinstance(size, int | float) or size is True or not 0 < size < math.inf:
        return None
    return {"fraction": size} if size < 1 else {"examples": int(size)}


def _note_others(root: str, inside: dict[str, Any], c: Conversion) -> None:
    """Note the remaining keys about data; `inside`: those beside the datasets of a mixture."""
    source, evaluation = c.flat, c.recipe["data"].get("eval")
    # A size is a number of held-out examples, a share of them, or the limit of a held-out split.
    for key, where in {**dict.fromkeys(SIZES, source), f"{root}.test_split_size": inside}.items():
        size = where.get(key.rpartition(".")[2])
        if (held_out := _held_out(size)) and evaluation == held_out:
            c.rename(key, f"data.eval.{next(iter(held_out))}; a hash decides which examples")
        elif held_out and "examples" in held_out and evaluation and "path" in evaluation:
            evaluation["limit"] = held_out["examples"]
            c.rename(key, "data.eval.limit")
        elif size and evaluation is None:
            c.leave(key, size, "write data.eval to hold out examples; the recipe trains on all")
        elif size is not None or key in source:
            c.drop(key, "is replaced by data.eval" if evaluation else "no examples are held out")
    if "seed" in inside:
        c.drop(f"{root}.seed", "the examples are shuffled with trainer.seed")
    known = ("datasets", "seed", "test_split_size")
    c.notes += [Note(f"{root}.{key}", "unknown") for key in inside if key not in known]
    splits = {"dataset_mixer": "dataset_splits", "dataset_name": "dataset_train_split"}.get(root)
    noted = {note.key for note in c.notes}
    for key in [key for key in source if key not in noted]:
        if key == splits:
            c.rename(key, "data.train.split")
        elif key == "dataset_text_field":
            c.rename(key, "data.train.columns, if it is not text")
        elif key == "max_samples" and source[key]:
            c.rename(key, "data.train.limit")
        elif key in _EVALUATION:
            c.rename(key, "data.eval") if evaluation else c.drop(key, "nothing is evaluated")
        elif key in ROOTS or matches(key, BESIDE):
            c.drop(key, f"{root} sets the data")


def with_datasets(source: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The source with the entries of LLaMA-Factory's dataset_info.json in place of the names in
    `dataset` and `eval_dataset`; others are unchanged.

    folder: the file's. Raises UserError if dataset_info.json is missing or does not have a name.
    """
    if "finetuning_type" not in source and "stage" not in source:
        return source
    if not isinstance(source.get("dataset"), str | list):
        return source
    # In dataset_dir from the file's folder or one above it, as its examples stand, or from the
    # working directory.
    name = str(source.get("dataset_dir") or "data")
    candidates = (place / name / INFO for place in (folder, *folder.parents[:2], Path.cwd()))
    if (file := next((file for file in candidates if file.is_file()), None)) is None:
        remedy = f"copy {INFO} there, or change dataset_dir"
        raise UserError(f"dataset: there is no {name}/{INFO} beside this file; {remedy}")
    info, resolved = read_json(file), {}
    if not isinstance(info, dict):
        raise UserError(f"{file}: is no JSON object; write one with the names of datasets as keys")
    for key in ("dataset", "eval_dataset"):
        names: Any = source.get(key) or []
        names = [part.strip() for part in names.split(",")] if isinstance(names, str) else names
        resolved[key] = [_factory_entry(name, info, file) for name in _list(names)]
    return {**source, **resolved}


def _factory_entry(name: Any, info: dict[str, Any], file: Path) -> dict[str, Any]:
    """A dataset's entry, with the path of its file, or its name on the hub, as `path`."""
    about = info.get(name) if isinstance(name, str) else None
    if not isinstance(about, dict):
        remedy = did_you_mean(name, info, "add this dataset")
        raise UserError(f"dataset: {file} has no {name!r}{remedy}")
    entry = {"config" if key == "subset" else key: value for key, value in about.items()}
    own, hub = entry.pop("file_name", None), entry.pop("hf_hub_url", None)
    if isinstance(own, str):  # relative to the working directory if the file is below it
        path = os.path.relpath(file.parent / own)
        hub = str((file.parent / own).resolve()) if path.startswith("..") else path
    if not isinstance(hub, str):
        remedy = "add file_name or hf_hub_url"
        raise UserError(f"dataset: {name} has neither a file nor a hub dataset in {INFO}; {remedy}")
    return {**entry, "path": hub}
