"""Pictures of spectra: the paper's figures, by their lines."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from research.pictures import GRADIENT, RELEASED, SNS, draw, log_centered, reshaped
from soren_align.run.spectra import Spectrum, all_maps
from soren_align.spectral import exact_sigmoid, newton_schulz, released_sigmoid, soft_newton_schulz
from tests.support.run_folders import finished_run

from research import pictures

pytestmark = pytest.mark.rest


def spectrum(layer=0, step=1, values=None):
    values = values or [0.1 / i**2 for i in range(1, 25)]
    return Spectrum(f"model.layers.{layer}.mlp.up_proj.weight", step, (24, 40), tuple(values), of="gradient")


def test_the_lines_are_the_gradient_and_the_outputs_of_whole_matrices():
    lines = reshaped(spectrum(), all_maps())
    x = spectrum().sigma.float().diag()
    for label, function in {"Muon": newton_schulz, SNS: soft_newton_schulz, RELEASED: released_sigmoid}.items():
        expected = function(x).diagonal().double()
        torch.testing.assert_close(lines[label], expected, atol=1e-6, rtol=0)
    assert lines[GRADIENT].tolist() == pytest.approx([1 / i**2 for i in range(1, 25)])
    assert list(lines) == [GRADIENT, "Muon", SNS, RELEASED]


def test_log_centered_lines_have_median_0_and_the_ratios_of_the_outputs():
    lines = log_centered(spectrum(), all_maps())
    x = spectrum().sigma.float().diag()
    functions = {"exact sigmoid": exact_sigmoid, SNS: soft_newton_schulz, RELEASED: released_sigmoid}
    assert list(lines) == list(functions)
    for label, function in functions.items():
        values = function(x).diagonal().double().numpy()
        assert float(np.median(lines[label])) == pytest.approx(0, abs=1e-9)
        assert float(lines[label][0] - lines[label][-1]) == pytest.approx(math.log2(values[0] / values[-1]), abs=1e-4)


def test_singular_values_of_the_null_space_have_no_logarithm_and_no_part_in_the_median():
    values = [0.1 / i for i in range(1, 13)] + [1e-12] * 12
    lines = log_centered(spectrum(values=values), all_maps())
    for label, line in lines.items():
        assert line[:12].isfinite().all(), label
        assert line[12:].isnan().all(), label
        assert float(line[5] + line[6]) == pytest.approx(0, abs=1e-9), label


@pytest.fixture
def run(tmp_path):
    """A run with the recorded gradients of two layers, and the momentum of one."""
    folder = finished_run(tmp_path / "run")
    recorded = [spectrum(0), spectrum(1), spectrum(0)]
    lines = [
        {"step": 1, "name": one.name, "shape": one.shape, "singular_values": one.singular_values} for one in recorded
    ]
    folder.spectra.write_text("".join(json.dumps(line | of) + "\n" for line, of in zip(lines, OF, strict=True)))
    return folder


OF = ({"of": "gradient"}, {"of": "gradient"}, {})


def test_the_command_draws_recorded_gradients_and_momenta_light_and_dark(run, tmp_path, monkeypatch):
    for options in (["--preset", "paper-spectra"], ["--gradients"], []):
        monkeypatch.setattr("sys.argv", ["pictures", str(run.path), str(tmp_path / "pictures"), *options])
        pictures.main()
    names = ["mlp.up_proj-gradient-paper-spectra", "mlp.up_proj-gradient", "mlp.up_proj"]
    files = [tmp_path / "pictures" / f"{name}{end}.png" for name in names for end in ("", "-dark")]
    assert sorted((tmp_path / "pictures").iterdir()) == sorted(files)
    light, dark = (Image.open(file).convert("L").getpixel((0, 0)) for file in files[:2])
    assert (light, dark < 64) == (255, True)


def test_a_name_in_a_file_leads_to_no_other_folder(tmp_path):
    names = ("model.layers.0.../../$x_{y", "model.layers.0.a/../../b")
    hostile = [Spectrum(name, 1, (24, 40), spectrum().singular_values) for name in names]
    assert len(draw(hostile, {}, tmp_path)) == len([*tmp_path.iterdir()]) == 2 * 2
