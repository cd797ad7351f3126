"""The shipped polynomials are what research/studies/minimax_polynomials.py computes, and keep what they promise."""

import numpy as np
import pytest
from research.studies import minimax_polynomials as polynomials
from soren_align.core.optimizer_settings import RESOLUTION
from soren_align.spectral.products import SIGN, TANH, TANH_WIDE, TOP

pytestmark = pytest.mark.rest


def odd(coefficients, x):
    return sum(c * x ** (2 * i + 1) for i, c in enumerate(coefficients))


def composed(resolution, u):
    for step in SIGN[resolution].steps:
        u = odd(step, u)
    return u


@pytest.mark.parametrize("resolution", SIGN)
def test_the_sign_tables_are_what_the_script_computes(resolution):
    steps, error = polynomials.compose(resolution, polynomials.RESOLUTIONS[resolution])
    for shipped, computed in zip(SIGN[resolution].steps, steps, strict=True):
        assert shipped == pytest.approx(computed, rel=1e-9)  # ten digits are shipped
    assert SIGN[resolution].error == pytest.approx(error, abs=1e-5)


@pytest.mark.parametrize("degree", [5, 9])
def test_the_tanh_tables_are_what_the_script_computes(degree):
    computed, _ = polynomials.best_tanh(degree, polynomials.TANH_DOMAINS[degree])
    assert {5: TANH, 9: TANH_WIDE}[degree] == pytest.approx(computed, rel=1e-7)  # nine digits, from a linear program


@pytest.mark.parametrize("resolution", SIGN)
def test_the_sign_certificates_hold(resolution):
    u = np.concatenate([np.geomspace(resolution, TOP, 200_001), np.linspace(resolution, TOP, 200_001)])
    assert np.abs(composed(resolution, u) - 1).max() <= SIGN[resolution].error
    assert composed(resolution, 1e-9) == pytest.approx(1e-9 * SIGN[resolution].slope, rel=1e-3)
    below = composed(resolution, np.linspace(0, resolution, 10_001))
    assert (np.diff(below) > 0).all()


@pytest.mark.parametrize(("table", "largest", "error"), [(TANH, 2.5, 0.000828), (TANH_WIDE, 4.3, 0.000562)])
def test_the_tanh_certificates_hold(table, largest, error):
    x = np.linspace(0, largest, 100_001)
    values = odd(table, x)
    assert (np.abs(values - np.tanh(x / 2)) / (1 + np.tanh(x / 2))).max() <= error
    assert (np.diff(values) >= -1e-12).all()


@pytest.mark.parametrize("resolution", [0.01, RESOLUTION])
def test_the_shipped_degrees_are_on_the_front(resolution):
    num_restarts = SIGN[resolution].num_restarts
    assert num_restarts == polynomials.NUM_RESTARTS.get(resolution, 2)
    degrees = polynomials.RESOLUTIONS[resolution]
    cost = polynomials.num_square_products(degrees, num_restarts)
    error, _ = polynomials.front(resolution, num_restarts, most=cost)[cost]
    # 1%: the order of the degrees changes the error that little, and the rounding of the products more
    assert error <= SIGN[resolution].error <= 1.01 * error + 1e-5
