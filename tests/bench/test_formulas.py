"""`soren-align map`: a map's certificate, cost and errors."""

import json
import math
import re

import pytest
from soren_align.bench import formulas
from soren_align.core.errors import UserError
from soren_align.core.figures import LIGHT
from soren_align.launch import commands
from soren_align.spectral import MAPS

KEYS = {"formula", "resolution", "certified_error", "num_products", "steps", "flops_over_muon", "float16_error",
        "recorded_error"}  # fmt: skip


@pytest.fixture(autouse=True)
def _few_spectra(monkeypatch):
    spectra = [spectrum for spectrum in formulas.recorded_spectra() if min(spectrum.shape) <= 64]
    monkeypatch.setattr(formulas, "recorded_spectra", lambda: spectra[:12])


def test_a_formula_has_all_numbers_in_json(capsys):
    commands.show_map("x / sqrt(x^2 + 0.1^2)", {"error": 0.005}, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert result.keys() >= KEYS
    assert result["formula"] == "x / sqrt(x^2 + 0.1^2)"
    assert 0 < result["certified_error"] <= 0.005
    assert 0 < result["flops_over_muon"] < 0.5
    assert 0 < result["float16_error"] < 0.01
    assert 0 < result["recorded_error"] < 0.05


@pytest.mark.parametrize("name", sorted(MAPS.keys() - {"formula"}))
def test_every_map_is_shown_by_its_name(name, capsys):
    commands.show_map(name, {})
    assert "FLOPs over Muon's" in capsys.readouterr().out
    result, target = formulas.describe(name, {})
    assert result.keys() >= KEYS
    assert (target is not None) == ("composition" in MAPS[name].settings)
    if name == "muon":
        assert result["flops_over_muon"] == pytest.approx(1)


@pytest.mark.parametrize("text", ["tanh(x / 0.1)", "sns"])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_drawn_and_the_same_each_time(tmp_path, capsys, suffix, text):
    files = [tmp_path / f"{number}{suffix}" for number in range(2)]
    for file in files:
        commands.show_map(text, {}, plot=str(file))
    assert files[0].read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert suffix == ".svg" or files[0].read_bytes() == files[1].read_bytes()
    dark = [f"{number}-dark.png" for number in range(2)] if suffix == ".png" else []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*(file.name for file in files), *dark])


@pytest.mark.parametrize(("name", "largest"), [("sns", "4.37% at 1"), ("released", "91.90% at 0.01")])
def test_the_picture_of_a_map_by_its_name_has_the_largest_error_on_the_papers_interval(name, largest):
    """In the paper 4.37% of SNS, by its scalar iteration (tests/studies/test_spectra.py computes it again)."""
    figure = formulas._figure(*formulas.describe(name, {}), LIGHT)
    assert figure.axes[1].get_title("left") == f"relative error, %; largest: {largest}"
    sigmoid, output = (line.get_ydata() for line in figure.axes[0].lines)
    assert sigmoid[[0, -1]].tolist() == pytest.approx([1 / (1 + math.exp(-x)) for x in (0.01, 1)])
    assert (abs(output - sigmoid) / sigmoid).max() == pytest.approx(float(largest.split("%")[0]) / 100, abs=5e-5)


@pytest.mark.parametrize(("text", "settings", "plot", "message"), [
    ("minimax", {"of": "nu"}, None, "--of: the map minimax has no such setting"),
    ("x", {"of": "size"}, None, "--of: found 'size'; write one of nu, norm, rms, none"),
    ("x", {"error": 2.0}, None, "--error: found 2; write a number, at least 1e-06 and below 1"),
    ("x", {}, "a.pdf", "--plot: found a.pdf; write the path of a .png or .svg file"),
    ("random", {}, "a.png", "--plot: the map random draws random numbers, and is no function"),
    ("min(x / 0.01, 1)", {"error": 0.0001}, None,
     "no polynomials reach the error 0.0001 for min(x / 0.01, 1); possible errors: "),
])  # fmt: skip
def test_what_cannot_be_shown_is_refused_with_a_remedy(text, settings, plot, message):
    with pytest.raises(UserError, match=re.escape(message)):
        commands.show_map(text, settings, plot=plot)
