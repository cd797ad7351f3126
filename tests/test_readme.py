"""What the README says is so."""

import re
from pathlib import Path

import pytest

from soren_align import recipe

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_soren_alone_learns_in_the_lines_of_the_readme(capsys):
    (code,) = blocks("python")
    names = {}
    exec(code, names)
    assert names["loss"].item() < 0.01
    assert names["optimizer"].num_maps == 200


def test_the_recipe_of_the_readme_is_a_good_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text("{}\n")
    (tmp_path / "my.yaml").write_text(blocks("yaml")[0])
    assert recipe.load("my.yaml", task="sft").optimizer.name == "soren"


@pytest.mark.parametrize("key", ["update_rms", "relative_change", "map_strongest", "num_guarded", "tokens_per_second"])
def test_every_measurement_is_explained(key):
    assert f"`{key}`" in (ROOT / "docs/metrics.md").read_text()
    assert key in (ROOT / "soren_align/trainers/measurements.py").read_text()
