"""The memory and the operations that a forecast counts for a map are what the map takes."""

import pytest
import torch
from soren_align.planning.flops import Meter
from soren_align.spectral import MAPS, guarded_minimax_sigmoid
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("shape", [(64, 64), (64, 176), (176, 64), (128, 512), (256, 256), (256, 1024)], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_usual_workspace(name, shape):
    x = torch.randn(*shape)
    x /= x.norm()
    with Meter() as meter:
        MAPS[name].function(x, precision="float32", max_norm=None, **MAPS[name].defaults)
    near = 0.12 if MAPS[name].num_flops(*shape) is None else 0.05  # decompositions of squares take a copy more
    assert 4 * MAPS[name].num_workspace_numbers(*shape) == pytest.approx(meter.peak, rel=near)


@pytest.mark.parametrize("shape", [(64, 64), (64, 176), (176, 64), (128, 512), (256, 256), (256, 1024)], ids=str)
def test_usual_workspace_of_16_bits(shape):
    x = torch.randn(*shape)  # bfloat16 has products on a CPU, but for the copies that the first step's need
    x /= x.norm()
    with Meter() as meter:
        guarded_minimax_sigmoid(x, precision="bfloat16", max_norm=1.0)
    copies = min(shape) * (min(shape) + max(shape))
    stated = MAPS["minimax"].num_workspace_numbers(*shape, "bfloat16")
    assert 4 * stated <= 1.01 * meter.peak <= 4.04 * (stated + copies)


def test_muons_flops_are_those_of_its_steps():
    flops = {steps: MAPS["muon"].num_flops(64, 176, ns_steps=steps) for steps in (1, 5, 10)}
    assert flops[10] == 2 * MAPS["muon"].num_flops(64, 176) == 2 * flops[5] == 10 * flops[1]


class Detector(TorchDispatchMode):
    """Whether a decomposition was computed."""

    has_decomposed = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.has_decomposed |= any(word in func.name() for word in ("eigh", "svd"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (150, 300)], ids=str)
@pytest.mark.parametrize(("name", "settings"), [
    *((name, settings) for name, record in MAPS.items() for settings in record.variants()), ("sns", {"steps": 3}),
])  # fmt: skip
def test_counted_flops_are_those_that_torch_sees(name, settings, shape):
    x = torch.randn(shape)
    with FlopCounterMode(display=False) as counter, Detector() as detector:
        MAPS[name].function(x / x.norm(), precision="float32", max_norm=1.0, **settings)
    flops = MAPS[name].num_flops(*shape, **settings)
    assert (flops is None) == detector.has_decomposed
    assert flops is None or flops == pytest.approx(counter.get_total_flops(), rel=1e-6)
