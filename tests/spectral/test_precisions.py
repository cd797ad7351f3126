"""The certificates of narrow factors: the distance of the update from that of float32 factors, and the cost.

A GPU's tensor cores multiply factors of 8 to 11 bits and sum in float32; here the factors are rounded and multiplied in
float32, which is as close. "auto" on CUDA is float16.
"""

import pytest
import torch
from research.recorded import recorded_spectra
from soren_align.spectral import MAPS, factors, minimax_sigmoid, soft_newton_schulz
from soren_align.spectral.factors import HALF_SCALE, multiply, rest_of, rounded
from soren_align.spectral.flops import composition_flops
from soren_align.spectral.matrices import mapped_in_range
from soren_align.spectral.products import SIGN
from tests.support.spectra import matrix_of
from torch.utils.flop_counter import FlopCounterMode

LIMIT = 0.01
MODELS = {"Qwen2.5-3B": [(2048, 2048), (256, 2048), (11008, 2048)],
          "Mistral-7B": [(4096, 4096), (1024, 4096), (14336, 4096)]}  # fmt: skip
SPECTRA = {"1/i": lambda i: 1 / i, "1/sqrt(i)": lambda i: i**-0.5, "flat": torch.ones_like,
           "rank m/8": lambda i: (i <= len(i) / 8).double(), "rank one": lambda i: (i == 1).double(),
           "rank 16, 1/i": lambda i: (i <= 16) / i}  # fmt: skip


def matrix(sigma, shape):
    """A float32 matrix of these singular values, |x|_F = 1."""
    return matrix_of(sigma / sigma.norm(), shape)[0].float()


def distance(x, precision, resolution):
    """Of the update from float32's, relative (Frobenius)."""
    wanted = minimax_sigmoid(x, resolution=resolution)
    return ((minimax_sigmoid(x, resolution=resolution, precision=precision) - wanted).norm() / wanted.norm()).item()


class OnROCm(torch.Tensor):
    """A tensor of the CPU, which has no products with an out_dtype, that says it is on a GPU, as ROCm's do."""

    is_cuda = True


def test_a_gpu_without_narrow_products_multiplies_in_float32_with_one_notice(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    factors._exists_on_rocm.cache_clear()
    a = torch.randn(4, 4).as_subclass(OnROCm)
    with pytest.warns(UserWarning, match="cannot multiply 16-bit factors") as notices:
        results = [rounded(a, "float16") for _ in range(3)]
    assert len(notices) == 1
    for result in results:
        assert result.dtype == torch.float32
        assert torch.equal(result, a.half().float())


@pytest.mark.parametrize("precision", ["float16", "tf32"])
@pytest.mark.parametrize("resolution", SIGN)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(256, 256), (128, 1024), (400, 256)], ids=str)
def test_factors_of_11_bits_stay_within_one_percent_of_float32(precision, resolution, spectrum, shape):
    sigma = SPECTRA[spectrum](torch.arange(1.0, min(shape) + 1, dtype=torch.float64))
    assert 1e-5 < distance(matrix(sigma, shape), precision, resolution) < LIMIT


@pytest.mark.parametrize("resolution", SIGN)
def test_float16_stays_within_one_percent_on_the_recorded_spectra(resolution):
    quick = [s for s in recorded_spectra() if min(s.shape) <= 256]
    for spectrum in quick[:: max(1, len(quick) // 24)]:
        sigma = torch.tensor(spectrum.singular_values, dtype=torch.float64)
        found = distance(matrix(sigma, sorted(spectrum.shape)), "float16", resolution)
        assert found < LIMIT, (spectrum.set, spectrum.name, spectrum.step)


@pytest.mark.parametrize("resolution", SIGN)
def test_factors_of_8_bits_are_beyond_it(resolution):
    sigma = SPECTRA["rank m/8"](torch.arange(1.0, 257, dtype=torch.float64))
    assert distance(matrix(sigma, (256, 256)), "bfloat16", resolution) > LIMIT


@pytest.mark.parametrize("resolution", SIGN)
@pytest.mark.parametrize(("spectrum", "is_within"), [("1/i", True), ("rank m/8", False), ("rank one", False)])
def test_an_input_of_11_bits_is_beyond_it_for_low_ranks_and_an_output_is_not(resolution, spectrum, is_within):
    """So ranks send float32, though an output of float16 would do."""
    x = matrix(SPECTRA[spectrum](torch.arange(1.0, 257, dtype=torch.float64)), (256, 256))
    wanted = minimax_sigmoid(x, resolution=resolution)

    def error(output):
        return ((output - wanted).norm() / wanted.norm()).item()

    def to_11_bits(numbers):
        return (numbers * 2.0**14).half().float() / 2.0**14  # into the range of float16

    assert error(to_11_bits(minimax_sigmoid(x, resolution=resolution, precision="float16"))) < LIMIT
    narrow = minimax_sigmoid(to_11_bits(x), resolution=resolution, precision="float16")
    assert (error(narrow) < LIMIT) == is_within


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e4])
def test_narrow_factors_do_not_leave_their_range(scale):
    x = matrix(SPECTRA["1/i"](torch.arange(1.0, 97, dtype=torch.float64)), (96, 128)) * scale
    for precision in ("float16", "bfloat16", "tf32"):
        narrow, wide = minimax_sigmoid(x, precision=precision), minimax_sigmoid(x)
        assert (narrow - wide).norm() < 0.05 * wide.norm()
        assert minimax_sigmoid(torch.zeros(4, 6), precision=precision).abs().max() == 0


def test_a_matrix_with_a_nan_is_nan_in_tf32_although_rounding_makes_a_zero_of_it():
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # as a GPU's arithmetic gives it
    assert nan.isnan()
    assert rounded(nan, "tf32") == 0
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    x[1, 2, 3], x[2, 0, 0] = torch.nan, torch.inf
    zeros, _ = mapped_in_range(x, lambda wide, scale, large: (torch.zeros_like(wide), 0), "tf32", 1.0)
    assert zeros[0].eq(0).all()
    assert zeros[1:].isnan().all()
    for precision in ("tf32", "float16", "bfloat16"):
        result = minimax_sigmoid(x, precision=precision, max_norm=1.0)
        assert result[0].isfinite().all()
        assert result[1:].isnan().all()


def test_two_halves_have_the_bits_of_both():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for precision, error in (("float16", 2.0**-21), ("tf32", 2.0**-21), ("bfloat16", 2.0**-15)):
        upper = rounded(x, precision)
        lower = rest_of(x, upper, precision)
        assert ((upper + lower * HALF_SCALE - x).abs() <= error * x.abs()).all()


def test_a_product_of_narrow_factors_is_summed_in_float32():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    exact = x.half().double() @ x.half().double()
    assert (multiply(rounded(x, "float16"), rounded(x, "float16")) - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("resolution", SIGN)
@pytest.mark.parametrize("shape", [shape for shapes in MODELS.values() for shape in shapes], ids=str)
def test_tensor_cores_do_at_most_1_7_times_the_work_of_muons_five_steps(resolution, shape):
    # With eight blocks for each symmetric product 1.2 times, which took longer on a GPU (`flops.LARGE_BLOCKS`).
    narrow = MAPS["minimax"].num_flops(*shape, "float16", resolution=resolution)
    assert 10 * narrow <= 17 * MAPS["muon"].num_flops(*shape)


@pytest.mark.parametrize("resolution", SIGN)
@pytest.mark.parametrize("shape", [(96, 96), (64, 300), (512, 260)], ids=str)
def test_the_counted_operations_are_those_of_the_products(resolution, shape):
    x = torch.randn(shape) / 1000
    with FlopCounterMode(display=False) as counter:
        minimax_sigmoid(x, resolution=resolution, precision="float16")
    table, settings = SIGN[resolution], {"has_base": True, "device_type": "cpu"}
    counted = composition_flops(table, *sorted(shape), "float16", **settings)
    assert counted == pytest.approx(counter.get_total_flops(), rel=1e-6)


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
