"""Maps of polynomials as settings of Soren and of a recipe: those by name, and those of a file."""

import copy
import json
import re

import pytest
import torch
from pydantic import ValidationError
from soren_align.core.errors import UserError
from soren_align.optim import Soren
from soren_align.recipe import load, load_text, to_yaml
from soren_align.recipe.loader import differences, training_part
from soren_align.recipe.optimizer import SorenSettings
from soren_align.spectral import SOREN_MAPS
from soren_align.spectral.composition import SHIPPED, from_dict, read, shipped
from tests.support.command import imported

TANH = SHIPPED / "tanh-0.1.json"
PARAMETERS = {"soft_sign": "tau", "tanh": "tau", "clip": "tau", "soren_lambda": "strength"}


def soren(**settings):
    return Soren([torch.nn.Parameter(torch.eye(4, 6))], 0.1, map=settings, adjust_lr_fn="match_rms_measured")


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.json")), ids=lambda file: file.stem)
def test_a_shipped_map_has_the_values_of_its_function_within_the_error_that_its_file_states(file):
    name, _, number = file.stem.rpartition("-")
    composed, record = shipped(name, PARAMETERS[name], float(number)), SOREN_MAPS[name]
    settings = {PARAMETERS[name]: float(number), "exact": False}
    u = torch.linspace(composed.resolution, 1, 301, dtype=torch.float64)
    # pairs of singular values of which the second makes nu, or the norm, 1
    power = 8 if composed.of == "nu" else 2
    sigma = torch.stack([u, (1 - u**power).clamp(min=0) ** (1 / power)], dim=-1)
    output, _ = record.function(sigma.diag_embed(), precision="float32", max_norm=None, **settings)
    expected = torch.stack([record.target(pair, **settings) for pair in sigma])
    is_certified = sigma >= composed.resolution
    distance = (output.diagonal(dim1=-2, dim2=-1) - expected).abs()[is_certified].max()
    assert distance <= composed.error * composed.largest + 1e-9
    assert composed.as_dict() == read(str(file))


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_polynomials_and_the_decomposition_take_nearly_the_same_step(name):
    weights = []
    for exact in (False, True):
        optimizer = soren(name=name, exact=exact)
        (weight,) = optimizer.param_groups[0]["params"]
        weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        weights.append(weight.detach())
    assert (weights[0] - weights[1]).abs().max() < 0.1 * 0.2 * 0.1


@pytest.mark.process
def test_a_map_of_polynomials_is_checked_without_torch_and_scipy():
    code = "from soren_align.spectral.maps import SOREN_MAPS; SOREN_MAPS['tanh'].defaults, SOREN_MAPS['file'].defaults"
    assert not imported(code, ["torch", "scipy"])


@pytest.mark.parametrize("settings", [
    {"file": str(TANH)}, {"name": "soft_sign", "tau": 0.3}, {"name": "tanh", "tau": 0.17, "exact": True},
])  # fmt: skip
def test_recipe_and_optimizer_have_the_same_map(settings):
    section = SorenSettings(name="soren", lr=0.1, map=settings)
    (group,) = soren(**settings).param_groups
    assert section.map.model_dump() == group["map"]
    assert SorenSettings(name="soren", lr=0.1, map=section.map.model_dump()) == section


def test_a_number_without_polynomials_is_refused_with_the_numbers_that_have_some():
    with pytest.raises(ValueError, match=r"tau: found 0\.17, but .* are for 0\.03, 0\.1, 0\.3; write one of these, or"):
        soren(name="tanh", tau=0.17)


@pytest.fixture
def recipe(tmp_path):
    """A recipe with a map's file beside it."""
    (tmp_path / "mine.json").write_bytes(TANH.read_bytes())
    (tmp_path / "recipe.yaml").write_text("extends: quickstart/sft\noptimizer: {name: soren, map: {file: mine.json}}\n")
    return tmp_path / "recipe.yaml"


def test_the_file_lies_beside_the_recipe_and_its_content_in_the_resolved_recipe(recipe):
    loaded = load(str(recipe))
    assert loaded.optimizer.map.composition["formula"] == "tanh(x / 0.1)"
    text = to_yaml(loaded)
    (recipe.parent / "mine.json").unlink()
    assert load_text(text) == loaded  # a run resumes without the file


def test_a_changed_file_makes_another_training(recipe):
    before = training_part(load(str(recipe)))
    record = json.loads(TANH.read_text())
    record["steps"][0][0] *= 1 + 1e-9
    (recipe.parent / "mine.json").write_text(json.dumps(record))
    after = training_part(load(str(recipe)))
    assert differences(before, after) == ["optimizer.map.composition: the content of the map's file has changed"]


def test_another_file_is_read_though_the_recipe_has_the_content_of_the_first(recipe):
    resolved = recipe.parent / "resolved.yaml"
    resolved.write_text(to_yaml(load(str(recipe))))
    changed = load(str(resolved), [f"optimizer.map.file={SHIPPED / 'clip-0.1.json'}"])
    assert changed.optimizer.map.composition["formula"] == "min(x / 0.1, 1)"


def test_a_checkpoint_of_another_content_is_refused():
    optimizer = soren(file=str(TANH))
    saved = copy.deepcopy(optimizer.state_dict())
    soren(file=str(TANH)).load_state_dict(saved)
    saved["param_groups"][0]["map"]["composition"]["steps"][0][0] *= 1 + 1e-9
    with pytest.raises(ValueError, match="group 0 map"):
        soren(file=str(TANH)).load_state_dict(saved)


def changed(**fields):
    return json.loads(TANH.read_text()) | fields


@pytest.mark.parametrize(("content", "message"), [
    (None, "no file mine.json; write the file anew by"),
    ("{", "cannot be read as JSON"),
    ("[]", "mine.json is no composition, or is damaged; write the file anew by"),
    (json.dumps(changed(steps=[[1.0, 2.0]])), "is no composition, or is damaged"),
    (json.dumps(changed(steps=[[3.9, -9.4, 14.9]] * 2)), "is no composition, or is damaged"),
    (json.dumps({k: v for k, v in changed().items() if k != "largest"}), "is no composition, or is damaged"),
    (json.dumps(changed(of="size")), "is no composition, or is damaged"),
])  # fmt: skip
def test_a_file_that_is_no_composition_is_refused_with_place_and_remedy(recipe, content, message):
    file = recipe.parent / "mine.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(UserError) as caught:
        load(str(recipe))
    assert message in str(caught.value)
    assert "recipe.yaml:2 optimizer.map" in str(caught.value)


@pytest.mark.parametrize(("settings", "message"), [
    ({"file": str(TANH), "tau": 1.0}, "has no setting 'tau'"), ({"name": "tanh", "tau": -1.0}, "write a"),
    ({"file": 1.0}, "found 1.0; write a text"), ({"name": "tanh", "exact": 1}, "found 1; write True or False"),
])  # fmt: skip
def test_wrong_settings_are_refused_by_recipe_and_optimizer(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        soren(**settings)
    with pytest.raises(ValidationError):
        SorenSettings(name="soren", lr=0.1, map=settings)


def test_a_content_that_does_not_fit_is_refused_in_a_resolved_recipe():
    content = {**read(str(TANH)), "file": str(TANH), "steps": []}
    with pytest.raises(ValueError, match="composition: is damaged; remove this key"):
        soren(file=str(TANH), composition=content)
    assert from_dict(read(str(TANH))).of == "nu"
