"""Any Muon becomes Soren by its table of coefficients and one addition, as `spectral.coefficients` says."""

from soren_align.spectral import exact_sigmoid
from soren_align.spectral.coefficients import SIGN, TANH_SLOPE
from soren_align.testing import randn
from torch.optim._muon import _zeropower_via_newtonschulz


def as_in_a_muon(momentum):
    """torch.optim.Muon's function, step by step with other coefficients."""
    update = momentum / momentum.norm()
    for step in SIGN[0.0004].steps:
        norm = update.norm()  # by which the function divides
        a, b, c = (k * norm**power for k, power in zip(step, (1, 3, 5), strict=True))
        update = _zeropower_via_newtonschulz(update, (float(a), float(b), float(c)), 1, 1e-7).to(momentum.dtype)
    return update / 2 + TANH_SLOPE * momentum


def test_torchs_muon_with_the_table_is_soren():
    x = randn(48, 80).float()
    x /= x.norm()
    exact, muon = exact_sigmoid(x), _zeropower_via_newtonschulz(x.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    distance = (as_in_a_muon(x) - exact).norm() / exact.norm()
    assert distance < 0.03  # in bfloat16, as torch iterates
    assert (muon / 2 - exact).norm() / exact.norm() > 0.1
