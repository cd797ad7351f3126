"""What a recipe may say in its optimizer section, the optimizers accept."""

import math

import pytest
import torch

from soren_align.optim import build_optimizer
from soren_align.optimizer_settings import RESOLUTIONS
from soren_align.recipe import sections

NAMES = ("soren", "muon", "htmuon", "adamw")
PROPERTIES = sections.Optimizer.model_json_schema()["properties"]
NO_NUMBERS = ("name", "aux")
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


def cases():
    for key, schema in PROPERTIES.items():
        if key in NO_NUMBERS:
            continue
        # Its two values are checked where the recipe's keys are compared with one another.
        values = RESOLUTIONS if key == "resolution" else values_at_the_bounds(schema)
        for name in NAMES:
            if sections._ONLY.get(key, name) == name:
                yield from ((name, key, value) for value in values)


@pytest.mark.parametrize(("name", "key", "value"), list(cases()))
def test_what_the_recipe_accepts_the_optimizer_accepts(name, key, value):
    section = sections.Optimizer(**{"name": name, "lr": 0.1, "aux_lr": 0.1, key: value})
    settings = {k: v for k, v in section.model_dump().items() if v is not None}
    assert settings[key] == value
    optimizer = build_optimizer(torch.nn.Sequential(torch.nn.Linear(2, 3)), **keywords(settings))
    assert optimizer.param_groups


def keywords(flat):
    """The recipe's flat keys as keywords of build_optimizer."""
    map_keys = {"spectral_map": "name", "resolution": "resolution", "ns_steps": "steps"}
    spectral_map = {map_keys[key]: value for key, value in flat.items() if key in map_keys}
    if spectral_map:
        spectral_map.setdefault("name", "sns" if "steps" in spectral_map else "minimax")
    settings = {k: v for k, v in flat.items() if k not in map_keys} | ({"map": spectral_map} if spectral_map else {})
    foreign = ("momentum", "nesterov", "adjust_lr_fn") if flat["name"] == "adamw" else ()
    return {key: value for key, value in settings.items() if key not in foreign}


def test_every_number_of_the_section_is_walked():
    assert {key for _, key, _ in cases()} == PROPERTIES.keys() - set(NO_NUMBERS)


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
@pytest.mark.parametrize("key", ["lr", "aux_lr", "weight_decay", "aux_weight_decay", "eps", "workspace_mb"])
def test_what_is_no_finite_number_is_refused_by_both(key, value):
    settings = {"name": "soren", "lr": 0.1, "aux_lr": 0.1, key: value}
    with pytest.raises(ValueError, match=key):
        sections.Optimizer(**settings)
    with pytest.raises(ValueError, match=key.removeprefix("aux_")):
        build_optimizer(torch.nn.Sequential(torch.nn.Linear(2, 3)), **settings)
