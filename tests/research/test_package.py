"""`pip install -e research` gives recipes the null maps, by the entry points of its pyproject.toml."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.process
@pytest.mark.rest
def test_recipes_know_the_null_maps_by_the_entry_points_of_the_package(tmp_path):
    project = tomllib.loads((ROOT / "research/pyproject.toml").read_text())["project"]
    points = project["entry-points"]["soren_align.maps"]
    metadata = tmp_path / "soren_align_research-0.dist-info"  # as pip would write it
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (metadata / "entry_points.txt").write_text(f"[soren_align.maps]\n{lines}")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    plan = [sys.executable, "-W", "error", "-m", "soren_align", "plan", "quickstart/sft"]
    for name in points:
        arguments = [*plan, "--set", "optimizer.name=soren", "--set", f"optimizer.map={name}"]
        done = subprocess.run(arguments, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{name}, a null map" in done.stdout
