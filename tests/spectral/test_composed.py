"""A composition on matrices is U f(S) V^T within its certificate, for every spectrum and shape."""

import numpy as np
import pytest
import torch
from soren_align.spectral.compose import compose, target_of
from soren_align.spectral.composed import exact_formula, guarded_composition
from soren_align.testing import randn
from tests.support.spectra import matrix_of

EXAMPLES = {  # the formula, the normalization, the limit, the error
    "tanh": ("tanh(x / 0.1)", "nu", 1.0, 0.005), "soft sign": ("x / sqrt(x^2 + 0.01)", "nu", 1.0, 0.005),
    "steep": ("x / sqrt(x^2 + 0.0001)", "norm", 1.0, 0.005), "clip": ("min(x / 0.1, 1)", "nu", 1.0, 0.03),
    "a jump": ("(x + sqrt(x^2 + 0.2)) / (1 + sqrt(1.2))", "norm", 1.0, 0.03), "identity": ("x", "nu", 1.0, 0.005),
    "of rms": ("tanh(x / 2)", "rms", 40.0, 0.01), "of none": ("3 * tanh(x / 0.1)", "none", 1.0, 0.005),
    "polar": ("1", "nu", 1.0, 0.01),
}  # fmt: skip
SPECTRA = {"flat": torch.ones_like, "1/i": lambda i: 1 / i, "1/sqrt(i)": lambda i: i**-0.5,
           "rank m/8": lambda i: (i <= max(1, len(i) // 8)).double(), "rank 1": lambda i: 1.0 * (i == 1)}  # fmt: skip
SHAPES = [(24, 24), (24, 60), (60, 24), (1, 5), (150, 400), (200, 200)]
EVERY_EXAMPLE = pytest.mark.parametrize("name", EXAMPLES)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The target and the composition of each example."""
    folder = tmp_path_factory.mktemp("maps")
    targets = {name: target_of(text, None, of, limit=limit) for name, (text, of, limit, _) in EXAMPLES.items()}
    return {name: (target, compose(target, EXAMPLES[name][-1], folder)) for name, target in targets.items()}


def unit_of(sigma, of):
    norms = {"nu": torch.linalg.vector_norm(sigma, 8), "norm": sigma.norm(), "rms": sigma.square().mean().sqrt()}
    return norms.get(of, torch.tensor(1.0, dtype=torch.float64))


@EVERY_EXAMPLE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_result_is_within_the_certificate(examples, name, shape, spectrum):
    target, result = examples[name]
    sigma = 0.4 * SPECTRA[spectrum](  # nu is below the limit of 1
        torch.arange(1, min(shape) + 1, dtype=torch.float64)
    )
    x, u, v = matrix_of(sigma, shape)
    share = sigma / unit_of(sigma, target.of)
    expected = torch.from_numpy(target.formula(share.numpy()).copy()).where(sigma > 0, 0.0)
    is_certified = (share >= target.resolution * target.limit) | (sigma == 0)
    # x is rounded to 6e-8 of its norm, which lies in the null space too: magnified there by the slope, up to 6000.
    noise = 2e-7 * max(1.0, result.composition.slope / result.largest)
    for dtype, rounding in ((torch.float64, 1e-10), (torch.float32, noise)):
        output, num_guarded = guarded_composition(x.to(dtype), result.composition, target.of, target.limit)
        values = (u.mT @ output.double() @ v).diagonal()
        error = ((values - expected).abs() / result.largest)[is_certified]
        assert error.max() <= result.error + rounding
        assert (output - (u * values) @ v.mT).norm() <= 20 * rounding * result.largest * min(shape) ** 0.5
        assert int(num_guarded) == 0
        assert output.dtype == dtype


@EVERY_EXAMPLE
def test_batches_transposes_and_rotations(examples, name):
    target, result = examples[name]
    x = randn(2, 3, 8, 5) / 20

    def mapped(matrices):
        return guarded_composition(matrices, result.composition, target.of, target.limit)[0]

    one_by_one = torch.stack([mapped(m) for m in x.flatten(0, 1)]).unflatten(0, (2, 3))
    assert (mapped(x) - one_by_one).abs().max() < 1e-12
    assert torch.equal(mapped(x.mT), mapped(x).mT)
    u = torch.linalg.qr(randn(8, 8, seed=1)).Q
    assert (mapped(u @ x) - u @ mapped(x)).abs().max() < 1e-9


@EVERY_EXAMPLE
def test_zero_is_zero_and_what_is_not_finite_is_nan(examples, name):
    target, result = examples[name]
    for max_norm in (None, 1.0):
        zero = guarded_composition(torch.zeros(4, 6), result.composition, target.of, target.limit, max_norm=max_norm)
        assert (zero[0] == 0).all()
    for bad in (torch.nan, torch.inf):
        x = torch.randn(2, 4, 6)
        x[0, 1, 2] = bad
        output = guarded_composition(x, result.composition, target.of, target.limit)[0]
        assert output[0].isnan().all()
        assert output[1].isfinite().all()


@pytest.mark.parametrize("name", ["of none", "of rms"])
def test_a_matrix_beyond_the_limit_is_scaled_down_and_counted(examples, name):
    target, result = examples[name]
    beyond, limit = {"of none": 1e3, "of rms": 1.0}[name], 1.0
    x = torch.zeros(3, 4000 if name == "of rms" else 4, 8, dtype=torch.float64)
    x[:, 0, 0] = torch.tensor([0.5, 1.0, 2.0]) * beyond
    output, num_guarded = guarded_composition(x, result.composition, target.of, limit)
    assert int(num_guarded) == 3
    top = float(target(np.array([1.0]))[0])
    assert output[:, 0, 0].numpy() == pytest.approx(top, abs=result.error * result.largest)
    small = guarded_composition(x / beyond / 1e4, result.composition, "none", 1.0)
    assert int(small[1]) == 0


@EVERY_EXAMPLE
@pytest.mark.parametrize("shape", [(96, 96), (64, 200)], ids=str)
def test_factors_of_float16_stay_near_those_of_float32(examples, name, shape):
    target, result = examples[name]
    x = matrix_of(1 / torch.arange(1, min(shape) + 1, dtype=torch.float64), shape)[0].float() / 3
    wide, narrow = (
        guarded_composition(x, result.composition, target.of, target.limit, precision)[0]
        for precision in ("float32", "float16")
    )
    assert 0 < (narrow - wide).norm() < 0.02 * wide.norm()


@EVERY_EXAMPLE
def test_a_composition_is_near_the_decomposition(examples, name):
    target, result = examples[name]
    x, _, _ = matrix_of(0.7 / torch.arange(1, 31, dtype=torch.float64), (30, 50))
    exact = exact_formula(x, target.formula, target.of, target.limit)
    output = guarded_composition(x, result.composition, target.of, target.limit)[0]
    assert torch.linalg.matrix_norm(output - exact, 2) <= result.error * result.largest + 1e-9


def test_the_host_reads_nothing_where_the_norm_is_bounded(examples, monkeypatch):
    target, result = examples["tanh"]
    x = torch.randn(4, 6) / 10
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    monkeypatch.setattr(torch.Tensor, "item", None)
    monkeypatch.setattr(torch.Tensor, "__bool__", None)
    assert guarded_composition(x, result.composition, target.of, max_norm=1.0)[0].shape == (4, 6)
