"""Powers without a decomposition: their proved error, spectra of all kinds against float64, and their records."""

import numpy as np
import pytest
import torch
from research.recorded import recorded_spectra
from research.studies import powers as study
from soren_align.optim import HTMuon, Soren
from soren_align.planning.flops import Meter
from soren_align.spectral import MAPS, powers, rational_power, spectral_power
from soren_align.spectral.composition import TOP
from soren_align.spectral.powers import POWERS, RESOLUTION
from soren_align.testing import randn
from tests.support.spectra import matrix_of
from torch.utils.flop_counter import FlopCounterMode

EVERY_POWER = pytest.mark.parametrize("p", POWERS)
ROUNDING = 1e-3  # of float32, mostly of the null space of a matrix in it: 5e-4 was the most of all spectra here
INDEX = torch.arange(1, 321, dtype=torch.float64)
SPECTRA = {
    "flat": INDEX**0, "1/i": 1 / INDEX, "1/sqrt(i)": INDEX**-0.5, "rank m/8": (INDEX <= 40).double(),
    "rank 1": (INDEX <= 1).double(),
}  # fmt: skip
RECORDED = [s for s in recorded_spectra() if (s.set, s.step) in (("smollm2", 12), ("quickstart", 600))][::7]


def value(poles, squares):
    return poles.constant + sum(w / (squares + t) for w, t in zip(poles.weights, poles.shifts, strict=True))


def largest_error(p, sigma, shape, batched=False):
    """Of the output along the singular vectors, for sigma above the resolution, relative to sigma^p."""
    x, u, v = matrix_of(sigma, shape)
    x = x.float()
    output = rational_power(torch.stack([torch.zeros_like(x), x]), p)[1] if batched else rational_power(x, p)
    gain = torch.einsum("mi,mn,ni->i", u, output.double(), v)
    accurate = sigma > RESOLUTION * sigma.pow(4).sum() ** 0.25
    return float((gain / sigma**p - 1)[accurate].abs().max())


@EVERY_POWER
def test_the_error_of_the_poles_is_proved(p):
    # In s = log(lambda) the slope of g = lambda^a r(lambda) lies between -g and g, because lambda / (lambda + t) lies
    # between 0 and 1, and a < 1. So between two points g moves by less than half of their distance times 1.02.
    logs, distance = np.linspace(2 * np.log(RESOLUTION), 2 * np.log(TOP), 200_001, retstep=True)
    error = np.abs(np.exp(logs * (1 - p) / 2) * value(POWERS[p], np.exp(logs)) - 1).max()
    assert error + 0.51 * distance <= POWERS[p].error < 0.015


def test_the_table_is_the_scripts():
    computed, shipped = study.fit(0.5, study.NUM_POLES), POWERS[0.5]
    assert computed.error == pytest.approx(shipped.error, rel=0.05)
    assert np.allclose(np.log(computed.shifts), np.log(shipped.shifts), atol=0.3)


@EVERY_POWER
def test_the_output_never_falls(p):
    squares = np.logspace(-20, 0, 2001)
    assert (np.diff(np.sqrt(squares) * value(POWERS[p], squares)) > 0).all()
    assert min(*POWERS[p].shifts, *POWERS[p].weights, POWERS[p].constant) > 0


@EVERY_POWER
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("shape", [(320, 320), (320, 400), (400, 320)], ids=str)
def test_the_error_on_known_spectra_is_the_stated_one(p, name, shape):
    sigma = SPECTRA[name]
    assert largest_error(p, sigma, shape) <= POWERS[p].error + ROUNDING
    x, u, v = matrix_of(sigma, shape)
    exact = (u * sigma**p) @ v.mT
    assert (rational_power(x.float(), p).double() - exact).norm() <= (POWERS[p].error + ROUNDING) * exact.norm()


@EVERY_POWER
@pytest.mark.parametrize("spectrum", RECORDED, ids=lambda s: f"{s.set} {s.name}")
def test_the_error_on_recorded_spectra_is_the_stated_one(p, spectrum):
    assert largest_error(p, spectrum.sigma, spectrum.shape) <= POWERS[p].error + ROUNDING


def test_a_matrix_has_the_same_output_in_a_batch():
    assert largest_error(0.125, SPECTRA["1/i"], (320, 400), batched=True) <= POWERS[0.125].error + ROUNDING
    x = torch.stack([matrix_of(SPECTRA[name], (400, 320))[0].float() for name in SPECTRA])
    alone = torch.stack([rational_power(matrix, 0.25) for matrix in x])
    assert (rational_power(x, 0.25) - alone).norm() <= 1e-5 * alone.norm()


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
def test_the_scale_of_a_matrix_is_raised_to_the_power_too(scale):
    x = matrix_of(SPECTRA["1/i"], (320, 320))[0].float() / 2
    expected = rational_power(x, 0.25) * scale**0.25
    assert (rational_power(x * scale, 0.25) - expected).norm() <= 1e-4 * expected.norm()


def test_the_null_space_gets_next_to_nothing():
    x, u, _ = matrix_of(SPECTRA["rank m/8"], (320, 320))
    output = rational_power(x.float(), 0.125).double()
    null = output - (u[:, :40] @ u[:, :40].mT) @ output
    assert null.norm() < 2e-3 * 40**0.5
    assert (rational_power(torch.zeros(300, 310), 0.125) == 0).all()


def test_it_stands_in_for_the_decomposition_from_its_rows_on(monkeypatch):
    x = randn(300, 320, dtype=torch.float32)
    assert powers.FROM_ROWS == 1024
    assert torch.equal(powers.power(x, 0.125), spectral_power(x, 0.125))
    monkeypatch.setattr(powers, "FROM_ROWS", 300)
    assert torch.equal(powers.power(x, 0.125), rational_power(x, 0.125))
    assert torch.equal(powers.power(x, 0.3), spectral_power(x, 0.3))
    assert torch.equal(powers.power(x[:299], 0.125), spectral_power(x[:299], 0.125))
    with pytest.raises(ValueError, match=r"p: found 0.3; write one of 0.5, 0.25, 0.125, or use spectral_power"):
        rational_power(x, 0.3)


def test_htmuon_and_soren_take_the_same_step(monkeypatch):
    monkeypatch.setattr(powers, "FROM_ROWS", 260)
    grad, steps = randn(260, 270, dtype=torch.float32) / 300, []
    power = {"name": "power", "p": 0.25}
    for make in (lambda w: HTMuon([w], 0.1, p=0.25, adjust_lr_fn="none"),
                 lambda w: Soren([w], 0.1, map=power, adjust_lr_fn="none")):  # fmt: skip
        weight = torch.nn.Parameter(torch.zeros(260, 270))
        weight.grad = grad.clone()
        make(weight).step()
        steps.append(weight.detach())
    assert torch.equal(*steps)
    nesterov = grad * (0.95 * 0.05 + 0.05)
    assert (steps[0] + 0.1 * rational_power(nesterov, 0.25)).norm() <= 1e-4 * steps[0].norm()


@pytest.mark.parametrize("name", ["htmuon", "power"])
def test_the_record_counts_its_operations_and_memory(monkeypatch, name):
    monkeypatch.setattr(powers, "FROM_ROWS", 512)
    x = randn(512, 700, dtype=torch.float32) / 1000
    assert MAPS[name].num_flops(500, 700) is MAPS[name].num_flops(512, 700, p=0.3) is None
    with FlopCounterMode(display=False) as counter, Meter() as meter:
        MAPS[name].function(x, p=0.125, precision="float32", max_norm=1.0)
    of_leaves = 5 * 2 * powers.LEAF**3  # five inverses; torch counts no Cholesky factor
    assert MAPS[name].num_flops(512, 700) == counter.get_total_flops() + of_leaves
    assert meter.peak <= 4 * MAPS[name].num_workspace_numbers(512, 700)
