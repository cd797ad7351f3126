"""Keys of older recipes: their new spelling, and the recipes of run folders that still have them."""

from collections.abc import Callable
from typing import Any

from ..optimizer_settings import MAPS
from ..yaml_reader import Key
from .optimizers import OPTIMIZERS


def _map(name: str, **values: Any) -> str:
    """A map's section in one line of YAML, with its defaults."""
    section = {"name": name} | MAPS[name] | values
    return "`map: {" + ", ".join(f"{key}: {value}" for key, value in section.items()) + "}`"


def _spectral_map(value: Any) -> str:
    if value is None:
        return "is now optimizer.map; leave it out for the default"
    return f"is now optimizer.map.name; write {_map(value if value in list(MAPS) else 'minimax')}"


def _resolution(value: Any) -> str:
    remedy = "leave it out" if value is None else f"write {_map('minimax', resolution=value)}"
    return f"is now optimizer.map.resolution; {remedy}"


def _ns_steps(value: Any) -> str:
    remedy = "leave it out" if value is None else f"write {_map('sns', steps=value)}"
    return f"is now optimizer.map.steps; {remedy}"


def _bad_rows(value: Any) -> str:
    return f"is now bad_examples; write bad_examples: {value}"


MOVED: dict[Key, Callable[[Any], str]] = {
    ("optimizer", "spectral_map"): _spectral_map,
    ("optimizer", "resolution"): _resolution,
    ("optimizer", "ns_steps"): _ns_steps,
    ("data", "train", "bad_rows"): _bad_rows,
    ("data", "eval", "bad_rows"): _bad_rows,
}
"""Key of 0.1, without the index of a list -> the message about a value of it."""


def upgraded(raw: dict[str, Any]) -> dict[str, Any]:
    """A run folder's recipe of version 0.1 in today's spelling; a newer one unchanged.

    In 0.1 the optimizer's keys were flat, and null where they did not apply.
    """
    raw = dict(raw)
    data, optimizer = raw.get("data"), raw.get("optimizer")
    if isinstance(data, dict):
        raw["data"] = {name: _upgraded_data(value) for name, value in data.items()}
    if isinstance(optimizer, dict) and "spectral_map" in optimizer and optimizer.get("name") in list(OPTIMIZERS):
        old = {key: value for key, value in optimizer.items() if value is not None}
        section = {k: v for k, v in old.items() if k in OPTIMIZERS[old["name"]].model_fields}
        if old["name"] == "soren":
            section.pop("ns_steps", None)
            keys = {"name": "spectral_map", "resolution": "resolution", "steps": "ns_steps"}
            section["map"] = {new: old[key] for new, key in keys.items() if key in old}
        raw["optimizer"] = section
    return raw


def _upgraded_data(value: Any) -> Any:
    if isinstance(value, list):
        return [_upgraded_data(split) for split in value]
    if isinstance(value, dict) and "bad_rows" in value:
        return {("bad_examples" if key == "bad_rows" else key): item for key, item in value.items()}
    return value
