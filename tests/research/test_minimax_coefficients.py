"""The shipped tables are what research/studies/minimax_polynomials.py computes, and keep what they promise."""

import numpy as np
import pytest
from research.bound import largest_error
from research.formula import parse
from research.studies import minimax_polynomials as polynomials
from soren_align.spectral.coefficients import SIGN, TANH, TANH_LIMIT, TOP
from soren_align.spectral.composition import Composition

pytestmark = pytest.mark.rest


@pytest.mark.parametrize("resolution", SIGN)
def test_the_sign_tables_are_what_the_script_computes(resolution):
    steps, error = polynomials.compose(resolution, polynomials.RESOLUTIONS[resolution])
    for shipped, computed in zip(SIGN[resolution].steps, steps, strict=True):
        assert shipped == pytest.approx(computed, rel=1e-8)  # nine digits are shipped
    assert error <= SIGN[resolution].error <= 1.06 * error  # two digits, rounded up


@pytest.mark.parametrize("resolution", SIGN)
def test_the_sign_certificates_are_proved(resolution):
    steps, error, slope = SIGN[resolution]
    composition = Composition(steps, error, slope)
    assert largest_error(composition, parse("1"), resolution, TOP)[0] <= error
    assert np.prod([step[0] for step in steps]) == pytest.approx(slope, rel=2e-4)
    below = polynomials.values_of(steps, np.linspace(0, resolution, 10_001))
    assert (np.diff(below) > 0).all()


def test_the_steps_of_the_tanh_are_within_their_error_rise_and_are_as_good_as_those_of_the_script():
    x = np.linspace(0, TANH_LIMIT, 100_001)
    assert np.abs(polynomials.tanh_errors(TANH, x)).max() <= 1.6e-4
    assert (np.diff(polynomials.values_of(TANH, x)) > 0).all()
    # Many coefficients are nearly as good, so that only the error is compared.
    steps, error = polynomials.best_tanh()
    fitted = np.linspace(0, polynomials.TANH_FIT_LIMIT, 3001)
    assert np.abs(polynomials.tanh_errors(TANH, fitted)).max() == pytest.approx(error, rel=0.01)
    assert (np.diff(polynomials.values_of(steps, x)) > 0).all()
