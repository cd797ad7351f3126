"""Pion's map is what its name states."""

import pytest
import torch
from soren_align.spectral import high_pass
from tests.support.spectra import matrix_of

SPECTRA = {
    "flat": torch.ones(8), "1/i": 1 / torch.arange(1.0, 9), "rank 2": torch.tensor([1.0, 0.3, 0, 0, 0, 0, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("sigma", SPECTRA.values(), ids=SPECTRA)
@pytest.mark.parametrize(("promotions", "suppressions"), [(3, 2), (5, 0), (1, 4)])
def test_high_pass_is_pions_polynomials_on_the_singular_values(sigma, promotions, suppressions):
    x, u, v = matrix_of(sigma, (8, 12))
    s = sigma.double() / sigma.double().norm()
    for _ in range(promotions):
        s = 1.875 * s - 1.25 * s**3 + 0.375 * s**5
    for _ in range(suppressions):
        s = 2.5 * s**3 - 1.5 * s**5
    assert (high_pass(x, promotions, suppressions) - (u * s) @ v.mT).abs().max() < 1e-12
    assert (high_pass(x.float(), promotions, suppressions) - (u * s) @ v.mT).abs().max() < 1e-6
