"""How far an update can be from Muon's: the theorem, and the numbers on recorded momenta."""

from pathlib import Path
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from research.contrast import LOWEST_COSINE_OF_THE_SIGMOID, contrast
from research.recorded import recorded_spectra

pytestmark = pytest.mark.rest
PAGE = Path(__file__).parents[2] / "research/studies/theorems.md"
SPECTRUM = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)


@given(SPECTRUM, st.floats(1e-6, 1e6))
def test_no_temperature_takes_the_sigmoid_further_from_muon_than_the_theorem_allows(sigma, temperature):
    sigma = torch.tensor(sigma, dtype=torch.float64)
    found = contrast(sigma, torch.sigmoid(sigma / temperature))
    assert LOWEST_COSINE_OF_THE_SIGMOID - 1e-12 <= found.to_muon <= 1 + 1e-12
    assert found.ratio <= 2


def of_recorded_momenta(function):
    """The median over the recorded momenta of each number of a map's contrast."""
    spectra = [spectrum.without_null_space for spectrum in recorded_spectra() if spectrum.nu]
    found = [contrast(sigma, function(sigma)) for sigma in spectra]
    assert len(found) == 126
    return [[getattr(c, name) for c in found] for name in ("ratio", "to_muon", "to_momentum")]


def q90(sigma):
    return sigma[sigma > 0].quantile(0.9)


TABLE = {
    "the sigmoid": torch.sigmoid,
    "the sigmoid with T = median / 0.405": lambda sigma: torch.sigmoid(sigma * 0.405 / sigma[sigma > 0].median()),
    "tanh(sigma / the 90% quantile)": lambda sigma: torch.tanh(sigma / q90(sigma)),
    "sigma / sqrt(sigma^2 + q^2)": lambda sigma: sigma / (sigma.square() + q90(sigma) ** 2).sqrt(),
    "sigma: momentum SGD": lambda sigma: sigma,
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_the_page_is_that_of_the_recorded_momenta(name):
    """It follows from a file, and depends on no machine."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith((f"| {name} |", f"| {name}, "))]
    (cells,) = [[float(cell) for cell in row.split("|")[2:5]] for row in rows]
    medians = [median(numbers) for numbers in of_recorded_momenta(TABLE[name])]
    assert cells == pytest.approx(medians, rel=0.012)  # to two digits
