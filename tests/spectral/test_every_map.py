"""The exact maps, Muon's and the norm, against their definitions and torch; test_maps.py has what holds for all maps."""

import pytest
import torch
from soren_align.spectral import exact_sigmoid, newton_schulz, rational_power, spectral_power
from soren_align.spectral.matrices import frobenius_norm
from soren_align.testing import CHECKS, randn
from torch.optim._muon import _zeropower_via_newtonschulz


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.strip("_"))
def test_the_rational_power_is_a_map_of_singular_values(check):
    """Also of small matrices, of which the records take the decomposition; test_maps.py has all records."""
    assert not [*check(lambda x: rational_power(x, 0.125))]


def by_definition(x, function, threshold):
    u, sigma, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u * function(sigma).where(sigma > threshold * sigma[..., :1], 0).unsqueeze(-2)) @ vh


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5), (2, 6, 9)])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e3, 1e30])
def test_the_exact_maps_are_their_definition(dtype, shape, scale):
    x = randn(*shape, dtype=dtype) * scale
    tolerance = 1e-6 if dtype == torch.float32 else 1e-11
    assert (exact_sigmoid(x) - by_definition(x, torch.sigmoid, 1e-12)).abs().max() < tolerance
    expected = by_definition(x, lambda sigma: sigma**0.125, 1e-12)
    assert (spectral_power(x, 0.125) - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exact_maps_are_zero_on_the_null_space(dtype):
    # rank 3, with the rounding noise of the product left in
    x = randn(8, 3, dtype=dtype) @ randn(3, 12, dtype=dtype, seed=1)
    for result in (exact_sigmoid(x), spectral_power(x, 0.125)):
        sigma = torch.linalg.svdvals(result)
        assert (sigma[:3] > 0.5).all()
        assert (sigma[3:] < 1e-6).all()


def test_a_bfloat16_matrix_with_many_columns_is_not_all_null_space():
    x = randn(16, 300, dtype=torch.bfloat16)
    assert torch.linalg.svdvals(exact_sigmoid(x).double()).min() > 0.49


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muons_map_has_the_bits_of_torch(dtype):
    for seed, shape in enumerate([(6, 9), (9, 6), (16, 16), (64, 33), (33, 128), (1, 7), (7, 1), (80, 80)]):
        for scale in (1e-9, 1e-3, 1.0, 1e4):
            x = randn(*shape, dtype=dtype, seed=seed) * scale
            # torch divides a bfloat16 argument in place, hence the copy
            expected = _zeropower_via_newtonschulz(x.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
            assert torch.equal(newton_schulz(x), expected.to(dtype))


def test_muons_map_is_iterated_in_float64_for_a_float64_caller():
    x = randn(6, 9)
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    s = sigma / sigma.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert (newton_schulz(x) - (u * s) @ vh).abs().max() < 1e-12


def test_muons_map_gives_zero_where_float32_cannot_hold_the_norm():
    # documented, and the same in torch
    assert (newton_schulz(torch.full((4, 4), 1e20)) == 0).all()


def test_the_norm_of_millions_of_numbers_has_float32s_accuracy():
    # one sum over all squares is off by 1e-4 here, and a rank-one 2048 x 2048 update then by 1.5e-3
    x = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    assert frobenius_norm(x).item() == pytest.approx(x.double().norm().item(), rel=1e-6)
