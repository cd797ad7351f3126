"""What the README says is so."""

import re
from pathlib import Path

import pytest
import torch

from soren_align import recipe
from tests.support.command import run

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


def test_every_path_that_the_readme_names_is_there():
    named = set(re.findall(r"`((?:docs|tests|recipes|eval|soren_align)/[\w./*-]+)`", README))
    tree = README.split("## The tree")[1]
    named |= {f"soren_align/{name}" for name in re.findall(r"^      (\S+)  ", tree, re.MULTILINE)}
    assert len(named) > 12
    for path in named:
        assert list(ROOT.glob(path.rstrip("/"))), path


def test_every_folder_of_the_package_stands_in_the_tree():
    tree = README.split("## The tree")[1]
    for entry in (ROOT / "soren_align").iterdir():
        if entry.name[0] != "_" and (entry.is_dir() or entry.suffix == ".py"):
            assert f"      {entry.name}" in tree, entry.name


@pytest.mark.parametrize("key", ["update_rms", "relative_change", "map_strongest", "num_guarded", "tokens_per_second"])
def test_every_measurement_is_explained(key):
    assert f"`{key}`" in (ROOT / "docs/metrics.md").read_text()
    assert key in (ROOT / "soren_align/trainers/measurements.py").read_text()


def commands_and_outputs():
    """{command: what the README shows beneath it}, of the path to a planned model."""
    section = README.split("## A real model, planned in five commands")[1].split("\n## ")[0]
    shown, command = {}, None
    for block in re.split(r"\n(?=\S)", section)[0:]:
        for line in block.split("\n"):
            if line.startswith("    soren-align "):
                command = line.strip()
                shown[command] = []
            elif command and (line.startswith("    ") or not line):
                shown[command].append(line[4:].rstrip())
            elif line:
                command = None
    return {command: "\n".join(lines).strip() for command, lines in shown.items()}


@pytest.mark.model
def test_the_newcomers_path_prints_what_the_readme_shows(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("the README's plan was made without a GPU, and says so")
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")}
    shown = commands_and_outputs()
    assert [c.split()[1] for c in shown] == ["recipes", "recipes", "plan"]
    for command, output in shown.items():
        ran = run(*command.split()[1:], cwd=tmp_path, env=quiet)
        assert ran.returncode == 0, ran.stderr
        said = "\n".join(line.rstrip() for line in ran.stdout.splitlines()).strip()
        assert said == output, command
