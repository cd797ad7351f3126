"""The paper's Algorithm 1 against its own scalar recursion, and the guard beyond its sane range."""

import pytest
import torch
from soren_align.spectral import guarded_soft_newton_schulz, soft_newton_schulz
from tests.support.spectra import matrix_of

SHAPES = [(7, 12), (12, 7), (9, 9), (3, 8, 5), (2, 3, 5, 8), (1, 1), (1, 6)]


def matrix_with(sigma, num_rows, num_columns, dtype=torch.float64):
    return matrix_of(sigma, (num_rows, num_columns))[0].to(dtype)


def scalar_sns(sigma, frobenius, steps):
    q, t = sigma / (frobenius + 1e-8), sigma / 4
    for _ in range(steps):
        q = q * (3 - q * q) / 2
    for _ in range(2):
        t = t * (3 - t * t) / 2
    return (q + t) / 2


def by_singular_values(x, steps):
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    frobenius = sigma.square().sum(-1, keepdim=True).sqrt()
    return (u * scalar_sns(sigma, frobenius, steps).unsqueeze(-2)) @ vh


@pytest.mark.parametrize(
    ("steps", "expected"), [(10, 0.468), (11, 0.278), (12, 0.1055), *((k, 0.04371) for k in range(13, 26))]
)
def test_the_largest_relative_error_on_the_papers_interval(steps, expected):
    # With |X|_F = 1 the first singular value is at once the raw and the normalised one, as in the paper's figure.
    sigma = torch.linspace(0.01, 1, 2000, dtype=torch.float64)
    x = torch.diag_embed(torch.stack([sigma, (1 - sigma**2).clamp(min=0).sqrt()], dim=-1))
    mapped = soft_newton_schulz(x, steps)[:, 0, 0]
    error = ((mapped - sigma.sigmoid()) / sigma.sigmoid()).abs().max().item()
    assert error == pytest.approx(expected, abs=5e-6 if steps >= 13 else 5e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_a_matrix_goes_where_its_singular_values_go(shape, scale):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * scale / 4
    for steps in (1, 5, 15):
        expected = by_singular_values(x, steps)
        assert (soft_newton_schulz(x, steps) - expected).abs().max() < 1e-10


def plain_formula(x, steps=15):
    """The recursion without a guard, in the very operations whose bits are promised: [batch, m, n] with m <= n."""
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=2, keepdim=True), dim=1, keepdim=True)
    q, t = x / (norm + 1e-8), x / 4
    for _ in range(steps):
        q = torch.baddbmm(q, q @ q.mT, q, beta=1.5, alpha=-0.5)
    for _ in range(2):
        t = torch.baddbmm(t, t @ t.mT, t, beta=1.5, alpha=-0.5)
    return (q + t) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_up_to_sigma_4_the_guard_leaves_the_bits_alone(dtype):
    sane = [
        matrix_with(sigma, 6, 9, dtype) for sigma in ([0.3, 0.1], [3.99] * 6, [3.5, 3.4, 3.3, 1e-3], [1e-4], [2.5] * 4)
    ]
    sane.append(torch.diag(torch.tensor([4.0, 4, 4, 1, 1, 0], dtype=dtype)) @ torch.eye(6, 9, dtype=dtype))
    wild = [matrix_with(sigma, 6, 9, dtype) for sigma in ([4.01], [7, 1], [1e6, 3])]
    assert sum(m.norm() > 4 for m in sane) == 4  # here the norm alone does not decide
    x = torch.stack([*sane, *wild])
    result, num_guarded = guarded_soft_newton_schulz(x)
    assert num_guarded == len(wild)
    assert torch.equal(result[: len(sane)], plain_formula(x)[: len(sane)])
    # the plain formula at the edge of the guard, and beyond it, where it has left [0, 1]
    assert torch.allclose(result[-3], plain_formula(x)[-3], atol=1e-4)
    assert not (plain_formula(x)[-1].abs() < 1e3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_larger_single_value_never_gets_a_smaller_result(dtype):
    sigma = torch.cat([torch.logspace(-3, 12, 3001), torch.linspace(3.9, 9, 1001)]).sort().values.to(dtype)
    result, num_guarded = guarded_soft_newton_schulz(sigma[:, None, None])
    result = result.flatten()
    rounding = 4 * torch.finfo(dtype).eps
    assert num_guarded == (sigma > 4).sum()
    assert (result.diff() >= -rounding).all()
    assert result.min() > 0
    assert result.max() <= 1 + rounding
    assert (result[sigma > 4] - 1).abs().max() <= rounding


@pytest.mark.parametrize("largest", [1.0, 4.0, 4.5, 7.0, 8.7, 20.0, 1e3, 1e12])
def test_within_a_matrix_larger_singular_values_get_larger_results(largest):
    sigma = torch.logspace(-3, 0, 24, dtype=torch.float64) * largest
    x = torch.diag(sigma)
    result = soft_newton_schulz(x).diagonal()
    assert (result.diff() >= -1e-15).all()
    assert result.min() > 0
    assert result.max() <= 1 + 1e-15


def test_huge_entries_saturate():
    top = torch.finfo(torch.float32).max
    x = torch.stack([matrix_with([1, 0.5], 5, 8), torch.ones(5, 8), torch.full((5, 8), 1e-3)]).float()
    x = x / x.abs().amax(dim=(1, 2), keepdim=True) * torch.tensor([top, top, 1e-3])[:, None, None]
    result, num_guarded = guarded_soft_newton_schulz(x)
    assert num_guarded == 2
    assert torch.isfinite(result).all()
    t = 0.5 * (3 - 0.25) / 2
    t = t * (3 - t**2) / 2
    expected = torch.tensor([1, (1 + t) / 2, 0, 0, 0])
    assert torch.allclose(torch.linalg.svdvals(result[0]), expected, atol=1e-5)
    # A batch of one may take another kernel: its rounding, 1e-7, is lifted by 1.5^15 / 2 where x has no singular value.
    torch.testing.assert_close(result[2], soft_newton_schulz(x[2:])[0], rtol=0, atol=5e-5)


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="steps: found -1"):
        soft_newton_schulz(torch.eye(2), steps=-1)
