"""An optimizer is one class: it registers its name, declares its settings, and defines its map."""

import pytest
import torch
from soren_align.core import optimizer_settings
from soren_align.core.optimizer_settings import NON_NEGATIVE
from soren_align.optim import OPTIMIZERS, Soren, SpectralOptimizer, build_optimizer
from soren_align.optim.group_settings import number
from soren_align.spectral import SOREN_MAPS, coefficients
from torch import nn


@pytest.fixture
def fifth():
    """An optimizer as a user would add it; its map divides by the norm and a setting."""

    class Fifth(SpectralOptimizer, name="fifth"):
        map_settings = {"divisor": number(NON_NEGATIVE)}  # noqa: RUF012

        def __init__(self, params, lr, *, divisor=2.0, **settings):
            super().__init__(params, lr, divisor=divisor, **settings)

        def map_matrix(self, x, group, context):
            return x / x.norm() / group["divisor"]

    yield Fifth
    del OPTIMIZERS["fifth"]


def model():
    return nn.Sequential(nn.Linear(3, 4, bias=False))


@pytest.mark.parametrize(("settings", "divisor"), [({}, 2.0), ({"divisor": 4.0}, 4.0)])
def test_a_registered_subclass_is_built_by_name_and_steps_by_its_map(fifth, settings, divisor):
    net = model()
    optimizer = build_optimizer(net, name="fifth", lr=0.1, weight_decay=0.0, nesterov=False, **settings)
    assert type(optimizer) is fifth
    before, grad = net[0].weight.detach().clone(), torch.arange(12.0).reshape(4, 3)
    net[0].weight.grad = grad
    optimizer.step()
    assert optimizer.num_maps == 1
    assert torch.allclose(before - net[0].weight, 0.1 / divisor * grad / grad.norm())


def test_its_settings_are_checked_saved_and_compared(fifth):
    with pytest.raises(ValueError, match="Fifth group 0 divisor: found -1; write a finite number, at least 0"):
        build_optimizer(model(), name="fifth", lr=0.1, divisor=-1)
    saved = build_optimizer(model(), name="fifth", lr=0.1).state_dict()
    with pytest.raises(ValueError, match=r"group 0 divisor: 2.0 in the checkpoint, 3.0 in this optimizer"):
        build_optimizer(model(), name="fifth", lr=0.1, divisor=3.0).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"group 0 divisor: 2.0 in the checkpoint, nothing in this optimizer"):
        build_optimizer(model(), name="soren", lr=0.1).load_state_dict(saved)


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("sixth", {}, "name: no optimizer 'sixth'; write one of 'adamw', 'fifth', 'htmuon', 'muon'"),
    ("fifth", {"divisr": 2}, "divisr: is no setting of the optimizer fifth; write one of divisor, momentum, nesterov"),
    ("muon", {"map": "sns"}, "map: is no setting of the optimizer muon; write one of ns_steps, adjust_lr_fn, momentum"),
    ("soren", {"spectral_map": "sns"}, "spectral_map: is no setting of the optimizer soren; .*map, adjust_lr_fn"),
    ("adamw", {"momentum": 0.9}, "momentum: is no setting of the optimizer adamw; write one of betas, eps, weight"),
])  # fmt: skip
def test_unknown_names_and_settings_are_refused_with_the_known_ones(fifth, name, settings, message):
    with pytest.raises(ValueError, match=message):
        build_optimizer(model(), name=name, lr=0.1, **settings)


def test_a_name_has_one_class(fifth):
    with pytest.raises(ValueError, match="Other: Fifth already has the name 'fifth'"):
        type("Other", (SpectralOptimizer,), {}, name="fifth")


def test_a_subclass_may_take_no_arguments():
    class Fixed(Soren):
        def __init__(self):
            super().__init__([torch.nn.Parameter(torch.eye(2))], 0.1)

    assert Fixed().defaults["lr"] == 0.1


def test_every_spelling_of_a_map_is_stored_complete():
    complete = {"minimax": {"resolution": 0.0004}, "sns": {"steps": 15}, "released": {"steps": 5}, "exact": {}}
    complete |= {"identity": {}, "high_pass": {"promotions": 3, "suppressions": 2}, "power": {"p": 0.125}}
    complete |= {name: {"tau": 0.1, "exact": False} for name in ("soft_sign", "tanh", "clip")}
    complete |= {"soren_lambda": {"strength": 0.2, "exact": False}, "file": SOREN_MAPS["file"].defaults}
    assert complete == {name: spectral_map.defaults for name, spectral_map in SOREN_MAPS.items()}
    for name, defaults in complete.items():
        for spelling in (name, {"name": name}, {"name": name, **defaults}):
            (group,) = Soren([nn.Parameter(torch.ones(2, 3))], 0.1, map=spelling).param_groups
            assert group["map"] == {"name": name, **defaults}


def test_the_resolutions_that_can_be_set_are_those_of_the_polynomials():
    assert tuple(coefficients.SIGN) == optimizer_settings.RESOLUTIONS
