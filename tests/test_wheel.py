"""The built wheel brings recipes, data and suites along, and no test tools; what is no release is not built."""

import os
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
from soren_align.core import shipped

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parent.parent


FOLDERS = ("recipes", "configs", "eval")
"""Shipped as they are."""
RELEASE = {
    "CHANGELOG.md": "# Changelog\n\n## 0.1.0 (2026-12-01)\n",
    "pyproject.toml": 'version = "0.1.0"\n',
    "soren_align/core/version.py": '__version__ = "0.1.0"\n',
}
"""What is compared before a release."""


def build(source, folder, *options):
    """Build with the installed build backend, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder, *options]
    subprocess.run(command, cwd=source, check=True, capture_output=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    return next(built.glob("*.whl"))


def names_in(wheel):
    """Names of files -> their checksums."""
    return {info.filename: info.CRC for info in zipfile.ZipFile(wheel).infolist()}


def test_it_brings_the_package_the_shipped_folders_and_the_pages_and_nothing_else(wheel):
    pages = (ROOT / name for group in shipped.NAVIGATION.values() for name in group)
    files = [*(file for folder in FOLDERS for file in (ROOT / folder).rglob("*")), *pages]
    paths = {f"soren_align/_shipped/{file.relative_to(ROOT)}": file for file in files}
    paths |= {str(file.relative_to(ROOT)): file for file in (ROOT / "soren_align").rglob("*")}
    expected = {
        name: zlib.crc32(file.read_bytes())
        for name, file in paths.items()
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert len(expected) > 300
    assert {name: checksum for name, checksum in names_in(wheel).items() if ".dist-info/" not in name} == expected
    assert not [name for name in expected if name.split("/")[-1].startswith(("test_", "conftest"))]


def test_the_source_distribution_builds_the_same_wheel(built, wheel, tmp_path):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    build(next(tmp_path.iterdir()), tmp_path / "again", "-t", "wheel")
    assert names_in(next((tmp_path / "again").iterdir())) == names_in(wheel)


@pytest.mark.parametrize(("change", "problem"), [
    ({"CHANGELOG.md": "# Changelog\n\n## 0.1.0 (unreleased)\n"}, "CHANGELOG.md begins with '## 0.1.0 (unreleased)'; "),
    ({"CHANGELOG.md": "# Changelog\n\n## 0.2.0 (2026-12-01)\n"}, "CHANGELOG.md begins with '## 0.2.0 (2026-12-01)'; "),
    ({"soren_align/core/version.py": '__version__ = "0.1.1"\n'}, "pyproject.toml has version 0.1.0, soren_align/core"),
    ({}, "the working tree has changes; commit or remove them"),
])  # fmt: skip
def test_a_commit_that_is_no_release_is_refused_before_anything_is_built(tmp_path, change, problem):
    for name, text in (RELEASE | {".ci/release": (ROOT / ".ci/release").read_text()} | change).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in ([*git, "init", "-q"], [*git, "add", "."], [*git, "commit", "-qm", "a"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    if not change:
        (tmp_path / "more.txt").touch()
    env = {**os.environ, "PYTHON": "/bin/false"}
    refused = subprocess.run(["bash", ".ci/release"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"error: {problem}")


def test_installing_it_installs_neither_extras_nor_test_tools(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert any("trl" in line for line in required)
    others = ("lm-eval", "deepspeed", "nltk", "pytest", "hypothesis", "ruff", "pyright")
    assert not [line for line in required if any(name in line for name in others)]


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
