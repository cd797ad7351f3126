"""The memory that a forecast counts for a map is what the map takes."""

import pytest
import torch

from soren_align.planning.flops import Meter
from soren_align.spectral import (
    factors,
    guarded_minimax_sigmoid,
    guarded_soft_newton_schulz,
    newton_schulz,
    num_flops,
    num_workspace_numbers,
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


@pytest.mark.parametrize("shape", [(64, 64), (64, 176), (176, 64), (128, 512), (256, 256), (256, 1024)], ids=str)
def test_usual_workspace_of_narrow_factors_on_a_gpu(monkeypatch, shape):
    def multiply(a, b, out=None):  # as on a GPU, where factors of 16 bits give a product of 32; the values are wrong
        result = torch.ones(*a.shape[:-1], b.shape[-1])
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(factors, "rounded", lambda a, precision: a.to(factors.NARROW[precision]))
    monkeypatch.setattr(factors, "multiply", multiply)
    x = torch.randn(*shape)
    x /= x.norm()
    with Meter() as meter:
        guarded_minimax_sigmoid(x, precision="float16", max_norm=1.0)
    assert 4 * usual_workspace_numbers("minimax", *shape, narrow=True) == pytest.approx(meter.peak, rel=0.05)
    assert 4 * num_workspace_numbers(*shape, "cuda") > meter.peak


def test_muons_flops_are_those_of_its_steps():
    assert num_flops("muon", 64, 176, steps=10) == 2 * num_flops("muon", 64, 176) == 10 * num_flops("muon", 64, 176, 1)
