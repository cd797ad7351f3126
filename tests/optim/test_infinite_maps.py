"""A map whose output is not finite stops the step on every rank, and nothing has changed."""

import pytest
import torch
from soren_align.optim import Muon, Soren, SpectralOptimizer
from soren_align.spectral import MAPS
from soren_align.spectral.maps import SpectralMap
from soren_align.spectral.matrices import all_finite, from_wide, to_wide
from soren_align.testing import check_map, randn
from torch import nn

SETTINGS = [
    {}, {"adjust_lr_fn": "match_rms_measured"}, {"nesterov": False, "momentum_dtype": "bfloat16"}, {"second_moment": "rows"},
    {"second_moment": "elements"},
]  # fmt: skip


class Fragile(SpectralOptimizer):
    """Its map is the identity, but for the matrix `broken`, which gets a NaN."""

    broken = None

    def map_matrix(self, x, group, context):
        return x.masked_fill(torch.tensor(self.broken in context.names), torch.nan)


class Sound(Fragile):
    def map_is_finite(self, group):
        return True


def parameters():
    weights = [(f"layer.{i}", nn.Parameter(randn(6, 9, dtype=torch.float32, seed=i))) for i in range(4)]
    return [*weights, ("bias", nn.Parameter(torch.ones(7)))]


def optimizer_of(cls, named, **settings):
    groups = [{"params": named[:4], **settings}, {"params": named[4:], "rule": "adamw", "lr": 0.1}]
    return cls(groups, 0.1, weight_decay=0.1)


def step(optimizer, named, seed):
    for i, (_, parameter) in enumerate(named):
        parameter.grad = randn(*parameter.shape, dtype=torch.float32, seed=seed + i) / 10
    optimizer.step()


def numbers_of(optimizer, named):
    states = [optimizer.state[p] for _, p in named]
    return [p.detach().clone() for _, p in named] + [t.clone() for s in states for t in s.values()]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("broken", ["layer.0", "layer.3"])
def test_nothing_changes_if_an_output_is_not_finite(settings, broken):
    named = parameters()
    optimizer = optimizer_of(Fragile, named, **settings)
    step(optimizer, named, seed=10)
    before, maps = numbers_of(optimizer, named), optimizer.num_maps
    optimizer.broken = broken
    with pytest.raises(FloatingPointError, match=rf"NaN or infinity in the map of {broken}; the optimizer did not ap"):
        step(optimizer, named, seed=20)
    assert all(map(torch.equal, before, numbers_of(optimizer, named)))
    assert maps == optimizer.num_maps == 4
    optimizer.broken = None
    step(optimizer, named, seed=20)
    assert not torch.equal(before[3], named[3][1])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_trial_leaves_the_bits_of_a_step(settings):
    results = []
    for cls in (Fragile, Sound):
        named = parameters()
        optimizer = optimizer_of(cls, named, **settings)
        for seed in (10, 20, 30):
            step(optimizer, named, seed)
        results.append(numbers_of(optimizer, named))
    assert all(map(torch.equal, *results))


def test_a_map_that_is_known_to_be_finite_is_not_tried():
    calls = []
    for cls in (Fragile, Sound):
        named = parameters()
        optimizer = optimizer_of(cls, named)
        optimizer.map_matrix = lambda x, group, context, cls=cls: (calls.append(cls), x)[1]
        step(optimizer, named, seed=10)
    assert (calls.count(Fragile), calls.count(Sound)) == (8, 4)


def test_the_maps_of_this_package_are_finite_and_other_records_must_state_it():
    assert all(spectral_map.is_finite for spectral_map in MAPS.values())
    weight = nn.Parameter(torch.ones(2, 3))
    assert all(o.map_is_finite(o.param_groups[0]) for o in (Soren([weight], 0.1), Muon([weight], 0.1)))
    inverse = SpectralMap(
        name="inverse", label="inverse", source="here", target=lambda sigma: 1 / sigma,
        function=lambda x, *, precision, max_norm: (torch.linalg.pinv(x.mT), 0),
    )  # fmt: skip
    assert not inverse.is_finite


def test_check_map_refuses_a_map_that_is_not_as_finite_as_it_states():
    def cubed(x, precision, max_norm):
        wide = to_wide(x, x.dtype)
        return from_wide((wide @ wide.mT @ wide).masked_fill(~all_finite(wide), torch.nan), x), 0

    cube = SpectralMap(
        name="cube", label="cube", source="here", target=lambda sigma: sigma**3, function=cubed, is_finite=True
    )
    with pytest.raises(AssertionError, match=r"a finite matrix of size 1e\+20 \(full rank\) has an output that is not"):
        check_map(cube)
