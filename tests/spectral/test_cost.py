"""The memory that a forecast counts for a map is what the map takes."""

import pytest
import torch

from soren_align.planning.meter import Meter
from soren_align.spectral import (
    guarded_minimax_sigmoid,
    guarded_soft_newton_schulz,
    newton_schulz,
    num_flops,
    released_sigmoid,
    spectral_power,
    usual_workspace_numbers,
)

MAPS = {
    "minimax": guarded_minimax_sigmoid,
    "sns": lambda x: guarded_soft_newton_schulz(x, 15),
    "released": released_sigmoid,
    "muon": lambda x: newton_schulz(x, 5),
    None: lambda x: spectral_power(x, 0.125),
}


@pytest.mark.parametrize("shape", [(64, 64), (64, 176), (176, 64), (128, 512), (256, 256), (256, 1024)], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_usual_workspace(name, shape):
    x = torch.randn(*shape)
    x /= x.norm()
    with Meter() as meter:
        MAPS[name](x)
    near = 0.12 if name is None else 0.05  # decompositions of squares take a copy more
    assert 4 * usual_workspace_numbers(name, *shape) == pytest.approx(meter.peak, rel=near)


def test_muons_flops_are_those_of_its_steps():
    assert num_flops("muon", 64, 176, steps=10) == 2 * num_flops("muon", 64, 176) == 10 * num_flops("muon", 64, 176, 1)
