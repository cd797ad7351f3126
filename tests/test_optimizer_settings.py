"""A default, choice or bound of the optimizers stands in optimizer_settings alone; everything else agrees with it."""

import json
import warnings
from typing import get_args

import pytest
import torch
from soren_align import optim, recipe
from soren_align.core import optimizer_settings
from soren_align.recipe import optimizer
from soren_align.spectral import SOREN_MAPS

CLASSES = optim.OPTIMIZERS
ONLY_RECIPE = {"name", "aux_lr", "aux_weight_decay", "aux", "matrices", "split"}
"""Keys of `build_optimizer`, which makes groups of them."""
ONLY_ADAMW = {"betas", "eps"}
"""In a matrix optimizer these are keys of its AdamW group."""


def member(name):
    return optimizer.OPTIMIZER_SECTIONS[name](name=name, lr=0.1, aux_lr=0.1)


def built(settings):
    return optim.build_optimizer(torch.nn.Sequential(torch.nn.Linear(2, 3)), **settings)


def test_every_optimizer_has_a_section_and_a_class():
    assert set(optimizer.OPTIMIZER_SECTIONS) == set(CLASSES)
    assert set(optimizer.MAP_SECTIONS) == set(SOREN_MAPS)


@pytest.mark.parametrize("name", CLASSES)
def test_a_section_has_the_settings_of_the_class(name):
    ours = set(type(member(name)).model_fields) - ONLY_RECIPE
    theirs = {"lr", *CLASSES[name].keywords()}
    assert ours - ONLY_ADAMW == theirs - ONLY_ADAMW


@pytest.mark.parametrize("name", CLASSES)
def test_the_recipes_defaults_are_those_of_the_class(name):
    resolved = member(name).model_dump()
    defaults = CLASSES[name].keywords()
    others = {"lr", "map", "weight_decay", "compensation", "betas", "adjust_lr_fn"}
    others |= {
        "momentum_dtype",
        "map_input",
        "second_moment",
        "second_moment_beta",
        "match_rms",
        "weight_decay_to",
    }  # null in a recipe: the class's own
    for key in set(resolved) & set(defaults) - others:
        assert resolved[key] == defaults[key], key
    if name != "adamw":  # recipes compare with AdamW's learning rates; a class is its paper's or torch's
        own = {"muon": "original", "htmuon": "original"}
        group = CLASSES[name]([torch.nn.Parameter(torch.zeros(2, 3))], 0.1).param_groups[0]
        assert (resolved["adjust_lr_fn"], group["adjust_lr_fn"]) == ("match_rms_measured", own.get(name, "none"))
    # torch.optim.AdamW's own decay is 0.01; a null compensation is the class's "none".
    assert resolved["weight_decay"] == optimizer_settings.WEIGHT_DECAY
    assert defaults["weight_decay"] == (0.01 if name == "adamw" else optimizer_settings.WEIGHT_DECAY)
    assert (resolved["compensation"], defaults["compensation"]) == (None, "none")
    assert tuple(resolved["betas"]) == optimizer_settings.BETAS


@pytest.mark.parametrize("name", SOREN_MAPS)
def test_a_group_holds_the_complete_map_of_the_recipe(name):
    section = optimizer.SorenSettings(name="soren", lr=0.1, aux_lr=0.1, map=name)
    group = built(section.model_dump(exclude_none=True)).param_groups[0]
    assert group["map"] == section.map.model_dump() == {"name": name, **SOREN_MAPS[name].defaults}
    bare = optim.Soren([torch.nn.Parameter(torch.zeros(2, 3))], 0.1, map=name)
    assert bare.param_groups[0]["map"] == group["map"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_built_optimizer_has_the_recipes_settings(name):
    settings = member(name).model_dump(exclude_none=True)
    for group in built(settings).param_groups:
        for key in group.keys() & settings.keys() - {"weight_decay", "lr"}:
            assert _plain(group[key]) == _plain(settings[key]), key


@pytest.mark.parametrize(("name", "shape", "finding"), [
    ("soren", (2048, 2048), "2048 x 2048 matrix has an RMS of about 0.011 lr, 18 times smaller"),
    ("soren", (11008, 2048), "11008 x 2048 matrix has an RMS of about 0.0048 lr, 42 times smaller"),
    ("htmuon", (2048, 2048), "'original': the update of a 2048 x 2048 matrix has an RMS of about 0.022 lr"),
])  # fmt: skip
def test_a_class_warns_of_its_own_scale_where_updates_are_much_smaller_than_adamws(name, shape, finding):
    large, small = (torch.nn.Parameter(torch.zeros(shape, device="meta")) for shape in (shape, (64, 64)))
    with pytest.warns(UserWarning, match=finding) as caught:
        CLASSES[name]([small, large], 0.1)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CLASSES[name]([small], 0.1)
        for scale in get_args(optimizer_settings.AdjustLrFn):  # whoever states a scale knows it
            CLASSES[name]([large], 0.1, adjust_lr_fn=scale)
        CLASSES[name]([{"params": [large], "adjust_lr_fn": "match_rms_measured"}], 0.1)
        optim.Muon([large], 0.1)  # torch.optim.Muon's


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


def test_the_schema_has_the_choices_and_bounds_of_the_settings():
    definitions = recipe.loader.json_schema()["$defs"]
    names = {definition["properties"]["name"].get("const") for definition in definitions.values()
             if "name" in definition["properties"]}  # fmt: skip
    assert names >= set(CLASSES) | set(SOREN_MAPS)
    soren = definitions["SorenSettings"]["properties"]
    assert set(soren["adjust_lr_fn"]["enum"]) == set(get_args(optimizer_settings.AdjustLrFn))
    assert set(soren["compensation"]["anyOf"][0]["enum"]) == set(get_args(optimizer_settings.Compensation))
    assert definitions["MinimaxMap"]["properties"]["resolution"]["enum"] == list(optimizer_settings.RESOLUTIONS)
    assert {"enum": list(SOREN_MAPS)} in soren["map"]["anyOf"]
    for section in ("SnsMap", "ReleasedMap"):
        steps = definitions[section]["properties"]["steps"]
        bounds = optimizer_settings.NUM_STEPS
        assert (steps["minimum"], steps["maximum"]) == (bounds.least, bounds.most)
    json.dumps(definitions)


@pytest.mark.parametrize(("name", "key", "bounds"), [
    ("soren", "weight_decay", optimizer_settings.NON_NEGATIVE), ("soren", "momentum", optimizer_settings.COEFFICIENT),
    ("soren", "workspace_mb", optimizer_settings.NON_NEGATIVE), ("htmuon", "p", optimizer_settings.POWER),
    ("muon", "ns_steps", optimizer_settings.NUM_STEPS),
])  # fmt: skip
@pytest.mark.parametrize("value", [-1, 0, 0.5, 1, 2, 99, 100, float("inf"), float("nan")])
def test_recipe_and_class_accept_the_numbers_within_the_bounds(name, key, bounds, value):
    def is_accepted(build):
        try:
            build()
        except ValueError:
            return False
        return True

    section = optimizer.OPTIMIZER_SECTIONS[name]
    whole = key != "ns_steps" or isinstance(value, int)
    wanted = whole and value in bounds
    assert is_accepted(lambda: section(**{"name": name, "lr": 0.1, key: value})) == wanted
    parameters = [torch.nn.Parameter(torch.zeros(2, 3))]
    assert is_accepted(lambda: CLASSES[name](parameters, 0.1, **{key: value})) == wanted
