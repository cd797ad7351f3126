"""The command draws spectra, as the paper does."""

import json

import pytest
from PIL import Image
from tests.support.run_folders import finished_run

from research import pictures

pytestmark = pytest.mark.rest


@pytest.fixture
def run(tmp_path):
    """A run with the recorded gradients of two layers, and the momentum of one."""
    folder, values = finished_run(tmp_path / "run"), [0.1 / i**2 for i in range(1, 25)]
    lines = [
        {"step": 1, "name": f"model.layers.{layer}.mlp.up_proj.weight", "shape": [24, 40], "singular_values": values}
        for layer in (0, 1, 0)
    ]
    for line in lines[:2]:
        line["of"] = "gradient"
    folder.spectra.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_command_draws_recorded_gradients_and_momenta_light_and_dark(run, tmp_path, monkeypatch):
    for options in (["--preset", "paper-spectra"], ["--gradients"], []):
        monkeypatch.setattr("sys.argv", ["pictures", str(run.path), str(tmp_path / "pictures"), *options])
        pictures.main()
    names = ["mlp.up_proj-gradient-paper-spectra", "mlp.up_proj-gradient", "mlp.up_proj"]
    files = [tmp_path / "pictures" / f"{name}{end}.png" for name in names for end in ("", "-dark")]
    assert sorted((tmp_path / "pictures").iterdir()) == sorted(files)
    light, dark = (Image.open(file).convert("L").getpixel((0, 0)) for file in files[:2])
    assert (light, dark < 64) == (255, True)
