"""The trainers' tests with the oldest and the newest versions of other packages that pyproject.toml allows.

    make test-versions                   both; each builds its environment in .venv
    make test-versions END=oldest        one of them

Before a range is widened, widen it in pyproject.toml and run this. torch is that of constraints.txt at both ends: its
other versions have builds for GPUs alone on some indexes. The exit code is 1 if a test failed at one of them.
"""

import subprocess
import sys
import time
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
OLDEST = {"trl", "transformers", "peft", "datasets", "accelerate", "lm-eval"}
"""Packages that are at their lower bound at the oldest end; all others are the newest that these allow."""
TESTS = ["test_patches.py", "test_library.py", "recipe/test_trl_config.py", "training", "data/test_preview.py"]
# The recorded fields are those of constraints.txt's versions; other versions' are read from TRL, which takes torch.
LEFT_OUT = "not recorded_fields and not imports_no_torch"


def constraints(end: str) -> list[str]:
    """The lines of pip's constraints file for an end."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "torch==" in line]
    texts = project["dependencies"] + project["optional-dependencies"]["eval"] if end == "oldest" else []
    bounds = {r.name: r.specifier for r in map(Requirement, texts) if r.name in OLDEST}
    return torch + [f"{name}=={s.version}" for name, bound in bounds.items() for s in bound if s.operator == ">="]


def passes(end: str) -> bool:
    """Build the environment of an end, run the tests there, and print its versions and their time."""
    folder, start = ROOT / ".venv" / end, time.monotonic()
    python = folder / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    (folder / "constraints.txt").write_text("\n".join(constraints(end)), encoding="utf-8")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-qq", "-c", folder / "constraints.txt", "-e", ".[all,dev]"], cwd=ROOT, check=True)
    frozen = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=True).stdout.split()
    versions = [line for line in frozen if line.split("==")[0].replace("_", "-") in OLDEST]
    print(f"{end}: {', '.join(versions)}; installed in {time.monotonic() - start:.0f} s", flush=True)
    tests = [
        python,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-m",
        "(unit or model) and not slow",
        "-k",
        LEFT_OUT,
    ]
    return subprocess.run([*tests, *(f"tests/{name}" for name in TESTS)], cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(not all([passes(end) for end in sys.argv[1:] or ["oldest", "newest"]]))
