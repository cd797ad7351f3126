"""Every value that a recipe accepts in its optimizer section, the optimizers accept."""

import math

import pytest
import torch
from soren_align.optim import build_optimizer
from soren_align.recipe.optimizer import MAP_SECTIONS, OPTIMIZER_SECTIONS

NO_NUMBERS = ("name", "aux", "map", "split", "file", "composition")
LARGEST = 1e300


def values_at_the_bounds(schema):
    """The choices of a key, or the smallest and largest numbers that it may have."""
    if "anyOf" in schema:
        return [value for part in schema["anyOf"] for value in values_at_the_bounds(part)]
    if "enum" in schema:
        return schema["enum"]
    if "const" in schema:
        return [schema["const"]]
    if schema["type"] == "array":
        return [[value] * schema["minItems"] for value in values_at_the_bounds(schema["items"])]
    if schema["type"] in ("null", "boolean"):
        return {"null": [], "boolean": [True, False]}[schema["type"]]
    whole = schema["type"] == "integer"
    low, high = schema.get("minimum"), schema.get("maximum", LARGEST)
    if low is None:
        low = schema["exclusiveMinimum"] + (1 if whole else math.ulp(0.0))
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - 1 if whole else math.nextafter(schema["exclusiveMaximum"], 0)
    return [low, high]


def cases(sections):
    for name, section in sections.items():
        for key, schema in section.model_json_schema()["properties"].items():
            if key not in NO_NUMBERS:
                yield from ((name, key, value) for value in values_at_the_bounds(schema))


def built(section):
    return build_optimizer(torch.nn.Sequential(torch.nn.Linear(2, 3)), **section.model_dump(exclude_none=True))


@pytest.mark.parametrize(("name", "key", "value"), list(cases(OPTIMIZER_SECTIONS)))
def test_what_the_recipe_accepts_the_optimizer_accepts(name, key, value):
    settings = {"second_moment": "rows"} if key == "second_moment_beta" else {}  # without it, the key has no effect
    section = OPTIMIZER_SECTIONS[name](**{"name": name, "lr": 0.1, "aux_lr": 0.1, **settings, key: value})
    assert section.model_dump()[key] == value
    assert built(section).param_groups


@pytest.mark.parametrize(("name", "key", "value"), [*cases(MAP_SECTIONS), ("exact", "name", "exact")])
def test_what_the_recipe_accepts_in_a_map_soren_accepts(name, key, value):
    # Polynomials are shipped for some numbers; a decomposition has no such limit.
    exact = {"exact": True} if "exact" in MAP_SECTIONS[name].model_fields and key != "exact" else {}
    settings = {"name": name, key: value, **exact}
    section = OPTIMIZER_SECTIONS["soren"](name="soren", lr=0.1, aux_lr=0.1, map=settings)
    assert section.model_dump()["map"][key] == value
    assert built(section).param_groups


def test_every_number_of_the_sections_is_walked():
    sections = [*OPTIMIZER_SECTIONS.values(), *MAP_SECTIONS.values()]
    keys = {key for section in sections for key in section.model_fields} - set(NO_NUMBERS)
    assert {key for _, key, _ in [*cases(OPTIMIZER_SECTIONS), *cases(MAP_SECTIONS)]} == keys


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
@pytest.mark.parametrize("key", ["lr", "aux_lr", "weight_decay", "aux_weight_decay", "eps", "workspace_mb"])
def test_what_is_no_finite_number_is_refused_by_both(key, value):
    settings = {"name": "soren", "lr": 0.1, "aux_lr": 0.1, key: value}
    with pytest.raises(ValueError, match=key):
        OPTIMIZER_SECTIONS["soren"](**settings)
    with pytest.raises(ValueError, match=key.removeprefix("aux_")):
        build_optimizer(torch.nn.Sequential(torch.nn.Linear(2, 3)), **settings)
