"""Write configs/*.schema.json, and make the site's page of a recipe's keys, from the models.

    python docs/make_reference.py

tests/test_reference.py compares the schemas with the models.
"""

import json
from pathlib import Path
from typing import Any

from soren_align.core.document import Section, members, schema_text, section_in
from soren_align.core.optimizer_settings import LARGEST
from soren_align.recipe import Model, Recipe, trl
from soren_align.recipe.loader import SCHEMA_FILE, json_schema
from soren_align.recipe.optimizer import MAP_SECTIONS, OPTIMIZER_SECTIONS, OptimizerSection
from soren_align.study.config import STUDY_SCHEMA_FILE, study_schema

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SCHEMAS = {CONFIGS / SCHEMA_FILE: json_schema, CONFIGS / STUDY_SCHEMA_FILE: study_schema}
INTRODUCTION = """\
# The recipe

A recipe is one YAML file that defines a training and its evaluation. soren-align checks all keys before it loads torch,
and reports all mistakes together, each with its file, its line and a remedy. `soren-align recipes` lists the shipped
recipes. (The file format is YAML 1.2: `1e-6` is a number, and `no` is a text.)

**In an editor.** An editor with a YAML language server, such as VS Code with its YAML extension, can complete, explain
and check keys while you type. The editor needs the file `recipe.schema.json` and the first line of the recipe below.
`recipes copy` and `import` write this file and this line. If you have written the recipe yourself, `soren-align schema
--output .` writes the file (for a study, `soren-align schema study --output .`). Repeat this command after an upgrade
of soren-align.

    # yaml-language-server: $schema=recipe.schema.json

    extends: quickstart/sft            # all keys that are not set here
    optimizer: {name: muon, lr: 1.0e-2}
    run: {output_dir: runs/mine}

On the command line, `--set section.key=value` changes a key of the recipe; the value is YAML. The file `recipe.yaml` in
the run folder has all keys of the run, including the default values.

**Changing the optimizer.** You can change `optimizer.name` or `optimizer.map.name` by `--set`, or in a recipe that
extends another recipe. The new optimizer may lack some inherited keys. These keys are ignored, and a notice lists them.
But if you write such a key yourself, it is an error. The learning rates are inherited, so set learning rates that suit
the new optimizer.
"""
TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}
TYPES |= {"object": "a section"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def page() -> str:
    """The text of the page about a recipe's keys."""
    top = [
        key
        for key, field in Recipe.model_fields.items()
        if key != "trainer" and not section_in(field.annotation)
    ]
    parts = [INTRODUCTION, "## At the top\n", _keys(Recipe, top)]
    for name, field in Recipe.model_fields.items():
        if name == "optimizer":
            parts.append(_optimizers())
        elif name == "trainer":
            parts.append(_trainer(str(field.description)))
        elif section := section_in(field.annotation):
            parts.append(_section(name, section))
    return "\n".join(parts)


def _section(name: str, section: type[Section]) -> str:
    """A section's heading, docstring and keys, then those of the sections inside it; shared keys
    stand once.
    """
    text = (
        f"## {name}\n\n{_one_line(section.__doc__)}\n\n{_keys(section, list(section.model_fields))}"
    )
    documented: dict[str, type[Section]] = {}
    for key, field in section.model_fields.items():
        inner_sections = list(members(field.annotation).values()) or [section_in(field.annotation)]
        for inner in dict.fromkeys(inner_sections):
            if not inner:
                continue
            title = f"{name}.{key}"
            if inner is not inner_sections[0]:
                title += f", with `{next(iter(inner.model_fields))}`"
            text += f"\n### {title}\n\n{_one_line(inner.__doc__)}"
            if shared := next(
                (other for other in documented.items() if issubclass(other[1], inner)), None
            ):
                further = [
                    f"`{key}`" for key in shared[1].model_fields if key not in inner.model_fields
                ]
                text += (
                    f" The keys are the same as in `{shared[0]}`, except {' and '.join(further)}.\n"
                )
            else:
                text += f"\n\n{_keys(inner, list(inner.model_fields))}"
                documented[title] = inner
    return text


def _optimizers() -> str:
    """The optimizer section: the keys of all members, of some, and of each; then the maps."""
    text = "## optimizer\n\nThe keys depend on `name`. Keys of every optimizer:\n\n"
    classes: list[type[Section]] = []
    for member in OPTIMIZER_SECTIONS.values():
        classes += [
            c
            for c in reversed(member.__mro__)
            if issubclass(c, OptimizerSection) and c not in classes
        ]
    # the bases first
    for section in sorted(classes, key=lambda c: c in OPTIMIZER_SECTIONS.values()):
        inherited = {key for base in section.__bases__ for key in getattr(base, "model_fields", {})}
        own = [key for key in section.model_fields if key not in inherited]
        names = [name for name, member in OPTIMIZER_SECTIONS.items() if issubclass(member, section)]
        if section is not OptimizerSection:
            doc = "" if len(names) > 1 else f"{_one_line(section.__doc__)}\n\n"
            text += f"\n### optimizer, with name {_listed(names)}\n\n{doc}"
        text += _keys(section, own) if own else "No further keys.\n"
    for name, section in MAP_SECTIONS.items():
        text += f"\n### optimizer.map, with name `{name}`\n\n{_one_line(section.__doc__)}\n\n"
        own = [key for key in section.model_fields if key != "name"]
        text += _keys(section, own) if own else "No further keys.\n"
    return text


def _trainer(description: str) -> str:
    """The trainer section: a pointer to TRL's documentation, and the keys that belong to other
    sections, by reason.
    """
    keys: dict[str, list[str]] = {}
    for key, reason in trl.ELSEWHERE.items():
        keys.setdefault(reason, []).append(f"`{key}`")
    text = f"## trainer\n\n{description} TRL's documentation explains these keys and their default values:\n"
    text += "[SFTConfig](https://huggingface.co/docs/trl/sft_trainer) and\n"
    text += "[DPOConfig](https://huggingface.co/docs/trl/dpo_trainer). Some keys of TRL are errors in a recipe. For each\n"
    text += "of these keys, this list has the section of the recipe that replaces it, or the reason:\n\n"
    for reason, names in keys.items():
        text += f"- {', '.join(names)}: {reason}.\n"
    return text


def _keys(section: type[Section], keys: list[str]) -> str:
    """One list item per key: name, values, default, meaning."""
    properties = section.model_json_schema()["properties"]
    text = ""
    for key in keys:
        field, schema = section.model_fields[key], properties[key]
        default = "required" if field.is_required() else f"default {_yaml(schema.get('default'))}"
        text += f"- **`{key}`** ({_values(section, key, schema)}; {default}): {_one_line(field.description)}\n"
    return text


def _values(section: type[Section], key: str, schema: dict[str, Any]) -> str:
    annotation = section.model_fields[key].annotation
    if section is OptimizerSection and key == "name":
        return _listed(OPTIMIZER_SECTIONS)
    if section is Recipe and key == "extends":
        return "text"
    if members(annotation) == MAP_SECTIONS:
        return f"a section, or {_listed(MAP_SECTIONS)}"
    if section_in(annotation):
        several = ", or a list of sections" if "array" in json.dumps(schema) else ""
        text = "text, or " if section is Model and key == "tokenizer" else ""
        return (
            text
            + "a section"
            + several
            + (", or null" if type(None) in getattr(annotation, "__args__", ()) else "")
        )
    return _type(schema)


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return ", or ".join(_type(part) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return _listed(schema.get("enum") or [schema["const"]])
    if schema.get("type") == "array":
        length = f" of {schema['minItems']}" if schema.get("minItems", 0) > 1 else ""
        each = _type(schema["items"])
        return (
            f"a list{length} of texts"
            if each == TYPES["string"]
            else f"a list{length}, each {each}"
        )
    bounds = [
        f"{word} {schema[key]:.15g}"
        for key, word in BOUNDS.items()
        if schema.get(key, LARGEST) != LARGEST
    ]
    return " ".join([TYPES[schema.get("type", "object")], " and ".join(bounds)]).strip()


def _listed(words: Any) -> str:
    quoted = [f"`{word}`" for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _yaml(default: Any) -> str:
    if isinstance(default, dict):
        return f"`{default['name']}`" if "name" in default else "`{}`"
    return f"`{json.dumps(default)}`" if not isinstance(default, str) else f"`{default}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    for file, schema in SCHEMAS.items():
        file.write_text(schema_text(schema()), encoding="utf-8")
