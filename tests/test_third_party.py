"""A map and an optimizer of another package are used by their names; a broken package is named and left out."""

import os
import subprocess
import sys

import pytest

METADATA = "Metadata-Version: 2.1\nName: cubic-muon\nVersion: 1.0\n"
ENTRY_POINTS = """\
[soren_align.maps]
cubic = cubic_muon:CUBIC
minimax = cubic_muon:CUBIC
broken = cubic_muon.nothing:CUBIC
number = cubic_muon:NUMBER

[soren_align.optimizers]
cubic_muon = cubic_muon.recipe:CubicSettings
muon = cubic_muon.recipe:OtherMuonSettings
"""
FILES = {
    "__init__.py": """
from soren_align.core.optimizer_settings import Bounds
from soren_align.spectral.maps import Setting, SpectralMap

NUMBER = 3


def function(x, *, steps, precision, max_norm):
    import torch
    from soren_align.spectral.matrices import frobenius_norm, from_wide, replace_zeros, to_wide

    y = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.float32)
    y = y / replace_zeros(frobenius_norm(y))
    for _ in range(steps):
        y = 1.5 * y - 0.5 * y @ y.mT @ y
    return from_wide(y, x), 0


CUBIC = SpectralMap(
    name="cubic", title="cubic, of another package", label="cubic {steps}", doc="Newton and Schulz's cubic.",
    source="cubic-muon", function=function,
    target=lambda sigma, steps: function(sigma.diag(), steps=steps, precision="float32", max_norm=None)[0].diagonal(),
    settings={"steps": Setting(5, Bounds(least=1, most=99), doc="Iterations.")},
    flops=lambda m, n, precision, steps: 4 * m * m * n * steps,
)
""",
    "recipe.py": '''
from dataclasses import replace
from typing import ClassVar, Literal

from soren_align.recipe.optimizer import MatrixOptimizer
from soren_align.spectral.maps import SpectralMap

from . import CUBIC


class CubicSettings(MatrixOptimizer):
    """Muon with a cubic."""

    title: ClassVar[str] = "CubicMuon"
    own_map: ClassVar[SpectralMap] = replace(CUBIC, optimizer="cubic_muon")
    module: ClassVar[str] = "cubic_muon.optimizer"

    name: Literal["cubic_muon"]
    steps: int = 5
    """Iterations."""


class OtherMuonSettings(CubicSettings):
    """Takes a name of ours."""

    name: Literal["muon"]
''',
    "optimizer.py": """
from soren_align.optim import SpectralOptimizer
from soren_align.optim.group_settings import setting_checks

from . import CUBIC, function


class CubicMuon(SpectralOptimizer, name="cubic_muon"):
    map_settings = setting_checks(CUBIC)

    def map_matrix(self, x, group, context, **state):
        return function(x, steps=group["steps"], precision="float32", max_norm=None)[0]
""",
}
USE = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from soren_align.recipe import OPTIMIZER_SECTIONS, load
    from soren_align.spectral import MAPS, SOREN_MAPS
    assert "torch" not in sys.modules
    import torch
    from soren_align.optim import build_optimizer
from soren_align.testing import check_map

check_map(MAPS["cubic"])
assert [*SOREN_MAPS][0] == "minimax" and SOREN_MAPS["minimax"].source != "cubic-muon"
assert OPTIMIZER_SECTIONS["muon"].__module__.startswith("soren_align")
weights = {}
for optimizer in ({"name": "soren", "map": {"name": "cubic", "steps": 5}}, {"name": "cubic_muon", "steps": 5}):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False))
    built = build_optimizer(model, lr=0.1, **optimizer, adjust_lr_fn="original")
    for _ in range(3):
        model(torch.ones(2, 6)).square().sum().backward()
        built.step()
    weights[optimizer["name"]] = model[0].weight.detach()
assert torch.equal(weights["soren"], weights["cubic_muon"])
print(json.dumps([str(warning.message) for warning in caught]))
"""


@pytest.fixture
def environment(tmp_path):
    """The environment of a process that has the package beside this one."""
    package, about = tmp_path / "cubic_muon", tmp_path / "cubic_muon-1.0.dist-info"
    package.mkdir()
    about.mkdir()
    for name, text in FILES.items():
        (package / name).write_text(text)
    (about / "METADATA").write_text(METADATA)
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*sys.path[:1], str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }


def run(environment, *words):
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.process
@pytest.mark.sample
def test_a_map_and_an_optimizer_of_another_package_are_checked_and_step(environment):
    done = run(environment, "-W", "ignore", "-c", USE)
    for entry_point, reason in {
        "minimax": "own name is 'cubic'", "broken": "ModuleNotFoundError", "number": "it is a int",
        "muon": "the name is taken",
    }.items():  # fmt: skip
        assert f"the entry point {entry_point} of " in done.stdout
        assert reason in done.stdout


@pytest.mark.process
def test_the_commands_know_them(environment):
    plan = run(environment, "-m", "soren_align", "plan", "quickstart/sft", "--set", "optimizer.name=cubic_muon")
    assert "optimizer cubic_muon (cubic, of another package" in plan.stdout
