"""Keys of version 0.1 that have another name now, or that stand elsewhere, and the message that names it."""

from collections.abc import Callable
from typing import Any

from ..optimizer_settings import MAPS
from ..yaml_reader import Key


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


def _quote(value: Any) -> str:
    names = value if isinstance(value, list) else [value]
    return f"is now eval.published; write published: [{', '.join(map(str, names))}]"


def _quantize(value: Any) -> str:
    return f"is now model.quantize; write `model: {{quantize: {'null' if value is None else value}}}`"


def _streaming(_: Any) -> str:
    return "is of all of data.train together; write `data: {streaming: true}`"


MOVED: dict[Key, Callable[[Any], str]] = {
    ("optimizer", "spectral_map"): _spectral_map,
    ("optimizer", "resolution"): _resolution,
    ("optimizer", "ns_steps"): _ns_steps,
    ("model", "lora", "quantize"): _quantize,
    ("data", "train", "bad_rows"): _bad_rows,
    ("data", "eval", "bad_rows"): _bad_rows,
    ("data", "train", "streaming"): _streaming,
    ("eval", "quote"): _quote,
}
"""Key, without the index of a list -> the message about a value of it."""
