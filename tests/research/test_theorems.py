"""The paper's theorems hold in numbers, on the problems of research/studies/theorems.py."""

import math

import pytest
import torch
from research.studies import theorems
from soren_align.spectral import exact_sigmoid

pytestmark = pytest.mark.rest
PROBLEMS = {problem.name: problem for problem in theorems.problems()}
EVERY_PROBLEM = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
EVERY_MAP = pytest.mark.parametrize("name", theorems.MAPS)
ROUNDING = 1e-9
NUM_STEPS = 6


@EVERY_PROBLEM
@pytest.mark.parametrize("constants", [theorems.on_the_space, theorems.on_the_segment])
def test_theorem_1(problem, constants):
    steps = theorems.trajectory(problem, constants=constants, num_steps=NUM_STEPS)
    for step in steps:
        assert torch.linalg.svdvals(step.gradient)[-1] > 0
        assert 0 < step.own[0] <= step.own[1]
        assert step.progress >= step.guarantee * (1 - ROUNDING)
    total = steps[-1].next_loss / steps[0].loss
    assert total <= math.prod(1 - step.guarantee for step in steps)
    worst = min(step.own[0] for step in steps) / max(step.own[1] for step in steps)
    assert total <= (1 - worst) ** NUM_STEPS
    # The descent lemma: half of the first-order decrease, so that twice the guaranteed fall is typical.
    assert min(step.progress / step.guarantee for step in steps) > 1.7


@EVERY_PROBLEM
@EVERY_MAP
def test_the_sandwich_theorem_2_and_corollary_1(problem, name):
    spectral_map = theorems.MAPS[name]
    steps = theorems.trajectory(problem, spectral_map, num_steps=NUM_STEPS)
    errors = [theorems.rho(step.gradient, spectral_map) for step in steps]
    assert max(errors) < 1
    for step, rho in zip(steps, errors, strict=True):
        root = theorems.preconditioner(step.gradient, exact_sigmoid, -0.5)
        between = torch.linalg.eigvalsh(root @ theorems.preconditioner(step.gradient, spectral_map) @ root)
        assert between[0] >= (1 - rho) * (1 - ROUNDING)
        assert between[-1] <= (1 + rho) * (1 + ROUNDING)
        assert max(1 - between[0], between[-1] - 1) == pytest.approx(rho, rel=1e-6)  # no smaller rho would do
        for own, exact in zip(step.own, step.exact, strict=True):
            assert (1 - rho) * exact * (1 - ROUNDING) <= own <= (1 + rho) * exact * (1 + ROUNDING)
        ratio = step.guarantee / (step.exact[0] / step.exact[1])
        assert (1 - rho) / (1 + rho) * (1 - ROUNDING) <= ratio <= (1 + rho) / (1 - rho) * (1 + ROUNDING)
        assert step.progress >= step.guarantee * (1 - ROUNDING)
    worst = min(step.exact[0] for step in steps) / max(step.exact[1] for step in steps)
    factor = (1 - max(errors)) / (1 + max(errors))
    assert steps[-1].next_loss / steps[0].loss <= (1 - factor * worst) ** NUM_STEPS
