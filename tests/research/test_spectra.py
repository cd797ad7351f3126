"""The scripts of research/studies/spectra.md print its figures, and the paper's 4.37% is computed again."""

from pathlib import Path

import numpy as np
import pytest
import torch
from research.studies import mapped_spectra
from soren_align.core.optimizer_settings import RELEASED_STEPS

pytestmark = pytest.mark.rest
PAGE = Path(mapped_spectra.__file__).with_name("spectra.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", mapped_spectra.POWERS)
def test_the_rows_of_a_synthetic_spectrum_stand_in_the_page(name):
    for row in mapped_spectra.rows(name, mapped_spectra.synthetic()[name]):
        assert f"{row}\n" in PAGE


def test_measurements_of_a_known_spectrum(monkeypatch):
    def swapped(x):
        return torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64))

    monkeypatch.setattr(mapped_spectra, "MAPS", {"swapped": swapped, "identity": lambda x: x})
    sigma = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    measured = mapped_spectra.measurements(sigma)[0].tolist()
    first_at_shares, quantities = measured[:4], measured[4:]
    assert first_at_shares == [1.0, 1.0, 2.0, 2.0]
    assert quantities == pytest.approx([1.0, 0.8, 0.8, 0.5])


@pytest.mark.parametrize("name", mapped_spectra.POWERS)
def test_the_shares_of_the_first_order_decrease_stand_in_the_page(name):
    assert f"{mapped_spectra.leading_row(name, mapped_spectra.synthetic()[name])}\n" in PAGE


def test_the_share_of_the_first_order_decrease_is_that_of_the_largest_tenth():
    sigma = torch.arange(20, 0, -1, dtype=torch.float64)
    assert mapped_spectra.leading_share(sigma, sigma) == pytest.approx((400 + 361) / sum(i**2 for i in range(21)))
    assert mapped_spectra.leading_share(sigma, torch.ones(20)) == pytest.approx(39 / 210)


def largest_error(steps):
    """That of the paper's Algorithm 1 to the sigmoid, relative, for singular values in [0.01, 1] of norm 1."""
    x = np.linspace(0.01, 1, 10_001)
    q, t = x, x / 4
    for _ in range(steps):
        q = (3 - q**2) * q / 2
    for _ in range(2):
        t = (3 - t**2) * t / 2
    return np.abs((q + t) / 2 * (1 + np.exp(-x)) - 1).max()


def test_the_papers_largest_error_needs_13_steps():
    assert [round(100 * largest_error(steps), 2) for steps in (13, 15, 20)] == [4.37, 4.37, 4.37]
    assert largest_error(12) == pytest.approx(0.105, abs=5e-4)
    assert largest_error(RELEASED_STEPS) == pytest.approx(0.919, abs=5e-4)
