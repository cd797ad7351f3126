"""The null maps are what their names state."""

import pytest
import torch
from research.nulls import RANDOM, SHUFFLED, random_spectrum, shuffled_spectrum
from soren_align.optim import Soren
from soren_align.spectral import SOREN_MAPS
from soren_align.spectral.maps import seed_of
from tests.support.spectra import matrix_of

pytestmark = pytest.mark.rest
SPECTRA = {
    "flat": torch.ones(8), "1/i": 1 / torch.arange(1.0, 9), "1/sqrt(i)": torch.arange(1.0, 9) ** -0.5,
    "rank 2": torch.tensor([1.0, 0.3, 0, 0, 0, 0, 0, 0]), "rank 1": torch.tensor([2.0, 0, 0, 0, 0, 0, 0, 0]),
}  # fmt: skip
EVERY_SPECTRUM = pytest.mark.parametrize("sigma", SPECTRA.values(), ids=SPECTRA.keys())


@EVERY_SPECTRUM
def test_a_random_spectrum_has_the_modes_of_the_matrix_and_nothing_of_its_sizes(sigma):
    x, u, v = matrix_of(sigma, (8, 12))
    result = random_spectrum(x, [5])
    drawn = torch.rand(8, generator=torch.Generator().manual_seed(5)).double()
    rank = int((sigma > 0).sum())
    assert torch.linalg.svdvals(result) == pytest.approx(torch.cat([drawn[:rank], drawn[rank:] * 0]).sort()[0].flip(0))
    if len(set(sigma.tolist())) == len(sigma):  # modes that are distinct
        assert (result - (u * drawn) @ v.mT).abs().max() < 1e-12
        assert (random_spectrum(x.float(), [5]) - result).abs().max() < 1e-5
        assert torch.equal(random_spectrum(100 * x, [5]).round(decimals=9), result.round(decimals=9))


@EVERY_SPECTRUM
def test_a_shuffled_spectrum_has_the_same_singular_values_on_other_modes(sigma):
    x, u, v = matrix_of(sigma, (8, 12))
    result = shuffled_spectrum(x, [3])
    assert torch.linalg.svdvals(result) == pytest.approx(sigma.double(), abs=1e-12)
    on_modes = torch.einsum("mi,mn,ni->i", u, result, v)
    if len(set(sigma.tolist())) == len(sigma):  # modes that are distinct, and more than two
        assert (on_modes - sigma).abs().max() > 0.1
    assert (on_modes[sigma == 0]).abs().sum() < 1e-12


@pytest.mark.parametrize("null", [random_spectrum, shuffled_spectrum])
def test_each_matrix_of_a_batch_has_the_draw_of_its_own_seed(null):
    x = torch.stack([matrix_of(SPECTRA["1/i"], (8, 12))[0]] * 2)
    seeds = [seed_of("layer.0", 3), seed_of("layer.1", 3)]
    both = null(x, seeds)
    assert torch.equal(both, torch.stack([null(x[0], seeds[:1]), null(x[1], seeds[1:])]))
    assert not torch.allclose(both[0], both[1])
    with pytest.raises(ValueError, match="shorter"):
        null(x, seeds[:1])


def test_the_seed_of_a_matrix_depends_on_its_name_and_the_step_alone():
    assert seed_of("layer.0", 3) == 3016420038041051  # on every machine, also in another version
    assert len({seed_of(name, step) for name in "ab" for step in range(9)}) == 18


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


@pytest.mark.parametrize("null", [RANDOM, SHUFFLED], ids=lambda null: null.name)
def test_a_drawn_map_has_a_new_draw_at_each_step_and_the_same_in_each_run(null, monkeypatch):
    monkeypatch.setitem(SOREN_MAPS, null.name, null)
    weights = torch.zeros(6, 9, dtype=torch.float64)
    settings = {"optimizer": Soren, "lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "map": null.name}
    first = trained_weights(weights, adjust_lr_fn="none", **settings)
    again = trained_weights(weights, adjust_lr_fn="none", **settings)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    updates = [b - a for a, b in zip([weights, *first[:-1]], first, strict=True)]
    spectra = {tuple(torch.linalg.svdvals(update).round(decimals=6).tolist()) for update in updates}
    assert len(spectra) == 4
