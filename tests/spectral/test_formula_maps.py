"""The maps by a formula as settings of Soren and of a recipe, on recorded spectra, and in a checkpoint."""

import copy
import re

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from soren_align.optim import Soren
from soren_align.recipe.optimizer import SorenSettings
from soren_align.spectral import SOREN_MAPS
from soren_align.spectral.compose import from_dict, key_of, shipped
from soren_align.spectral.composed import unit_of
from soren_align.spectral.formula_maps import TEXTS, target_of
from tests.support.command import imported
from tests.support.spectra import matrix_of

from studies import recorded_spectra

NAMES = (*TEXTS, "formula")
EVERY_NAME = pytest.mark.parametrize("name", NAMES)
RECORDED = [spectrum for spectrum in recorded_spectra.load() if min(spectrum.shape) <= 256]


def soren(**settings):
    return Soren([torch.nn.Parameter(torch.eye(4, 6))], 0.1, map=settings, adjust_lr_fn="match_rms_measured")


@EVERY_NAME
def test_the_composition_of_the_default_settings_is_shipped(name):
    settings = SOREN_MAPS[name].plain_defaults
    record = shipped()[key_of(target_of(name, settings), settings["error"])]
    composition = SOREN_MAPS[name].defaults["composition"]
    assert composition == record | {"key": composition["key"]}
    assert record["error"] <= settings["error"]
    assert len(shipped()) == len(NAMES)


@EVERY_NAME
def test_the_map_of_recorded_spectra_is_within_its_certificate(name):
    record, settings = SOREN_MAPS[name], SOREN_MAPS[name].defaults
    composed = from_dict(settings["composition"])
    for spectrum in RECORDED[:: len(RECORDED) // 8]:
        sigma = spectrum.sigma
        x, u, v = matrix_of(sigma, spectrum.shape)
        output, _ = record.function(x, precision="float32", max_norm=1.0, **settings)
        values, expected = (u.mT @ output @ v).diagonal(), record.target(sigma, **settings)
        is_certified = sigma / unit_of(sigma, settings["of"]) >= settings["resolution"]
        assert (values - expected)[is_certified].abs().max() <= composed.error * composed.largest + 1e-9
        assert (output - (u * values) @ v.mT).norm() <= 1e-9 * output.norm()


@pytest.mark.process
def test_a_shipped_map_starts_without_torch_and_scipy():
    code = "from soren_align.spectral.maps import SOREN_MAPS; SOREN_MAPS['tanh'].defaults"
    assert not imported(code, ["torch", "scipy"])


@pytest.mark.parametrize("settings", [
    {"formula": "tanh(x / 0.2)", "error": 0.02}, {"name": "formula", "formula": "x", "of": "norm"},
    {"name": "soft_sign", "tau": 0.2, "error": 0.01}, {"name": "tanh", "of": "rms", "limit": 10.0, "tau": 2.0},
    {"formula": "min(x / 0.001, 1)", "exact": True},
])  # fmt: skip
def test_recipe_and_optimizer_have_the_same_map(settings):
    section = SorenSettings(name="soren", lr=0.1, map=settings)
    (group,) = soren(**settings).param_groups
    assert section.map.model_dump() == group["map"]
    assert (group["map"]["composition"] is None) == settings.get("exact", False)
    again = SorenSettings(name="soren", lr=0.1, map=section.map.model_dump())
    assert again == section


def test_a_composition_of_other_settings_is_computed_again():
    first = soren(name="tanh", tau=0.2).param_groups[0]["map"]
    second = soren(**{**first, "tau": 0.3}).param_groups[0]["map"]
    assert second == soren(name="tanh", tau=0.3).param_groups[0]["map"]
    assert second["composition"] != first["composition"]
    with pytest.raises(ValueError, match="composition: is damaged"):
        soren(**{**first, "composition": {"key": first["composition"]["key"]}})


def test_a_resumed_run_has_the_composition_of_its_checkpoint():
    optimizer, resumed = soren(name="tanh", tau=0.2), soren(name="tanh", tau=0.2)
    saved = copy.deepcopy(optimizer.state_dict())
    composition = saved["param_groups"][0]["map"]["composition"]
    composition["steps"][0][0] *= 1 + 1e-9  # as another machine would find
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4, 6)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["map"]["composition"] == composition
    with pytest.raises(ValueError, match="group 0 map"):
        soren(name="tanh", tau=0.3).load_state_dict(saved)


@pytest.mark.parametrize(("settings", "message"), [
    ({"formula": "foo(x)"}, "formula: 'foo(x)' is not allowed"), ({"formula": "1 / (x - 0.5)"}, "is not finite at"),
    ({"formula": "x" * 10_000}, "has 10,000 characters"), ({"formula": "(" * 240 + "x"}, "nests 240 parentheses"),
    ({"formula": "x", "of": "size"}, "write one of 'nu'"), ({"formula": "x", "error": 0.0}, "write a"),
    ({"formula": "x", "tau": 1.0}, "has no setting 'tau'"), ({"name": "tanh", "tau": -1.0}, "write a"),
    ({"formula": 1.0}, "found 1.0; write a text"), ({"formula": "x", "exact": 1}, "found 1; write True or False"),
])  # fmt: skip
def test_wrong_settings_are_refused_by_recipe_and_optimizer(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        soren(**settings)
    with pytest.raises(ValidationError):
        SorenSettings(name="soren", lr=0.1, map=settings)


@pytest.mark.parametrize("of", ["nu", "norm", "rms", "none"])
def test_a_decomposition_and_polynomials_take_the_same_step(of):
    weights = []
    for exact in (False, True):
        optimizer = soren(formula="tanh(x / 0.3)", of=of, limit=8.0, error=0.001, exact=exact)
        (weight,) = optimizer.param_groups[0]["params"]
        weight.grad = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 6))).float()
        optimizer.step()
        weights.append(weight.detach())
    assert (weights[0] - weights[1]).abs().max() < 0.1 * 0.2 * 0.01


@pytest.mark.parametrize("exact", [False, True])
def test_a_matrix_beyond_the_limit_has_a_finite_update(exact):
    optimizer = soren(formula="exp(600 * (x - 1)) + x", of="none", error=0.3, exact=exact)
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.full((4, 6), 1e3)
    optimizer.step()
    assert weight.isfinite().all()
