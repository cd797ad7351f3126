"""`python -m research.maps` fits a formula, writes its file, and shows maps by their names."""

import json

import pytest
import torch
from soren_align.core.figures import LIGHT
from soren_align.optim import Soren
from soren_align.spectral import MAPS

from research import maps

pytestmark = pytest.mark.rest


@pytest.fixture(autouse=True)
def _few_spectra(monkeypatch):
    spectra = [spectrum for spectrum in maps.recorded_spectra() if min(spectrum.shape) <= 64]
    monkeypatch.setattr(maps, "recorded_spectra", lambda: spectra[:12])


def test_a_formula_becomes_a_file_that_soren_reads(tmp_path, capsys):
    file, picture = tmp_path / "mine.json", tmp_path / "mine.png"
    options = ["--error", "0.005", "--output", str(file), "--plot", str(picture), "--json"]
    assert maps.main(["x / sqrt(x^2 + 0.15^2)", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["composition"] == json.loads(file.read_text())
    assert 0 < result["composition"]["error"] <= 0.005
    assert result["num_steps"] == 3
    assert result["flops_over_muon"] == pytest.approx(3 / 5)
    assert 0 < result["float16_error"] < 0.01
    assert 0 < result["recorded_error"] < 0.05
    assert picture.read_bytes()[:5] == b"\x89PNG\r"
    (group,) = Soren([torch.nn.Parameter(torch.eye(4, 6))], 0.1, map={"file": str(file)}).param_groups
    assert group["map"]["composition"]["formula"] == "x / sqrt(x^2 + 0.15^2)"


@pytest.mark.parametrize("name", MAPS)
def test_every_map_is_shown_by_its_name(name, capsys):
    assert maps.main([name]) == 0
    assert "FLOPs over Muon's" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "largest"), [("sns", "4.37% at 1"), ("released", "91.90% at 0.01")])
def test_the_picture_of_a_map_by_its_name_has_the_largest_error_on_the_papers_interval(name, largest):
    """In the paper 4.37% of SNS, by its scalar iteration (tests/spectral/test_soft_newton_schulz.py has more of them)."""
    figure = maps._figure(name, LIGHT)
    assert figure.axes[1].get_title("left") == f"relative error, %; largest: {largest}"


def test_a_formula_that_no_polynomials_reach_is_refused_with_the_possible_errors(capsys):
    assert maps.main(["min(x / 0.01, 1)", "--error", "0.0001"]) == 2
    assert "no polynomials reach the error 0.0001 for min(x / 0.01, 1); possible errors: " in capsys.readouterr().err
