"""How far 16 bits are from float32, and where they do not serve.

A GPU's tensor cores multiply factors of 8 or 11 bits and sum in float32; float16 is here rounded and multiplied in
float32, which is as close. "auto" on CUDA is float16.
"""

import pytest
import torch
from soren_align.spectral import exact_sigmoid, iterate, minimax_sigmoid, soft_newton_schulz
from soren_align.spectral.coefficients import SIGN
from tests.support.spectra import matrix_of

LIMIT = 0.01
SPECTRA = {"1/i": lambda i: 1 / i, "1/sqrt(i)": lambda i: i**-0.5, "flat": torch.ones_like}
LOW_RANKS = {"rank m/8": lambda i: (i <= len(i) / 8).double(), "rank one": lambda i: (i == 1).double(),
             "rank 16, 1/i": lambda i: (i <= 16) / i}  # fmt: skip


def matrix(sigma, shape):
    """A float32 matrix of these singular values, |x|_F = 1."""
    return matrix_of(sigma / sigma.norm(), shape)[0].float()


def distance(x, precision, resolution):
    """Of the update from float32's, relative (Frobenius)."""
    wanted = minimax_sigmoid(x, resolution=resolution)
    return ((minimax_sigmoid(x, resolution=resolution, precision=precision) - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("resolution", SIGN)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(256, 256), (128, 1024), (400, 256)], ids=str)
def test_factors_of_11_bits_stay_within_one_percent_of_float32(resolution, spectrum, shape):
    sigma = SPECTRA[spectrum](torch.arange(1.0, min(shape) + 1, dtype=torch.float64))
    assert 1e-5 < distance(matrix(sigma, shape), "float16", resolution) < LIMIT


@pytest.mark.rest
@pytest.mark.parametrize("shape", [(512, 1376), (1024, 1024), (2048, 2048)], ids=str)
@pytest.mark.parametrize("spectrum", [*SPECTRA, "gaussian"])
def test_large_matrices_are_within_one_percent_of_the_sigmoid_in_float16(spectrum, shape):
    if spectrum == "gaussian":
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        x /= x.norm()
        # A square one has singular values below the resolution, each 1 / sqrt(m) of the sigmoid's norm.
        wanted = minimax_sigmoid(x)
    else:
        x = matrix(SPECTRA[spectrum](torch.arange(1.0, min(shape) + 1, dtype=torch.float64)), shape)
        wanted = exact_sigmoid(x)
    assert (minimax_sigmoid(x, precision="float16") - wanted).norm() < LIMIT * wanted.norm()


@pytest.mark.parametrize("spectrum", LOW_RANKS)
def test_low_ranks_need_float32(spectrum):
    """Rounding leaves the range of the matrix, and the steps lift it: 16 bits are for gradients of full rank."""
    x = matrix(LOW_RANKS[spectrum](torch.arange(1.0, 257, dtype=torch.float64)), (256, 256))
    wanted = exact_sigmoid(x)
    float32, float16, bfloat16 = (
        float((minimax_sigmoid(x, precision=precision) - wanted).norm() / wanted.norm())
        for precision in ("float32", "float16", "bfloat16")
    )
    assert float32 < LIMIT
    assert LIMIT < float16 < 0.3
    assert bfloat16 > 3 * float16


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e4])
def test_narrow_factors_do_not_leave_their_range(scale):
    x = matrix(SPECTRA["1/i"](torch.arange(1.0, 97, dtype=torch.float64)), (96, 128)) * scale
    for precision in ("float16", "bfloat16"):
        narrow, wide = minimax_sigmoid(x, precision=precision), minimax_sigmoid(x)
        assert (narrow - wide).norm() < 0.05 * wide.norm()
        assert minimax_sigmoid(torch.zeros(4, 6), precision=precision).abs().max() == 0


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_nan_or_an_infinity_is_nan_in_16_bits_too_and_stays_in_its_matrix(precision):
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    x[1, 2, 3], x[2, 0, 0] = torch.nan, torch.inf
    for max_norm in (1.0, 30.0, None):
        result = minimax_sigmoid(x, precision=precision, max_norm=max_norm)
        assert result[0].isfinite().all()
        assert result[1:].isnan().all()


def test_rows_of_equal_entries_stay_within_float16():
    """Their sum of squares would be n times the largest entry's, beyond 65504."""
    x = torch.ones(2, 100_000)
    result = minimax_sigmoid(x, precision="float16")
    assert torch.linalg.matrix_norm(result, 2) == pytest.approx(0.99, abs=0.005)  # where tanh ends


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_of_16_bit_factors_is_summed_in_float32(dtype):
    x = (300 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    exact = x.double() @ x.double()  # beyond float16
    assert (iterate._wide_product(x, x) - exact).norm() < 1e-6 * exact.norm()
    added = iterate._add_wide_product_(torch.ones(64, 64), x, x, beta=2.0, alpha=3.0)
    assert (added - 2 - 3 * exact).norm() < 3e-6 * exact.norm()


def test_sns_in_bfloat16_is_the_iteration_in_bfloat16():
    x = matrix(SPECTRA["1/sqrt(i)"](torch.arange(1.0, 49, dtype=torch.float64)), (48, 80))
    q, t = (x / (x.norm() + 1e-8)).bfloat16(), (x / 4).bfloat16()
    for k in range(15):
        q = 1.5 * q - 0.5 * (q @ q.mT @ q)
        t = 1.5 * t - 0.5 * (t @ t.mT @ t) if k < 2 else t
    wanted = ((q + t) / 2).float()
    found = soft_newton_schulz(x, in_bfloat16=True)
    assert (found - wanted).norm() < 0.03 * wanted.norm()
    assert (found - soft_newton_schulz(x)).norm() > 1e-3 * wanted.norm()
