"""The error of the maps on recorded momenta: the bars of the default map, and the real map in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from research.recorded import recorded_spectra
from research.studies import minimax_polynomials as polynomials
from soren_align.core.optimizer_settings import RESOLUTION
from soren_align.spectral import exact_sigmoid, minimax_sigmoid, newton_schulz, soft_newton_schulz
from soren_align.spectral.coefficients import SIGN
from tests.support.spectra import matrix_of

pytestmark = pytest.mark.rest
PAGE = Path(__file__).parents[2] / "research/studies/spectra.md"
RECORDED = recorded_spectra()
SMOLLM2 = [s for s in RECORDED if (s.set, s.step) == ("smollm2", 12)]
QUICKSTART = [s for s in RECORDED if (s.set, s.step) == ("quickstart", 600)]


def default_values(sigma):
    return polynomials.minimax_values(sigma, SIGN[RESOLUTION].steps)


def test_the_default_map_has_a_third_of_the_error_of_sns_on_every_recorded_set():
    default, sns = (polynomials.recorded_errors(f) for f in (default_values, polynomials.sns_values))
    for key, (mean, worst) in default.items():
        assert mean <= 0.33 * sns[key][0], key
        assert worst < sns[key][1], key


def test_the_table_of_the_study_holds_the_errors_on_the_shipped_spectra(capsys):
    composed = {r: lambda sigma, r=r: polynomials.minimax_values(sigma, SIGN[r].steps) for r in SIGN}
    maps = [composed[0.0004], composed[0.001], composed[0.01], polynomials.sns_values]
    for values in maps:
        polynomials.print_row("", values)
        assert capsys.readouterr().out.removeprefix("|  |  |  |") in PAGE.read_text(encoding="utf-8")


def test_modes_above_a_thousandth_of_nu_are_within_half_a_percent():
    for spectrum in RECORDED:
        sigma = spectrum.sigma.numpy()
        kept = sigma > 1e-3 * np.sum(sigma**8) ** (1 / 8)
        assert np.abs(default_values(sigma) * (1 + np.exp(-sigma)) - 1)[kept].max() <= 0.005


@pytest.mark.parametrize("spectrum", QUICKSTART[3:5], ids=lambda s: s.name)
def test_the_values_of_the_script_are_those_of_the_maps(spectrum):
    (x, u, v), values = matrix_of(spectrum.sigma, spectrum.shape), spectrum.sigma.numpy()
    maps = [
        (minimax_sigmoid(x), default_values(values), 1e-3),  # the script has the exact tanh
        (soft_newton_schulz(x), polynomials.sns_values(values), 1e-5),
        (newton_schulz(x) / 2, polynomials.muon_values(values), 1e-5),
        (exact_sigmoid(x.float()).double(), polynomials.exact_values(values, spectrum.shape), 1e-3),
    ]
    for output, expected, tolerance in maps:
        reference = (u * torch.tensor(expected)) @ v.mT
        assert (output - reference).norm() <= tolerance * reference.norm()
