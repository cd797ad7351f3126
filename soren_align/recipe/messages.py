"""pydantic's errors about a recipe in sentences: key, finding, remedy."""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from ..core.document import Key
from ..core.errors import closest, did_you_mean
from ..core.optimizer_settings import MAPS
from .base import Section, members, section_in
from .schema import Recipe

_ALIASES = {"learning_rate": "lr", "model_name_or_path": "name_or_path", "dataset": "path", "torch_dtype": "dtype"}
_ALIASES |= {"rank": "r", "lora_r": "r"}
_INSTEAD: dict[Key, str] = {
    ("model", "dtype"): " (bfloat16 parameters round small updates away; for bfloat16 arithmetic with float32 "
    "parameters write trainer: {bf16: true})",
}
_MAIN_KEYS: dict[Key, dict[type, str]] = {
    ("model",): {str: "name_or_path"},
    ("model", "lora"): {int: "r"},
    ("model", "tokenizer"): {int: "vocab_size"},
    ("data",): {str: "train.path"},
    ("data", "train"): {str: "path"},
    ("data", "eval"): {str: "path", float: "fraction", int: "examples"},
    ("optimizer",): {str: "name"},
    ("run",): {str: "output_dir"},
    ("run", "samples"): {str: "prompts", list: "prompts"},
    ("run", "early_stopping"): {int: "patience"},
    ("eval",): {str: "suite"},
}
"""The key of a section that a person means who writes a value in its place, by the type of the value."""
_OPTIONAL: set[Key] = {("model", "lora"), ("data", "eval"), ("run", "samples"), ("run", "early_stopping"), ("eval",)}


def messages(error: ValidationError, form: type[Section] = Recipe) -> list[tuple[Key, str]]:
    """The key and the message of each mistake in a file of this form."""
    problems = [_Problem(**_locate(each["loc"], form), error=each) for each in error.errors(include_url=False)]
    return [(p.key, p.message()) for p in _without_echoes(problems)]


@dataclass(frozen=True)
class _Problem:
    """One of pydantic's errors, located."""

    error: Any
    key: Key
    """Where the value stands, without the tags of unions."""
    section: type[Section]
    """The section that the key stands in."""
    union: dict[str, type[Section]] = field(default_factory=dict)
    """The members of the union that this section belongs to, by tag; empty for other sections."""
    tag: str = ""
    """The section's own tag in `union`."""

    @property
    def is_unknown_key(self) -> bool:
        return self.error["type"] == "extra_forbidden"

    @property
    def is_of_another_member(self) -> bool:
        """Whether the key is one that another member of the union has."""
        return any(self.key[-1] in member.model_fields for member in self.union.values())

    def meant(self) -> str | None:
        """The known key that an unknown one is close to."""
        known = self.section.model_fields
        words = {k: k for k in known} | {alias: k for alias, k in _ALIASES.items() if k in known}
        word = closest(self.key[-1], words)
        return words[word] if word else None

    def message(self) -> str:
        """Finding and remedy."""
        key, value = self.key, self.error.get("input")
        match self.error["type"]:
            case "extra_forbidden":
                return self._unknown_key()
            case "missing":
                return "is required"
            case "literal_error":
                choices = self.error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
                if key[-1] == "name" and self.union:
                    choices = list(self.union)
                hint = _INSTEAD.get(key) or did_you_mean(value, choices)
                return f"found {value!r}; write {_listed(choices, 'or')}{hint}"
            case "model_type" if key == ("data", "eval") and isinstance(value, list):
                return "found a list; held-out examples are one split (data.train may be several)"
            case "model_type" | "dict_type":
                return f"found {value!r}; {self._section_remedy(value)}"
        hint = " (YAML's word for nothing is null)" if value == "None" else ""
        return f"found {value!r}; {self._remedy()}{hint}"

    def _section_remedy(self, value: Any) -> str:
        """The section with the value at its main key, as it is written in a recipe."""
        last, section = self.key[-1], tuple(part for part in self.key if isinstance(part, str))
        if value is False and section in _OPTIONAL:
            return f"leave it out, or write {last}: null"
        main = _MAIN_KEYS.get(section, {}).get(int if value is True else type(value))
        field = self.section.model_fields.get(str(last))  # a value in place of a union is located in its first member
        inner = section_in(field.annotation) if value is True and main and field else None
        if main is None or (value is True and inner is None):
            return "write a section (indented keys below it)"
        content: Any = inner.model_fields[main].default if inner else value
        if section == ("run", "samples") and isinstance(value, str) and not value.endswith((".txt", ".jsonl")):
            content = [value]  # a prompt, and no file of prompts
        for key in reversed(main.split(".")):
            content = {key: content}
        return f"write {_flow(content if isinstance(last, int) else {last: content})}"

    def _unknown_key(self) -> str:
        moved = MOVED.get(tuple(part for part in self.key if isinstance(part, str)))
        if moved and not (self.is_of_another_member and self.tag != "soren"):  # ns_steps: Muon's, and once Soren's too
            return moved(self.error.get("input"))
        if self.is_of_another_member:
            owners = [tag for tag, member in self.union.items() if self.key[-1] in member.model_fields]
            return f"unknown key for {self.tag}; {_listed(owners, 'and')} {'has' if len(owners) == 1 else 'have'} it"
        meant = self.meant()
        hint = f"did you mean '{meant}'?" if meant else f"keys here: {', '.join(self.section.model_fields)}"
        return f"unknown key; {hint}"

    def _remedy(self) -> str:
        bounds = self.error.get("ctx", {})
        remedies = {
            "int_type": "write a whole number",
            "float_type": "write a number",
            "string_type": "write a text",
            "bool_type": "write true or false",
            "list_type": "write a list",
            "greater_than": "it must be more than {gt:g}",
            "greater_than_equal": "it must be at least {ge:g}",
            "less_than": "it must be less than {lt:g}",
            "less_than_equal": "it must be at most {le:g}",
            "finite_number": "it must be finite",
            "string_too_short": "it is empty",
            "too_short": "it is empty" if bounds.get("min_length") == 1 else "write {min_length} values",
            "too_long": "write {max_length} values",
        }
        remedy = remedies.get(self.error["type"])
        return remedy.format(**bounds) if remedy else self.error["msg"]


def _locate(location: Key, form: type[Section]) -> dict[str, Any]:
    """The fields of a _Problem at one of pydantic's locations, in which the tag of a union follows its key."""
    key: list[str | int] = []
    section: type[Section] = form
    union: dict[str, type[Section]] = {}
    tag, choices = "", union
    for i, part in enumerate(location):
        if part in choices:
            tag, union = str(part), choices
            section, choices = choices[tag], {}
            continue
        if part == "[key]":  # pydantic's mark of a key of `columns` that is none of ours
            continue
        key.append(part)
        annotation = section.model_fields[part].annotation if part in section.model_fields else None
        choices = members(annotation)
        inner = section_in(annotation)
        if inner and not choices and i + 1 < len(location):
            section, union, tag = inner, {}, ""
    return {"key": tuple(key), "section": section, "union": union, "tag": tag}


def _without_echoes(problems: list[_Problem]) -> list[_Problem]:
    """One mistake, one message: without "is required" for a key that is there misspelt, and without "unknown key"
    where the name that decides about the keys is wrong itself."""
    misspelt = {(*p.key[:-1], p.meant()) for p in problems if p.is_unknown_key}
    unnamed = {p.key[:-1] for p in problems if p.union and p.key[-1] == "name"}
    return [
        p
        for p in problems
        if not (p.error["type"] == "missing" and p.key in misspelt)
        and not (p.is_unknown_key and p.is_of_another_member and p.key[:-1] in unnamed)
    ]


def _flow(section: dict[str, Any]) -> str:
    """A section in one line of YAML, without the outer braces where it has one key: `train: {path: chat.jsonl}`."""
    yaml, stream = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style, yaml.width = True, 1000
    yaml.dump(section, stream)
    text = stream.getvalue().strip()
    return text if not isinstance(next(iter(section.values())), dict) else text[1:-1]


def _listed(words: list[str], conjunction: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


# ---
# Keys of version 0.1 that have another name now, or that stand elsewhere, and the message that names it.


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
