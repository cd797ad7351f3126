"""The optimizers take the steps of optim/reference.py, which is plain torch with singular value decompositions."""

import inspect

import pytest
import torch
from soren_align.optim import HTMuon, Muon, Soren
from soren_align.optim.reference import MAPS, ReferenceOptimizer, map_singular_values
from soren_align.spectral import exact_sigmoid, spectral_power
from torch import nn

SHAPES = ((6, 9), (9, 6), (8, 20), (24, 10))  # none is square: random square ones have a singular value near zero
# Of the map alone: the exact one differs by float32's rounding, the default by its 0.5%, sns by 4.4%. Muon's iteration
# stops at singular values from 0.7 to 1.2 and computes in bfloat16, so that its output is 30% off the polar factor.
OPTIMIZERS = {
    "exact": ("soren", lambda groups, **kw: Soren(groups, map="exact", **kw), 1e-6),
    "minimax": ("soren", lambda groups, **kw: Soren(groups, map="minimax", **kw), 0.005),
    "sns": ("soren", lambda groups, **kw: Soren(groups, map="sns", **kw), 0.05),
    "muon": ("muon", Muon, 0.3),
    "htmuon": ("htmuon", HTMuon, 1e-6),
}


def trained(make, num_steps=4):
    """The parameters after steps with given gradients of full rank, of norms like clipped ones."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape) / 5) for shape in (*SHAPES, (7,))]
    optimizer = make(parameters[:-1], parameters[-1:])
    generator = torch.Generator().manual_seed(1)
    start = [parameter.detach().clone() for parameter in parameters]
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) / 20
        optimizer.step()
    return [parameter.detach() for parameter in parameters], start


@pytest.mark.parametrize("decay", [("zero", 0.1), ("start", 8.0)], ids=["zero", "start"])
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_the_steps_are_those_of_the_reference(case, nesterov, measured, decay):
    name, make, tolerance = OPTIMIZERS[case]
    rate = {"lr": 0.05, "weight_decay_to": decay[0], "weight_decay": decay[1], "nesterov": nesterov}
    scale = {"adjust_lr_fn": "match_rms_measured" if measured else "none"}

    def fast(matrices, others):
        group = {"params": others, "rule": "adamw", "lr": 1e-3, "weight_decay": 0.0}
        return make([{"params": matrices}, group], **rate, **scale)

    actual, start = trained(fast)
    rms = 0.2 if measured else None
    expected, _ = trained(lambda matrices, others: ReferenceOptimizer(name, matrices, others, rms=rms, **rate))
    for weight, wanted, before in zip(actual, expected, start, strict=True):
        # errors of four steps may add, where their updates, of independent gradients, add as their squares
        assert (weight - wanted).norm() <= 2 * tolerance * (wanted - before).norm() + 1e-6


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
@pytest.mark.parametrize(
    ("name", "function"), [("soren", exact_sigmoid), ("htmuon", lambda x: spectral_power(x, 0.125))]
)
def test_a_null_space_stays_zero_as_in_the_exact_maps(name, function, shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape[0], 2, generator=generator) @ torch.randn(2, shape[1], generator=generator)
    torch.testing.assert_close(map_singular_values(x, MAPS[name]), function(x), rtol=1e-5, atol=1e-6)


def test_the_reference_is_short_and_imports_nothing_of_ours():
    source = inspect.getsource(inspect.getmodule(ReferenceOptimizer))
    assert len(source.splitlines()) <= 85
    assert "from ." not in source
