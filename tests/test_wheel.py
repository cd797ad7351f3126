"""The built wheel brings recipes, data and suites along, and no test tools."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from soren_align.core import shipped

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_it_brings_the_shipped_folders_and_nothing_of_the_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "recipes/quickstart/sft.yaml", "recipes/quickstart/data/chat_train.jsonl", "eval/quickstart/suite.yaml",
        "configs/templates/qwen2.5.jinja", "configs/recipe.schema.json", "configs/study.schema.json",
        "configs/verdict.schema.json",
    ):  # fmt: skip
        assert f"soren_align/_shipped/{name}" in names
    pages = {name for name in names if name.endswith(".md") or name.startswith("soren_align/_shipped/docs/")}
    assert pages == {f"soren_align/_shipped/{name}" for group in shipped.NAVIGATION.values() for name in group}
    assert not [name for name in names if "test" in name.split("/")[-1] and name.endswith(".py")]


def test_installing_it_does_not_install_test_tools(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert any("trl" in line for line in required)
    assert not [line for line in required if any(tool in line for tool in ("pytest", "hypothesis", "ruff", "pyright"))]


def test_installed_it_trains_the_quickstart_from_another_folder(wheel, tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True)
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-m", "soren_align", "sft", "quickstart/sft", "--set", "trainer.max_steps=2"]
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = tmp_path / "elsewhere/runs/quickstart/sft/eval/quickstart"
    assert {"results.json", "table.md", "samples"} <= {f.name for f in results.iterdir()}
    where = [sys.executable, "-c", "from soren_align.core import shipped; print(shipped.ROOT)"]
    root = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True).stdout.strip()
    assert root == str(site / "soren_align/_shipped")
