"""LLaMA-Factory's `dataset:`: its names, resolved by dataset_info.json to paths, columns and roles."""

import os
from pathlib import Path
from typing import Any

from ..core.errors import UserError, did_you_mean
from ..core.files import read_json
from .data_formats import split_names

INFO = "dataset_info.json"
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
_PAIR = {"chosen": "chosen", "rejected": "rejected"}
_TAGS = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}
_TAGS |= {"observation_tag": "tool", "function_tag": "tool_call"}
_NOT_READ = ("history", "images", "videos", "audios", "kto_tag")


def with_datasets(source: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The source with the entries of `dataset` (and `eval_dataset`) in place of their names; others are unchanged.

    folder: the file's. Raises UserError if dataset_info.json is missing or does not have a name.
    """
    if not isinstance(source.get("dataset"), str | list) or "dataset_name" in source or "datasets" in source:
        return source
    info_file = _info_file(str(source.get("dataset_dir") or "data"), folder)
    info = read_json(info_file)
    if not isinstance(info, dict):
        raise UserError(f"{info_file}: is no object of datasets by name")
    resolved = {"dataset": _entries(source["dataset"], info, info_file)}
    if source.get("eval_dataset"):
        resolved["eval_dataset"] = _entries(source["eval_dataset"], info, info_file)
    return {**source, **resolved}


def _info_file(name: str, folder: Path) -> Path:
    """In dataset_dir from the file's folder or one above it, as its examples stand, or from the working directory."""
    places = [folder, *folder.parents[:2], Path.cwd()]
    files = (place / name / INFO for place in places)
    if (info_file := next((file for file in files if file.is_file()), None)) is None:
        raise UserError(f"dataset: there is no {name}/{INFO} beside the file; copy it there, or change dataset_dir")
    return info_file


def _entries(names: Any, info: dict[str, Any], info_file: Path) -> list[dict[str, Any]]:
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    entries = []
    for name in names:
        about = info.get(name) if isinstance(name, str) else None
        if not isinstance(about, dict):
            raise UserError(f"dataset: {info_file} has no {name!r}{did_you_mean(name, info)}")
        entries.append(_entry(name, about, info_file.parent))
    return entries


def _entry(name: str, about: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One dataset, with the keys of data_keys' entries."""
    file, hub = about.get("file_name"), about.get("hf_hub_url")
    if not isinstance(file or hub, str):
        raise UserError(f"dataset: {name} is neither a file nor a dataset of the Hugging Face hub; add file_name")
    entry: dict[str, Any] = {"path": _path(folder / file) if file else hub, "split": about.get("split") or "train"}
    if isinstance(about.get("num_samples"), int):
        entry["split"] = f"{entry['split']}[:{about['num_samples']}]"
    if about.get("subset") and not file:
        entry["config"] = about["subset"]
    columns, tags = (value if isinstance(value := about.get(key), dict) else {} for key in ("columns", "tags"))
    is_sharegpt = about.get("formatting") == "sharegpt"
    keys = {}
    if is_sharegpt:
        keys = {"role": tags.get("role_tag") or "from", "content": tags.get("content_tag") or "value"}
    else:
        entry["type"] = "alpaca"
    roles = {str(tags[tag]): role for tag, role in _TAGS.items() if tags.get(tag)}
    entry["names"] = split_names(_columns(columns, is_sharegpt, bool(about.get("ranking"))), keys, roles)
    if unread := [key for key in (*columns, *tags) if key in _NOT_READ or (key == "tools" and not is_sharegpt)]:
        entry["not_read"] = ", ".join(unread)
    return entry


def _columns(columns: dict[str, Any], is_sharegpt: bool, is_ranking: bool) -> dict[str, Any]:
    """Our column -> the dataset's; empty where all are usual."""
    known = _PAIR if is_ranking else {}
    if not is_sharegpt:
        known = known | {key: ours for key, ours in _ALPACA.items() if not (is_ranking and key == "response")}
    ours = {known[key]: value for key, value in columns.items() if key in known and value}
    if is_sharegpt and columns.get("messages") not in (None, "messages", "conversations"):
        ours["conversations" if is_ranking else "messages"] = columns["messages"]
    if is_sharegpt and not is_ranking:  # a column named tools is read anyway
        beside = {key: columns[key] for key in ("tools", "system") if columns.get(key)}
        if "system" in beside or beside.get("tools", "tools") != "tools" or (ours and beside):
            ours = {"messages": columns.get("messages") or "conversations", **ours, **beside}
    if is_ranking and ours:
        ours = {**_PAIR, **({"conversations": "conversations"} if is_sharegpt else {}), **ours}
    return ours


def _path(file: Path) -> str:
    """Relative to the working directory where the file is below it."""
    local = os.path.relpath(file)
    return str(file.resolve()) if local.startswith("..") else local
