"""The map of the authors' released code, against its formulas for the singular values."""

import math

import pytest
import torch
from soren_align.spectral import released_level, released_sigmoid, soft_newton_schulz
from soren_align.testing import randn

SHAPES = [(7, 12), (12, 7), (9, 9), (3, 8, 5), (2, 3, 5, 8), (64, 48), (1, 1), (1, 6)]


def formula(u, steps):
    """(Q_K + T_2) / 2 of singular values over the Frobenius norm."""
    q, t = u, u / 4
    for _ in range(steps):
        q = (3 - q * q) * q / 2
    for _ in range(2):
        t = (3 - t * t) * t / 2
    return (q + t) / 2


def reference(x, steps=5):
    u, sigma, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u * formula(sigma / sigma.norm(dim=-1, keepdim=True), steps).unsqueeze(-2)) @ vh


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 5, 15])
def test_the_map_is_its_formula(shape, steps, dtype, tolerance):
    # 1e-7 for float64: the 1e-8 beside the norm of Q_0 has its share. bfloat16 rounds the result to 8 bits.
    x = randn(*shape).to(dtype)
    assert (released_sigmoid(x, steps).double() - reference(x, steps)).abs().max() < tolerance


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e20, 1e37])
def test_the_size_of_the_gradient_has_no_effect(scale):
    x = randn(2, 6, 9).float()
    near = 2e-3 if scale < 1e-4 else 1e-6  # 1e-8 of the norm, times 1.5^5
    assert (released_sigmoid(x * scale) - released_sigmoid(x)).abs().max() < near


def test_below_a_norm_of_1e_8_the_first_branch_vanishes():
    x = randn(6, 9).float()
    unit = x / x.norm()
    tiny = released_sigmoid(unit * 1e-30)
    t_2 = 1.5**2 / 4 / 2  # of small singular values
    assert 0.8 * t_2 < tiny.norm() < t_2
    assert released_sigmoid(torch.full((3, 5), 1e-45)).isfinite().all()


def test_it_is_no_sigmoid_and_differs_from_the_papers_algorithm_by_its_tanh_alone():
    sigma = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    x = torch.diag(sigma / sigma.norm())
    released, paper = released_sigmoid(x, 15), soft_newton_schulz(x, 15)
    assert (released - paper).abs().max() < 1e-6  # |x|_F = 1: the branches are equal
    assert (released_sigmoid(x * 3, 15) - soft_newton_schulz(x * 3, 15)).abs().max() > 0.1
    assert released_sigmoid(x).diagonal()[2] < 0.05  # the sigmoid: 0.5


@pytest.mark.parametrize("steps", [5, 15])
@pytest.mark.parametrize("shape", [(3, 9), (40, 64), (256, 128)])
def test_no_spectrum_has_a_larger_update_than_the_flat_one(shape, steps):
    r = min(shape)
    flat = released_level(*shape, steps)
    expected = formula(torch.tensor(1 / math.sqrt(r), dtype=torch.float64), steps).item()
    assert flat == pytest.approx(expected, rel=1e-12)
    index = torch.arange(1, r + 1, dtype=torch.float64)
    for spectrum in (index**-0.5, 1 / index, index**-2, (index <= r / 2) + 1e-3, randn(r).abs()):
        mapped = released_sigmoid(torch.diag(spectrum), steps)
        assert mapped.norm() / math.sqrt(r) <= flat * (1 + 1e-6)
