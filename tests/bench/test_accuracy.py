"""Errors are measured against the spectrum that a matrix really has."""

import pytest
import torch
from soren_align.bench.maps import DECOMPOSITION_ROWS, error_shape, errors, known_matrices
from soren_align.spectral import exact_sigmoid
from soren_align.spectral.maps import sigmoid

CPU = torch.device("cpu")


@pytest.fixture(params=[(12, 12), (8, 24), (30, 7)], ids=str)
def known(request):
    torch.manual_seed(0)
    return known_matrices(request.param, CPU)


def test_the_spectra_are_what_they_are_called(known):
    for problem in known.values():
        assert problem.x.dtype == torch.float32
        found = torch.linalg.svdvals(problem.x.double())
        assert torch.allclose(found, problem.sigma, atol=1e-7)  # float32's rounding of x
        assert found[0].item() == pytest.approx(1.0, abs=1e-7)
    index = torch.arange(1, len(known["power law"].sigma) + 1)
    assert torch.allclose(known["power law"].sigma * index, torch.ones(1, dtype=torch.float64))
    assert known["flat"].sigma.min() == 1


def test_the_definition_has_no_error_and_a_wrong_map_has_its_own(known):
    for problem in known.values():
        assert errors(exact_sigmoid, problem, sigmoid)["max"] < 1e-6
        wrong = errors(lambda x: 1.25 * exact_sigmoid(x), problem, sigmoid)
        assert wrong == pytest.approx({"max": 0.25, "mean": 0.25}, rel=1e-5)


def test_one_wrong_mode_shows_in_the_largest_error_and_hardly_in_the_mean(known):
    problem = known["power law"]

    def drop_the_last(x):
        left, right = problem.u[:, -1], problem.vh[-1]
        return exact_sigmoid(x) - torch.outer(left, right) * torch.sigmoid(problem.sigma[-1])

    found = errors(drop_the_last, problem, sigmoid)
    assert found["max"] == pytest.approx(1.0, abs=1e-5)
    assert found["mean"] == pytest.approx(1 / len(problem.sigma), abs=1e-5)


def test_a_turned_output_is_an_error_though_its_singular_values_are_right(known):
    assert errors(lambda x: -exact_sigmoid(x), known["gaussian"], sigmoid)["max"] == pytest.approx(2.0, abs=1e-5)


def test_a_large_shape_has_a_stand_in_of_the_same_aspect():
    rows = DECOMPOSITION_ROWS["cpu"]
    assert error_shape((512, 1376), CPU) == (512, 1376)
    assert error_shape((11008, 2048), CPU) == (5504, 1024)
    assert min(error_shape((4096, 14336), CPU)) == rows
