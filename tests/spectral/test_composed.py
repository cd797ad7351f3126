"""A composition on matrices is U f(S) V^T within its certificate, for every spectrum and shape."""

from dataclasses import replace

import pytest
import torch
from soren_align.spectral.composition import shipped
from soren_align.spectral.exact import composed_values, exact_function
from soren_align.spectral.iterate import guarded_composition
from tests.support.spectra import matrix_of

TANH = shipped("tanh", "tau", 0.1)
EXAMPLES = {  # the composition, and the function of x that its file names
    "tanh": (TANH, lambda x: (x / 0.1).tanh()),
    "soft sign": (shipped("soft_sign", "tau", 0.03), lambda x: x / (x**2 + 0.03**2).sqrt()),
    "clip": (shipped("clip", "tau", 0.1), lambda x: (x / 0.1).clamp(max=1)),
    "a jump": (shipped("soren_lambda", "strength", 0.2), lambda x: (x + (x**2 + 0.2).sqrt()) / (1 + 1.2**0.5)),
    "of rms": (replace(TANH, of="rms", limit=40.0), lambda x: (x / 4).tanh()),
    "of none": (replace(TANH, of="none"), lambda x: (x / 0.1).tanh()),
}  # fmt: skip
SPECTRA = {"flat": torch.ones_like, "1/i": lambda i: 1 / i, "1/sqrt(i)": lambda i: i**-0.5,
           "rank m/8": lambda i: (i <= max(1, len(i) // 8)).double(), "rank 1": lambda i: (i == 1).double()}  # fmt: skip
SHAPES = [(24, 24), (24, 60), (60, 24), (1, 5), (150, 400), (200, 200)]
EVERY_EXAMPLE = pytest.mark.parametrize(("composed", "function"), EXAMPLES.values(), ids=EXAMPLES)


def unit_of(sigma, of):
    norms = {"nu": torch.linalg.vector_norm(sigma, 8), "norm": sigma.norm(), "rms": sigma.square().mean().sqrt()}
    return norms.get(of, torch.tensor(1.0, dtype=torch.float64))


@EVERY_EXAMPLE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_result_is_within_the_certificate(composed, function, shape, spectrum):
    sigma = 0.4 * SPECTRA[spectrum](  # nu is below the limit of 1
        torch.arange(1, min(shape) + 1, dtype=torch.float64)
    )
    x, u, v = matrix_of(sigma, shape)
    share = sigma / unit_of(sigma, composed.of)
    expected = function(share).where(sigma > 0, 0.0)
    is_certified = (share >= composed.resolution * composed.limit) | (sigma == 0)
    # x is rounded to 6e-8 of its norm, which lies in the null space too: magnified there by the slope, up to 6000.
    noise = 2e-7 * max(1.0, composed.composition.slope / composed.largest)
    for dtype, rounding in ((torch.float64, 1e-10), (torch.float32, noise)):
        output, num_guarded = guarded_composition(x.to(dtype), composed)
        values = (u.mT @ output.double() @ v).diagonal()
        error = ((values - expected).abs() / composed.largest)[is_certified]
        assert error.max() <= composed.error + rounding
        assert (output - (u * values) @ v.mT).norm() <= 20 * rounding * composed.largest * min(shape) ** 0.5
        assert int(num_guarded) == 0
        assert output.dtype == dtype
        if dtype == torch.float64:
            assert values.numpy() == pytest.approx(composed_values(sigma, composed).numpy(), abs=1e-8)


@EVERY_EXAMPLE
def test_zero_is_zero_and_what_is_not_finite_is_nan(composed, function):
    for max_norm in (None, 1.0):
        assert (guarded_composition(torch.zeros(4, 6), composed, max_norm=max_norm)[0] == 0).all()
    for bad in (torch.nan, torch.inf):
        x = torch.randn(2, 4, 6)
        x[0, 1, 2] = bad
        output = guarded_composition(x, composed)[0]
        assert output[0].isnan().all()
        assert output[1].isfinite().all()


@pytest.mark.parametrize("of", ["none", "rms"])
def test_a_matrix_beyond_the_limit_is_scaled_down_and_counted(of):
    composed, beyond = replace(TANH, of=of), {"none": 1e3, "rms": 1.0}[of]
    x = torch.zeros(3, 4000 if of == "rms" else 4, 8, dtype=torch.float64)
    x[:, 0, 0] = torch.tensor([0.5, 1.0, 2.0]) * beyond
    output, num_guarded = guarded_composition(x, composed)
    assert int(num_guarded) == 3
    assert output[:, 0, 0].numpy() == pytest.approx(1.0, abs=composed.error)
    assert int(guarded_composition(x / beyond / 1e4, replace(TANH, of="none"))[1]) == 0


@EVERY_EXAMPLE
@pytest.mark.parametrize("shape", [(96, 96), (64, 200)], ids=str)
def test_factors_of_float16_stay_near_those_of_float32(composed, function, shape):
    x = matrix_of(1 / torch.arange(1, min(shape) + 1, dtype=torch.float64), shape)[0].float() / 3
    wide, narrow = (guarded_composition(x, composed, precision)[0] for precision in ("float32", "float16"))
    assert 0 < (narrow - wide).norm() < 0.02 * wide.norm()


@EVERY_EXAMPLE
def test_a_composition_is_near_the_decomposition(composed, function):
    x, _, _ = matrix_of(0.7 / torch.arange(1, 31, dtype=torch.float64), (30, 50))
    exact = exact_function(x, function, composed.of, composed.limit)
    output = guarded_composition(x, composed)[0]
    assert torch.linalg.matrix_norm(output - exact, 2) <= composed.error * composed.largest + 1e-9


def test_the_host_reads_nothing_where_the_norm_is_bounded(monkeypatch):
    x = torch.randn(4, 6) / 10
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    monkeypatch.setattr(torch.Tensor, "item", None)
    monkeypatch.setattr(torch.Tensor, "__bool__", None)
    assert guarded_composition(x, TANH, max_norm=1.0)[0].shape == (4, 6)


@pytest.mark.parametrize("of", ["none", "rms"])
def test_up_to_the_limit_nothing_is_guarded(of):
    """Not from 0.87 of it on, as with a norm that is larger than the largest singular value."""
    composed = replace(TANH, of=of, limit=1.0 if of == "none" else 1.02)
    x, u, v = matrix_of(torch.full((400,), 0.99), (400, 500))
    output, num_guarded = guarded_composition(x, composed)
    assert int(num_guarded) == 0
    assert (output - u @ v.mT).norm() <= composed.error * 20 + 1e-9
    assert int(guarded_composition(1.1 * x, replace(TANH, of="none", limit=1.0))[1]) == 1
