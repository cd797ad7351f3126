"""Momentum SGD and Pion's map are what their names state."""

import pytest
import torch
from soren_align.optim import Soren
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


def trained_weights(weights, **settings):
    """The weights after each of four steps from gradients of one kind."""
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = settings.pop("optimizer")([("layer.weight", parameter)], **settings)
    history = []
    for step in range(4):
        parameter.grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(step)).to(weights)
        optimizer.step()
        history.append(parameter.detach().clone())
    return history


def test_soren_with_the_identity_is_momentum_sgd():
    weights = torch.ones(6, 9, dtype=torch.float64)
    soren = trained_weights(
        weights, optimizer=Soren, lr=0.5, momentum=0.9, weight_decay=0.0, map="identity", adjust_lr_fn="none"
    )
    sgd = trained_weights(weights, optimizer=torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
    for ours, theirs in zip(soren, sgd, strict=True):
        assert (ours - theirs).abs().max() < 1e-12
