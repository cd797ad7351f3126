"""Convert the datasets of other tools to `data.train` and `data.eval`.

Each training split of a mixture becomes a source with its weight. A split whose name is a test
split's is never trained on; it becomes data.eval if the source evaluates during training. Settings
without a counterpart are noted. The names of LLaMA-Factory's `dataset:` are resolved by
dataset_info.json first (`with_datasets`).
"""

import math
import os
import re
from pathlib import Path
from typing import Any

from ..core.errors import UserError, did_you_mean
from ..core.files import read_json
from ..recipe.data_files import is_test_split
from ..recipe.model import is_local
from .keys import TABLES, Conversion, Note, matches, number

# Keys that name datasets; the first that is present counts, as in the handbook and in TRL.
ROOTS = ("dataset_mixture", "dataset_mixer", "datasets", "dataset_name", "dataset")
BESIDE = "dataset_splits dataset_configs dataset_config dataset_train_split dataset_test_split test_split_size "
BESIDE += "val_set_size val_size test_datasets eval_dataset dataset_dir dataset_text_field max_samples mask_history"
_EVAL_DATA = ("dataset_test_split", "test_datasets", "eval_dataset")
SPLIT_KEYS = {"max_samples": "limit", "mask_history": "mask_history"}
"""LLaMA-Factory's keys about every dataset -> the recipe's."""
SIZES = ("test_split_size", "val_set_size", "val_size")
FILE_FORMATS = ("json", "parquet", "csv", "text")
"""Formats that `path` names where `data_files` names the files."""
_ENTRY = (
    "path",
    "split",
    "at",
    "revision",
    "config",
    "data_files",
    "weight",
    "fraction",
    "names",
    "not_read",
)
_FIRST = re.compile(r"([^\[]+)\[:(\d+)\]")
_READ = "soren-align recognises the columns"
COLUMNS = (
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "prompt",
    "completion",
    "text",
)
COLUMNS += ("chosen", "rejected")


def read_data(c: Conversion, evaluates: bool) -> None:
    """Write the data section, and a note on each key of the source that is about data.

    evaluates: whether the source computes a loss on held-out examples during training. Raises
    UserError if no dataset is named, or only test splits.
    """
    source, section = c.flat, c.recipe["data"]
    root = next((key for key in ROOTS if source.get(key)), None)
    if root is None:
        raise UserError("the file names no dataset; add dataset_name, datasets or dataset_mixture")
    entries = _entries(source, root)
    kinds = [entry.get("type") for entry in entries]
    is_pair = (isinstance(kind, dict) or str(kind).startswith("alpaca") for kind in kinds)
    c.trains_completions = root in ("datasets", "dataset") and all(is_pair)
    held_out = [e for e in entries if is_test_split(e["split"])]
    train = [e for e in entries if e not in held_out]
    if not train:
        raise UserError(f"{root}: all splits are test splits; add a split to train on")
    if held_out:
        names = ", ".join(f"{e['path']} {e['split']}" for e in held_out)
        c.drop(
            f"{root}[test]",
            f"the source trains on test splits, which the recipe leaves out: {names}",
            True,
        )
    splits = [_split(entry, root, c) for entry in train]
    for split in splits:
        if (limit := number(source.get("max_samples"))) and "limit" not in split:
            split["limit"] = (
                int(limit) if isinstance(limit, float) and limit.is_integer() else limit
            )
        if source.get("mask_history"):
            split["mask_history"] = True
    section["train"] = splits if len(splits) > 1 else splits[0]
    known = {*TABLES["datasets"]["as_read"], *_ENTRY, *FIELDS}
    others = " ".join(TABLES["datasets"]["otherwise"])
    for entry in entries:
        unknown = [key for key in entry if key not in known and not matches(key, others)]
        c.notes += [Note(f"{entry['at']}.{key}", "unknown") for key in unknown]
    c.rename(root, "data.train")
    same: list[dict[str, Any]] = []
    if evaluates or source.get("eval_dataset"):
        # The first test split of a dataset that is trained on, or the source's own.
        same = [
            entry for entry in held_out if entry["path"] in [trained["path"] for trained in train]
        ]
        if isinstance(theirs := source.get("test_datasets"), list) and len(theirs) == 1:
            same = _entries({"datasets": theirs}, "datasets")
        elif root == "dataset":
            same = source.get("eval_dataset") or []
        elif root == "dataset_name":
            split = source.get("dataset_test_split") or "test"
            same = [
                {"path": train[0]["path"], "split": split, "config": source.get("dataset_config")}
            ]
    if same:
        section["eval"] = _part(same[0]["path"], str(same[0]["split"]))[0]
        if same[0].get("config") and not is_local(str(same[0]["path"])):
            section["eval"]["name"] = str(same[0]["config"])
        section["eval"] |= same[0].get("names") or _axolotl_names(same[0])[0]
        if same[0] in held_out:
            reason = "this split is evaluated; the source evaluates on held-out examples of its mixture instead"
            c.ours["data.eval.split"] = reason
    inside = source[root] if root == "dataset_mixture" else {}
    sizes = (_held_out(where.get(key)) for where in (source, inside) for key in SIZES)
    if (size := next(filter(None, sizes), None)) and "eval" not in section:
        section["eval"] = size  # taken out of the training examples
    _note_others(root, c)
    places = (
        {f"train[{i}]": split for i, split in enumerate(splits)}
        if len(splits) > 1
        else {"train": splits[0]}
    )
    for place, split in (places | {k: v for k, v in section.items() if k == "eval"}).items():
        if "path" in split and not is_local(str(split["path"])):
            split["bad_examples"] = "drop"
            reason = (
                "bad examples are dropped and counted; to keep one, fix it in a file of your own"
            )
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
        # more configurations than datasets, never fewer
        parts = zip(datasets.items(), configs, strict=False)
        datasets = [
            {"path": p, "weight": w, "config": c, "split": s} for (p, w), c in parts for s in splits
        ]
    elif root == "dataset" and not isinstance(datasets, list):
        remedy = f"write names that {INFO}, a file beside this one, lists"
        raise UserError(f"dataset: found {datasets!r}; {remedy}")
    elif root == "dataset_name":
        split = source.get("dataset_train_split") or "train"
        datasets = [{"path": datasets, "split": split, "config": source.get("dataset_config")}]
    if not isinstance(datasets, list) or not all(isinstance(e, dict) for e in datasets):
        raise UserError(f"{root}: found {source[root]!r}; write a list of datasets")
    alias = {"id": "path", "name": "config"}
    entries = []
    for i, dataset in enumerate(datasets):
        entry = {alias.get(key, key): value for key, value in dataset.items()}
        path = entry.get("path")
        for split in str(entry.get("split") or "train").split("+"):
            place = {"split": split.strip(), "at": f"{root}[{i}]"}
            files = entry.get("data_files")
            files = _list(files.get(split.strip()) if isinstance(files, dict) else files)
            folder = path if isinstance(path, str) and is_local(path) else ""
            # Files of this machine are one entry each: a path names one here.
            if all(isinstance(file, str) for file in files) and (
                folder or path in (None, *FILE_FORMATS)
            ):
                rest = {key: value for key, value in entry.items() if key != "data_files"}
                entries += [{**rest, "path": os.path.join(folder, file), **place} for file in files]
            elif path is None:
                raise UserError(f"{root}[{i}]: names no data; add path or data_files")
            else:
                entries.append({**entry, **place})
    return entries


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _split(entry: dict[str, Any], root: str, c: Conversion) -> dict[str, Any]:
    """The recipe's split for an entry; keys without a counterpart are noted."""
    at, path, tables, text_column = (
        entry["at"],
        entry["path"],
        TABLES["datasets"],
        c.flat.get("dataset_text_field"),
    )
    config = "dataset_config" if root == "dataset_name" else f"{at}.config"
    part, is_cut = _part(path, entry["split"])
    if is_cut:
        c.drop(
            f"{at}.split",
            f"found {entry['split']}, but a file is always read whole; write limit",
            True,
        )
    names, explained = _axolotl_names(entry)
    part |= entry.get("names") or names
    if text_column not in (None, "text") and "columns" not in part:
        part["columns"] = {"text": str(text_column)}
    for key, value in entry.items():
        place = f"{at}.{key}"
        if value is None or key in ("path", "split", "at", "names"):
            continue
        if key == "revision":
            part["revision"] = value
        elif key == "config" and is_local(str(path)):
            c.drop(config, "has no effect, because a file has no configurations")
        elif key == "config":
            part["name"] = str(value)
            c.rename(config, "data.train.name")
        elif key == "weight":
            if value != 1:
                part["weight"] = value
                c.rename(place, "weight in data.train; the examples are drawn with trainer.seed")
        elif key == "not_read":
            c.drop(f"{at}.columns", f"soren-align does not read the columns {value}", True)
        elif key == "type" and value == "completion":
            cut = "means plain text; where the source divides a text longer than max_length, the recipe truncates it"
            c.drop(place, cut, True)
        elif key in explained:
            explanation, changes = explained[key]
            outcome = "renamed" if explanation.startswith("data.train") else "dropped"
            c.notes.append(Note(place, outcome, explanation, changes))
        elif value in tables["as_read"].get(key, ()) or (
            key == "columns"
            and isinstance(value, list)
            and all(column in COLUMNS for column in value)
        ):
            c.drop(place, tables["as_here"].get(key, _READ))
        elif key in tables["as_read"] or matches(key, " ".join(tables["otherwise"])):
            reasons = (
                reason for names, reason in tables["otherwise"].items() if matches(key, names)
            )
            c.drop(place, f"{value}: {next(reasons, [*tables['otherwise'].values()][-1])}", True)
    return part


def _part(path: Any, split: str) -> tuple[dict[str, Any], bool]:
    """(path, split and limit of a recipe; whether the split is a part that a recipe cannot
    express).
    """
    if first := _FIRST.fullmatch(split):
        return {"path": path, "split": first[1], "limit": int(first[2])}, False
    is_cut = is_local(str(path)) and "[" in split
    return {"path": path, "split": split.partition("[")[0] if is_cut else split}, is_cut


def _held_out(size: Any) -> dict[str, Any] | None:
    """data.eval for such a size; None if it is no number of examples and no fraction of them."""
    if not isinstance(size, int | float) or size is True or not 0 < size < math.inf:
        return None
    return {"fraction": size} if size < 1 else {"examples": int(size)}


def _note_others(root: str, c: Conversion) -> None:
    """Note the remaining keys about data."""
    source, evaluation = c.flat, c.recipe["data"].get("eval")
    inside = source[root] if root == "dataset_mixture" else {}
    for key, where in {**dict.fromkeys(SIZES, source), f"{root}.test_split_size": inside}.items():
        size = where.get(key.rpartition(".")[2])
        if (held_out := _held_out(size)) and evaluation == held_out:
            c.rename(
                key, f"data.eval.{next(iter(held_out))}; a hash decides which examples are held out"
            )
        elif (
            isinstance(size, int) and size >= 1 and evaluation is not None and "path" in evaluation
        ):
            evaluation["limit"] = size
            c.rename(key, "data.eval.limit")
        elif size and evaluation is None:
            reason = f"the source holds out examples ({size}), but the recipe trains on all; write data.eval to hold "
            reason += "out examples"
            c.drop(key, reason, True)
        elif size is not None or key in source:
            c.drop(
                key,
                "no examples are held out" if evaluation is None else "is replaced by data.eval",
            )
    if "seed" in inside:
        c.drop(f"{root}.seed", "the examples are shuffled with trainer.seed")
    known = ("datasets", "seed", "test_split_size")
    c.notes += [Note(f"{root}.{key}", "unknown") for key in inside if key not in known]
    splits = {"dataset_mixer": "dataset_splits", "dataset_name": "dataset_train_split"}.get(root)
    noted = {note.key for note in c.notes}
    for key in [key for key in source if key not in noted]:
        if key == splits:
            c.rename(key, "data.train.split")
        elif key == "dataset_text_field" and source[key] not in (None, "text"):
            c.rename(key, "data.train.columns")
        elif key == "dataset_text_field":
            c.drop(key, _READ)
        elif key == "dataset_dir" and root == "dataset":
            c.rename(key, "data.train.path")
        elif key in SPLIT_KEYS and source[key]:
            c.rename(key, f"data.train.{SPLIT_KEYS[key]}")
        elif key in _EVAL_DATA and evaluation is not None:
            c.rename(key, "data.eval")
        elif key in _EVAL_DATA:
            c.drop(key, "nothing is evaluated during training")
        elif key in ROOTS or matches(key, BESIDE):
            c.drop(key, f"{root} sets the data")


# The columns and roles of a dataset, as a recipe's `columns` and `roles`.

_KNOWN_KEYS = {
    "role": ("role", "from"),
    "content": ("content", "value"),
    "weight": ("weight", "train"),
}
_KNOWN_ROLES = {"user": ("user", "human"), "assistant": ("assistant", "gpt"), "system": ("system",)}
_KNOWN_ROLES |= {
    "tool": ("tool", "observation", "function", "ipython"),
    "tool_call": ("tool_call", "function_call"),
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_PROMPT = "instruction and input become a user's turn in the chat template, but"
ALPACA_PROMPT = f"{_PROMPT} in the source a part of Alpaca's prompt"
OWN_PROMPT = f"{_PROMPT} the source has a format of its own"
_PAIR = ("prompt", "chosen", "rejected")
_ALPACA = ("instruction", "input", "output", "system")
FIELDS = (
    "field",
    "field_messages",
    "field_chosen",
    "field_rejected",
    "field_prompt",
    "message_field_role",
)
FIELDS += (
    "message_field_content",
    "message_property_mappings",
    "roles",
    "field_tools",
    "message_field_training",
)
FIELDS += ("field_thinking", "template_thinking_key")


def _axolotl_names(entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str, bool]]]:
    """(a split's `columns` and `roles`, where they are needed; explanation and change of each key
    they come from).
    """
    kind, mappings, aliases = (
        entry.get("type"),
        entry.get("message_property_mappings"),
        entry.get("roles"),
    )
    mappings = mappings if isinstance(mappings, dict) else {}
    keys = {
        "role": mappings.get("role") or entry.get("message_field_role") or "role",
        "content": mappings.get("content") or entry.get("message_field_content") or "content",
        "weight": entry.get("message_field_training") or "train",
    }
    # Axolotl's own pairs are plain texts, as `prompt` and two answers are here.
    formats = {f"field_{part}" for part in _PAIR} | {f"{part}_format" for part in _PAIR}
    has_pairs = isinstance(kind, dict) and not formats.isdisjoint(kind)
    columns: dict[str, Any] = {}
    if isinstance(kind, dict) and has_pairs:
        columns = {ours: kind.get(f"field_{ours}") or ours for ours in _PAIR}
    elif isinstance(kind, dict):
        usual = {"instruction": "instruction", "output": "output"}
        theirs = {ours: kind.get(f"field_{ours}") or usual.get(ours) for ours in _ALPACA}
        columns = {ours: name for ours, name in theirs.items() if name}
    elif kind == "alpaca_chat.load_qa":
        columns = {"instruction": "question", "output": "answer"}
    elif kind == "completion" or entry.get("field"):
        columns = {"text": entry.get("field") or "text"}
    elif "field_chosen" in entry or "field_rejected" in entry:
        columns = {ours: entry.get(f"field_{ours}") or ours for ours in ("chosen", "rejected")}
        if "field_prompt" in entry:
            columns["prompt"] = entry["field_prompt"]
        elif "field_messages" in entry:  # the turns before the two answers
            columns["conversations"] = entry["field_messages"]
    elif entry.get("field_messages") not in (None, "messages", "conversations"):
        columns = {"messages": entry["field_messages"]}
    if entry.get("field_tools") not in (None, "tools"):
        columns = {
            "messages": entry.get("field_messages") or "messages",
            **columns,
            "tools": entry["field_tools"],
        }
    role_of = {}  # the dataset's role -> ours, from Axolotl's {ours: [theirs]}
    for role, theirs in aliases.items() if isinstance(aliases, dict) else ():
        role_of |= dict.fromkeys(map(str, _list(theirs)), role) if role in _KNOWN_ROLES else {}
    names = _split_names(columns, keys, role_of)
    where = _READ if not names else "data.train." + " and data.train.".join(names)
    explained = {key: (where, False) for key in FIELDS if key in entry}
    if renamed := {
        key: name
        for key, name in mappings.items()
        if key not in ("role", "content") and key != name
    }:
        reason = (
            "a turn of a recipe has only role and content, so this part of the mapping is ignored"
        )
        explained["message_property_mappings"] = (f"{reason}: {renamed}", True)
    for key in ("field_thinking", "template_thinking_key"):
        if entry.get(key) not in (None, *_REASONING):
            explained[key] = (
                f"found {entry[key]}; rename this key of a turn: {' or '.join(_REASONING)}",
                True,
            )
    if (
        unknown := {role for role in aliases if role not in _KNOWN_ROLES}
        if isinstance(aliases, dict)
        else ()
    ):
        explained["roles"] = (
            f"a recipe does not have the role {', '.join(sorted(map(str, unknown)))}",
            True,
        )
    if "names" in entry:  # of LLaMA-Factory, which puts Alpaca's columns into a chat template too
        explained["type"] = (where, False)
    elif isinstance(kind, dict):
        as_here = {f"field_{part}" for part in (_PAIR if has_pairs else _ALPACA)}
        for part in _PAIR:  # a format that is the text of the column and nothing else
            plain = ("{" + part + "}", "{" + str(kind.get(f"field_{part}")) + "}")
            as_here |= {f"{part}_format"} if kind.get(f"{part}_format") in plain else set()
        unread = [str(key) for key, value in kind.items() if value and key not in as_here]
        not_read = f". soren-align does not read {', '.join(unread)}" * bool(unread)
        explained["type"] = (
            (where if has_pairs else OWN_PROMPT) + not_read,
            bool(unread) or not has_pairs,
        )
    elif str(kind).startswith("alpaca"):
        explained["type"] = (ALPACA_PROMPT, True)
    return names, explained


def _split_names(
    columns: dict[str, Any], keys: dict[str, Any], roles: dict[str, str]
) -> dict[str, Any]:
    """`columns` and `roles` of a recipe's split, as far as they are needed.

    columns: our column -> the dataset's. keys: role and content -> the dataset's keys. roles: the
    dataset's role -> ours.
    """
    columns = {ours: str(name) for ours, name in columns.items()}
    # In other columns than these, recognition would choose by the names that are there.
    if all(
        ours == name and ours not in ("conversations", "prompt") for ours, name in columns.items()
    ):
        columns = {}
    columns |= {key: str(name) for key, name in keys.items() if name not in _KNOWN_KEYS[key]}
    roles = {name: role for name, role in roles.items() if name not in _KNOWN_ROLES[role]}
    return {key: value for key, value in {"columns": columns, "roles": roles}.items() if value}


# LLaMA-Factory's `dataset:`: its names, resolved by dataset_info.json to paths, columns and roles.

INFO = "dataset_info.json"
_FACTORY_ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
}
_FACTORY_PAIR = {"chosen": "chosen", "rejected": "rejected"}
_TAGS = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}
_TAGS |= {"observation_tag": "tool", "function_tag": "tool_call"}
_NOT_READ = ("history", "images", "videos", "audios", "kto_tag")


def with_datasets(source: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The source with the entries of `dataset` (and `eval_dataset`) in place of their names; others
    are unchanged.

    folder: the file's. Raises UserError if dataset_info.json is missing or does not have a name.
    """
    names = source.get("dataset")
    is_named = isinstance(names, str) or (
        isinstance(names, list) and not any(isinstance(name, dict) for name in names)
    )
    if not is_named or "dataset_name" in source or "datasets" in source:
        return source
    # In dataset_dir from the file's folder or one above it, as its examples stand, or from the
    # working directory.
    name = str(source.get("dataset_dir") or "data")
    candidates = (place / name / INFO for place in (folder, *folder.parents[:2], Path.cwd()))
    if (info_file := next((file for file in candidates if file.is_file()), None)) is None:
        remedy = f"copy {INFO} there, or change dataset_dir"
        raise UserError(f"dataset: there is no {name}/{INFO} beside this file; {remedy}")
    info = read_json(info_file)
    if not isinstance(info, dict):
        raise UserError(
            f"{info_file}: is no JSON object; write an object with the names of datasets as keys"
        )
    resolved = {}
    for key in ("dataset", "eval_dataset"):
        names: Any = source.get(key)
        names = [part.strip() for part in names.split(",")] if isinstance(names, str) else names
        if names or key == "dataset":
            resolved[key] = [_factory_entry(name, info, info_file) for name in names]
    return {**source, **resolved}


def _factory_entry(name: Any, info: dict[str, Any], info_file: Path) -> dict[str, Any]:
    """One dataset, with the keys of `_entries`."""
    about = info.get(name) if isinstance(name, str) else None
    if not isinstance(about, dict):
        raise UserError(
            f"dataset: {info_file} has no {name!r}{did_you_mean(name, info, 'add this dataset')}"
        )
    file, hub = about.get("file_name"), about.get("hf_hub_url")
    if not isinstance(file or hub, str):
        raise UserError(
            f"dataset: {name} has neither a file nor a hub dataset in {INFO}; add file_name or hf_hub_url"
        )
    entry: dict[str, Any] = {"path": hub, "split": about.get("split") or "train"}
    if file:  # relative to the working directory where the file is below it
        local = os.path.relpath(info_file.parent / file)
        entry["path"] = (
            str((info_file.parent / file).resolve()) if local.startswith("..") else local
        )
    if isinstance(about.get("num_samples"), int):
        entry["split"] = f"{entry['split']}[:{about['num_samples']}]"
    if about.get("subset") and not file:
        entry["config"] = about["subset"]
    columns, tags = (
        value if isinstance(value := about.get(key), dict) else {} for key in ("columns", "tags")
    )
    is_sharegpt, is_ranking = about.get("formatting") == "sharegpt", bool(about.get("ranking"))
    keys = {}
    if is_sharegpt:
        keys = {
            "role": tags.get("role_tag") or "from",
            "content": tags.get("content_tag") or "value",
        }
    else:
        entry["type"] = "alpaca"
    known = _FACTORY_PAIR if is_ranking else {}
    if not is_sharegpt:
        known = known | {
            key: ours
            for key, ours in _FACTORY_ALPACA.items()
            if not (is_ranking and key == "response")
        }
    ours = {known[key]: value for key, value in columns.items() if key in known and value}
    if is_sharegpt and columns.get("messages") not in (None, "messages", "conversations"):
        ours["conversations" if is_ranking else "messages"] = columns["messages"]
    if is_sharegpt and not is_ranking:  # a column named tools is read anyway
        beside = {key: columns[key] for key in ("tools", "system") if columns.get(key)}
        if "system" in beside or beside.get("tools", "tools") != "tools" or (ours and beside):
            ours = {"messages": columns.get("messages") or "conversations", **ours, **beside}
    if is_ranking and ours:
        ours = {
            **_FACTORY_PAIR,
            **({"conversations": "conversations"} if is_sharegpt else {}),
            **ours,
        }
    roles = {str(tags[tag]): role for tag, role in _TAGS.items() if tags.get(tag)}
    entry["names"] = _split_names(ours, keys, roles)
    if unread := [
        key for key in (*columns, *tags) if key in _NOT_READ or (key == "tools" and not is_sharegpt)
    ]:
        entry["not_read"] = ", ".join(unread)
    return entry
