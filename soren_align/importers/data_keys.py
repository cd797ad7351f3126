"""Others' datasets as `data.train` and `data.eval`.

Of a mixture every training split becomes a source with its weight. A split that is called a test split is never trained
on; it becomes data.eval where a loss was asked for. What cannot be carried over is noted.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from ..recipe.references import is_local, is_test_split
from .key_tables import AS_READ, COLUMNS, OTHERWISE, TURNS, Note, among

# Where a dataset may be named; the first that is there counts, as in the handbook and in TRL.
ROOTS = ("dataset_mixture", "dataset_mixer", "datasets", "dataset_name")
BESIDE = "dataset_splits dataset_configs dataset_config dataset_train_split dataset_test_split test_split_size "
BESIDE += "val_set_size test_datasets"
_ENTRY = ("path", "split", "at", "revision", "config", "data_files", "weight", "fraction")
_FIRST = re.compile(r"([^\[]+)\[:(\d+)\]")


@dataclass
class Data:
    """The recipe's data section, what of it is ours (by dotted key), and what became of the source's keys."""

    section: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def note(self, key: str, words: str, changes: bool = False) -> None:
        """Tell that `key` was dropped."""
        self.notes.append(Note(key, "dropped", words, changes))


def read_data(source: dict[str, Any], asks_for_eval: bool) -> Data:
    """The data section, with a note on each key of the source that says something of data.

    asks_for_eval: whether the source measures a loss while it trains.
    UserError where no dataset is named, or only test splits.
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
        words = ", ".join(f"{e['path']} {e['split']}" for e in held_out)
        data.note(f"{root}[test]", f"the official test split would be trained on; left out: {words}", True)
    splits = [_split(entry, root, data) for entry in train]
    data.section["train"] = splits if len(splits) > 1 else splits[0]
    known = {*AS_READ, *_ENTRY}
    for entry in entries:
        unknown = [key for key in entry if key not in known and not among(key, OTHERWISE)]
        data.notes += [Note(f"{entry['at']}.{key}", "unknown") for key in unknown]
    data.notes.append(Note(root, "renamed", "data.train"))
    if asks_for_eval:
        _eval(source, root, train, held_out, data)
    _beside(source, root, data)
    several = {f"train[{i}]": split for i, split in enumerate(splits)} if len(splits) > 1 else {"train": splits[0]}
    for name, split in (several | {k: v for k, v in data.section.items() if k == "eval"}).items():
        if not is_local(str(split["path"])):
            split["bad_examples"] = "drop"
            data.ours[f"data.{name}.bad_examples"] = "counted and told; a file of yours is better mended"
    return data


def _entries(source: dict[str, Any], root: str) -> list[dict[str, Any]]:
    """One dict per dataset and split: what it says, with `path`, `split`, and `at`, where it stands."""
    found = source[root]
    if root == "dataset_mixture":
        found = found.get("datasets") if isinstance(found, dict) else None
    elif root == "dataset_mixer" and isinstance(found, dict):
        splits = _list(source.get("dataset_splits") or "train")
        configs = [*_list(source.get("dataset_configs") or []), *[None] * len(found)]
        parts = zip(found.items(), configs, strict=False)  # more configurations than datasets, never fewer
        found = [{"path": p, "weight": w, "config": c, "split": s} for (p, w), c in parts for s in splits]
    elif root == "dataset_name":
        split = source.get("dataset_train_split") or "train"
        found = [{"path": found, "split": split, "config": source.get("dataset_config")}]
    if not isinstance(found, list) or not all(isinstance(e, dict) for e in found):
        raise UserError(f"{root}: found {source[root]!r}; a list of datasets is meant")
    alias = {"id": "path", "name": "config"}
    entries = [{alias.get(key, key): value for key, value in entry.items()} for entry in found]
    return [
        {**e, "path": e.get("path"), "split": split.strip(), "at": f"{root}[{i}]"}
        for i, e in enumerate(entries)
        for split in str(e.get("split") or "train").split("+")
    ]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _split(entry: dict[str, Any], root: str, data: Data) -> dict[str, Any]:
    """The recipe's words for an entry; what they cannot say is noted."""
    at = entry["at"]
    config = "dataset_config" if root == "dataset_name" else f"{at}.config"
    files = entry.get("data_files")
    path = files if isinstance(files, str) and entry["path"] in ("json", "parquet") else entry["path"]
    found, left_out = _part(path, entry["split"])
    if left_out:
        data.note(f"{at}.split", f"{entry['split']}: a file is taken whole; write limit", True)
    reads_turns = _turns(entry) in TURNS
    for key, value in entry.items():
        if value is None:
            continue
        if key == "revision":
            found["revision"] = value
        elif key == "config" and value == "default":
            data.note(config, "a dataset's default configuration is loaded")
        elif key == "config":
            data.note(config, f"{value}: recipes name no configuration; the dataset's default one is loaded", True)
        elif key == "data_files" and value != path:
            data.note(f"{at}.{key}", f"{value}: the dataset's own files are loaded", True)
        elif key == "weight":
            if value != 1:
                found["weight"] = value
                data.notes.append(Note(f"{at}.{key}", "renamed", "weight, in data.train; drawn by trainer.seed"))
        elif key == "fraction":
            words = f"{value}: a share of the mixture; a recipe's weight is a share of the source's own rows: write it"
            data.note(f"{at}.{key}", words, True)
        elif key == "type" and value == "completion":
            data.note(f"{at}.{key}", "plain text; what is longer than max_length is cut, there it went on", True)
        elif (
            value in AS_READ.get(key, ()) or (key in _TURNS and reads_turns) or (key == "columns" and _are_read(value))
        ):
            data.note(f"{at}.{key}", "the recipe's columns are recognised")
        elif key in AS_READ or among(key, OTHERWISE):
            words = "rows are read by their columns: whole conversations (messages, ShareGPT's conversations), prompt "
            words += "and completion, text; chosen and rejected. Others are refused"
            data.note(f"{at}.{key}", f"{value}: {words}", True)
    return found


def _part(path: Any, split: str) -> tuple[dict[str, Any], bool]:
    """(path, split and limit as a recipe says them; whether a part was named that it cannot say)."""
    if first := _FIRST.fullmatch(split):
        number = int(first[2])
        return {"path": path, "split": first[1], "limit": number}, False
    if is_local(str(path)) and "[" in split:
        return {"path": path, "split": split.partition("[")[0]}, True
    return {"path": path, "split": split}, False


_TURNS = ("field_messages", "message_field_role", "message_field_content", "message_property_mappings")


def _turns(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Axolotl's column of turns, and a turn's keys of role and content."""
    given = entry.get("message_property_mappings")
    said = given if isinstance(given, dict) else {}
    more = tuple(key for key in said if key not in ("role", "content"))
    role = said.get("role") or entry.get("message_field_role") or "role"
    content = said.get("content") or entry.get("message_field_content") or "content"
    return (entry.get("field_messages") or "messages", role, content, *more)


def _are_read(columns: Any) -> bool:
    return isinstance(columns, list) and all(column in COLUMNS for column in columns)


def _eval(
    source: dict[str, Any], root: str, train: list[dict[str, Any]], held_out: list[dict[str, Any]], data: Data
) -> None:
    """data.eval, where the source names rows for it: the first test split of what is trained on."""
    theirs = source.get("test_datasets")
    paths = [entry["path"] for entry in train]
    same = [e for e in held_out if e["path"] in paths]
    if isinstance(theirs, list) and len(theirs) == 1:
        same = _entries({"datasets": theirs}, "datasets")
    elif root == "dataset_name":
        same = [{"path": paths[0], "split": source.get("dataset_test_split") or "test"}]
    if same:
        data.section["eval"] = _part(same[0]["path"], str(same[0]["split"]))[0]
        if same[0] in held_out:
            data.ours["data.eval.split"] = "the source cut rows off its mixture"


def _beside(source: dict[str, Any], root: str, data: Data) -> None:
    """The other keys that speak of data."""
    has_eval = "eval" in data.section
    inside = source[root] if root == "dataset_mixture" else {}
    sizes = {"test_split_size": source, "val_set_size": source, f"{root}.test_split_size": inside}
    for key, where in sizes.items():
        size = where.get(key.rpartition(".")[2])
        if isinstance(size, int) and size >= 1 and has_eval:
            data.section["eval"]["limit"] = size
            data.notes.append(Note(key, "renamed", "data.eval.limit"))
        elif size and not has_eval:
            data.note(
                key, f"{size} of the rows were held out; here all are trained on, or name others as data.eval", True
            )
        elif size is not None or key in source:
            data.note(key, "data.eval says what is held out" if has_eval else "nothing is held out")
    if "seed" in inside:
        data.note(f"{root}.seed", "rows are shuffled by trainer.seed")
    known = ("datasets", "seed", "test_split_size")
    data.notes += [Note(f"{root}.{key}", "unknown") for key in inside if key not in known]
    splits = "dataset_splits" if root == "dataset_mixer" else "dataset_train_split" if root == "dataset_name" else ""
    noted = {note.key for note in data.notes}
    for key in [key for key in source if key not in noted]:
        if key == splits:
            data.notes.append(Note(key, "renamed", "data.train.split"))
        elif key in ("dataset_test_split", "test_datasets") and has_eval:
            data.notes.append(Note(key, "renamed", "data.eval"))
        elif key in ("dataset_test_split", "test_datasets"):
            data.note(key, "nothing is measured on the way")
        elif key in ROOTS or among(key, BESIDE):
            data.note(key, f"{root} says it")
