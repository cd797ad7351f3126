"""The scripts of research/studies/spectra.md print its figures."""

from pathlib import Path

import pytest
from research.studies import mapped_spectra

pytestmark = pytest.mark.rest
PAGE = Path(mapped_spectra.__file__).with_name("spectra.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", mapped_spectra.POWERS)
def test_the_rows_of_a_synthetic_spectrum_stand_in_the_page(name):
    for row in mapped_spectra.rows(name, mapped_spectra.synthetic()[name]):
        assert f"{row}\n" in PAGE


@pytest.mark.parametrize("name", mapped_spectra.POWERS)
def test_the_shares_of_the_first_order_decrease_stand_in_the_page(name):
    assert f"{mapped_spectra.leading_row(name, mapped_spectra.synthetic()[name])}\n" in PAGE
