"""Singular values and distances from Gram matrices equal those of a float64 SVD."""

import pytest
import torch
from soren_align.spectral import (
    distance_from_sigmoid,
    exact_sigmoid,
    minimax_sigmoid,
    newton_schulz,
    singular_values,
    soft_newton_schulz,
)
from soren_align.spectral import exact as fidelity
from tests.support.spectra import matrix_of

SHAPES = [(24, 24), (16, 40), (40, 16), (1, 5)]


def matrix(shape, rank=None):
    """Singular values of 0.1/i^2 in random directions, float32; the last ones are below any resolution."""
    sigma = 0.1 / torch.arange(1, min(shape) + 1, dtype=torch.float64) ** 2
    sigma[rank or min(shape) :] = 0
    return matrix_of(sigma, shape)[0].float()


def reference_distance(x, output):
    """By an SVD in float64; the null space is that of float32, as in training."""
    u, sigma, vh = torch.linalg.svd(x.double(), full_matrices=False)
    keep = sigma > torch.finfo(torch.float32).eps * max(x.shape) * sigma[0]
    exact = (u * torch.sigmoid(sigma).where(keep, 0.0)) @ vh
    return float((output.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [2**22, 7])
def test_singular_values_are_those_of_an_svd(shape, chunk, monkeypatch):
    monkeypatch.setattr(fidelity, "CHUNK", chunk)
    x = matrix(shape)
    before = x.clone()
    values, expected = singular_values(x), torch.linalg.svdvals(x.double())
    assert torch.equal(x, before)
    assert values.dtype == torch.float64
    # The Gram matrix squares: 1e-16 of the largest eigenvalue is 1e-8 of the largest singular value.
    assert torch.allclose(values, expected, rtol=0, atol=3e-8 * float(expected[0]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("function", [minimax_sigmoid, soft_newton_schulz, newton_schulz, torch.zeros_like])
def test_the_distance_is_that_of_a_decomposition(shape, rank, function, monkeypatch):
    monkeypatch.setattr(fidelity, "CHUNK", 100)  # several chunks
    x = matrix(shape, rank)
    output = function(x)
    assert float(distance_from_sigmoid(x, output)) == pytest.approx(reference_distance(x, output), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_exact_map_is_at_no_distance(shape):
    x = matrix(shape)
    assert float(distance_from_sigmoid(x, exact_sigmoid(x))) < 1e-6  # float32's rounding of the output
    assert float(distance_from_sigmoid(x, 2 * exact_sigmoid(x))) == pytest.approx(1, abs=1e-6)


def test_a_zero_matrix_is_at_no_distance():
    assert float(distance_from_sigmoid(torch.zeros(3, 5), torch.zeros(3, 5))) == 0
