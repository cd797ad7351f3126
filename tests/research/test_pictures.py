"""Pictures of spectra: the files that the command writes."""

import json

import pytest
from PIL import Image
from research.pictures import draw
from soren_align.run.spectra import Spectrum
from tests.support.run_folders import finished_run

from research import pictures

pytestmark = pytest.mark.rest


def spectrum(layer=0, step=1):
    values = [0.1 / i**2 for i in range(1, 25)]
    return Spectrum(f"model.layers.{layer}.mlp.up_proj.weight", step, (24, 40), tuple(values), of="gradient")


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
