"""State dicts are saved and loaded as torch's: its hooks, its order, its freedom of names and keys.

A checkpoint is resumed exactly, or refused with a reason.
"""

import copy

import pytest
import torch
from soren_align.optim import AdamW, Muon, Soren
from soren_align.spectral import SOREN_MAPS
from tests.support.optimizers import (
    EVERY_OPTIMIZER,
    OPTIMIZERS,
    assert_same_weights,
    gradients,
    groups,
    small_model,
    trained,
)
from torch import nn


def resumable(make):
    """An optimizer's state dict after two steps, its model after a third, and a new pair with the weights after two."""
    expected, optimizer = trained(make, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    model, second = fresh(make, expected.state_dict())
    gradients(expected, 2)
    optimizer.step()
    return saved, expected, model, second


def assert_resumes(optimizer, model, expected):
    gradients(model, 2)
    optimizer.step()
    assert_same_weights(model, expected)


def fresh(make, weights, named=True):
    model = small_model()
    model.load_state_dict(weights)
    return model, make(groups(model, named))


@EVERY_OPTIMIZER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_resumed_from_a_file_has_the_weights_of_an_uninterrupted_one(make, dtype, tmp_path):
    whole, optimizer = trained(make, 3, small_model(dtype))
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed = small_model(dtype)
    resumed.load_state_dict(checkpoint["model"])
    second = make(groups(resumed))
    second.load_state_dict(checkpoint["optimizer"])
    assert {s.dtype for state in second.state.values() for s in state.values()} == {torch.float32}
    for step in range(3, 6):
        for m, o in ((whole, optimizer), (resumed, second)):
            gradients(m, step)
            o.step()
    assert_same_weights(whole, resumed)


def test_the_state_is_tensors_under_the_names_of_adam():
    _, optimizer = trained(OPTIMIZERS["Soren minimax"], 1)
    kept = [optimizer.state[p].keys() for group in optimizer.param_groups for p in group["params"]]
    assert kept == [{"step", "exp_avg"}] * 2 + [{"step", "exp_avg", "exp_avg_sq"}] * 2


@EVERY_OPTIMIZER
@pytest.mark.parametrize("number", [float, int, lambda step: step.double(), lambda step: step.bfloat16()[None]])
def test_a_step_count_of_another_kind_is_converted(make, number):
    saved, expected, model, optimizer = resumable(make)
    for state in saved["state"].values():
        state["step"] = number(state["step"])
    optimizer.load_state_dict(saved)
    for state in optimizer.state.values():
        assert (state["step"].dtype, state["step"].shape) == (torch.float32, ())
    assert_resumes(optimizer, model, expected)


def broken(key, value):
    def damage(checkpoint):
        checkpoint["state"][2][key] = value

    return damage


@EVERY_OPTIMIZER
@pytest.mark.parametrize(("damage", "message"), [
    (broken("exp_avg_sq", torch.zeros(5)), r"a exp_avg_sq of shape \(5,\) for 0.bias of shape \(8,\)"),
    (broken("exp_avg", torch.zeros(5)), r"a momentum of shape \(5,\) for 0.bias of shape \(8,\)"),
    (broken("exp_avg", [0.0] * 8), "a momentum of type list for 0.bias"),
    (broken("step", torch.ones(2)), "no valid step count for 0.bias"),
    (broken("step", "two"), "no valid step count for 0.bias"),
    (lambda c: c["state"].pop(3), "has no step, exp_avg, exp_avg_sq of 2.bias"),
    (lambda c: c["state"][1].pop("exp_avg"), "has no exp_avg of 2.weight; resume from another checkpoint"),
    (lambda c: c["state"][0].update(exp_avg=torch.zeros(6, 8)), r"a momentum of shape \(6, 8\) for 0.weight of shape"),
    (lambda c: c["param_groups"][1].update(eps=1e-3), "group 1 eps: 0.001 in the checkpoint"),
    (lambda c: c["param_groups"].pop(), "has 1 parameter groups"),
])  # fmt: skip
def test_a_checkpoint_that_is_refused_leaves_the_optimizer_as_it_was(make, damage, message):
    saved, *_ = resumable(make)
    damage(saved)
    model, optimizer = trained(make, 1)
    reference, _ = trained(make, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    gradients(model, 1)
    optimizer.step()
    assert_same_weights(model, reference)


@EVERY_OPTIMIZER
def test_what_is_loaded_is_a_copy(make):
    saved, expected, model, optimizer = resumable(make)
    optimizer.load_state_dict(saved)
    for state in saved["state"].values():
        for tensor in state.values():
            tensor.fill_(torch.nan)
    saved["param_groups"][0]["lr"] = 7.0
    assert_resumes(optimizer, model, expected)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("was_named", [True, False])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_checkpoint_with_names_is_loaded_without_and_the_other_way_round(make, was_named, is_named):
    model = small_model()
    first = make(groups(model, was_named))
    gradients(model, 0)
    first.step()
    resumed, second = fresh(make, model.state_dict(), is_named)
    second.load_state_dict(first.state_dict())
    for m, o in ((model, first), (resumed, second)):
        gradients(m, 1)
        o.step()
    name = first.param_groups[0].get("map", {}).get("name")
    if was_named == is_named or not SOREN_MAPS.get(name, SOREN_MAPS["minimax"]).is_drawn:  # a draw is that of a name
        assert_same_weights(resumed, model)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("wrapped", [
    lambda name: f"_orig_mod.{name}",
    lambda name: f"_fsdp_wrapped_module.{name}",
    lambda name: name.replace(".", "._orig_mod.", 1),  # a compiled block
])  # fmt: skip
def test_the_names_of_a_wrapped_model_are_the_same_names(make, wrapped):
    saved, expected, model, optimizer = resumable(make)
    for group in saved["param_groups"]:
        group["param_names"] = [wrapped(name) for name in group["param_names"]]
    optimizer.load_state_dict(saved)
    assert_resumes(optimizer, model, expected)


@EVERY_OPTIMIZER
def test_keys_that_are_no_settings_are_kept_and_not_compared(make):
    saved, expected, model, optimizer = resumable(make)
    saved["param_groups"][0].update(name="matrices", max_lr=0.3, swa_lr=0.1, anything=[1])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["anything"] == [1]
    assert_resumes(optimizer, model, expected)


@EVERY_OPTIMIZER
def test_a_checkpoint_between_a_new_group_and_the_next_step_is_loaded(make):
    def with_new_group(optimizer):
        torch.manual_seed(1)
        model = nn.Linear(4, 5, bias=False)
        optimizer.add_param_group({"params": [("new", model.weight)]})
        return model

    model, optimizer = trained(make, 1)
    new = with_new_group(optimizer)
    resumed, second = fresh(make, model.state_dict())
    new_resumed = with_new_group(second)
    second.load_state_dict(optimizer.state_dict())
    for m, n, o in ((model, new, optimizer), (resumed, new_resumed, second)):
        gradients(m, 1)
        gradients(n, 2)
        o.step()
    assert_same_weights(resumed, model)
    assert_same_weights(new_resumed, new)


def test_adamws_checkpoint_is_that_of_torch_but_for_the_settings():
    ours, optimizer = trained(lambda g: AdamW(g, lr=0.05), 2)
    theirs = small_model()
    # fused: the kernel that ours calls; others round otherwise on some machines.
    settings = {"lr": 0.05, "fused": True}
    reference = torch.optim.AdamW([{k: v for k, v in g.items() if k != "rule"} for g in groups(theirs)], **settings)
    for step in range(2):
        gradients(theirs, step)
        reference.step()
    state = optimizer.state_dict()["state"]
    for number, expected in reference.state_dict()["state"].items():
        assert state[number].keys() == expected.keys()
        assert all(torch.equal(state[number][key], expected[key]) for key in expected)
    assert_same_weights(ours, theirs)
    with pytest.raises(ValueError, match="was not written by soren-align"):
        optimizer.load_state_dict(reference.state_dict())


def test_a_momentum_lies_as_its_weight_does():
    """torch's fused kernels refuse tensors of different strides."""
    p = torch.nn.Parameter(torch.randn(4, 3))
    p.grad = torch.randn(4, 3)
    optimizer = AdamW([p], lr=0.1)
    optimizer.step()
    saved = optimizer.state_dict()
    for key in ("exp_avg", "exp_avg_sq"):
        saved["state"][0][key] = saved["state"][0][key].t().contiguous().t()
    optimizer.load_state_dict(saved)
    for key in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[p][key].stride() == p.stride()
        assert torch.equal(optimizer.state[p][key], saved["state"][0][key])


def fresh_soren(**settings):
    return Soren(groups(small_model()), **{"lr": 0.1, **settings})


def saved_soren():
    return trained(lambda g: Soren(g, lr=0.1), 1)[1].state_dict()


@pytest.mark.parametrize(("key", "was", "now"), [
    ("map", {"name": "minimax", "resolution": 0.0004}, {"name": "exact"}),
    ("map", {"name": "minimax", "resolution": 0.0004}, {"name": "minimax", "resolution": 0.01}),
    ("momentum", 0.95, 0.9), ("nesterov", True, False), ("weight_decay", 0.1, 0.0),
    ("adjust_lr_fn", "none", "original"),
])  # fmt: skip
def test_a_checkpoint_with_another_setting_is_refused(key, was, now):
    optimizer = fresh_soren(**{key: now})
    with pytest.raises(ValueError, match=f"group 0 {key}: {was} in the checkpoint, {now} in this optimizer"):
        optimizer.load_state_dict(saved_soren())
    assert not optimizer.state


def test_every_setting_that_differs_is_named():
    checkpoint = saved_soren()
    checkpoint["param_groups"][1].update(betas=(0.8, 0.9), eps=1e-6)
    checkpoint["param_groups"][0]["param_names"][1] = "2.other"
    with pytest.raises(ValueError, match="other optimizer settings") as error:
        fresh_soren(momentum=0.9).load_state_dict(checkpoint)
    assert str(error.value).splitlines()[1:] == [
        "group 0 momentum: 0.95 in the checkpoint, 0.9 in this optimizer",
        "group 0 param_names: 2.other in the checkpoint, 2.weight in this optimizer",
        "group 1 betas: (0.8, 0.9) in the checkpoint, (0.9, 0.999) in this optimizer",
        "group 1 eps: 1e-06 in the checkpoint, 1e-08 in this optimizer",
    ]


def test_a_checkpoint_of_another_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"group 0 map: \{'name': 'minimax', .* in the checkpoint, nothing in this"):
        Muon(groups(small_model()), lr=0.1).load_state_dict(saved_soren())
    with pytest.raises(ValueError, match="the checkpoint has 2 parameter groups, but this optimizer has 1"):
        AdamW(small_model().named_parameters(), lr=0.1).load_state_dict(saved_soren())


def test_learning_rates_and_betas_that_became_a_list_come_from_the_checkpoint():
    checkpoint = saved_soren()
    checkpoint["param_groups"][0].update(lr=0.03, initial_lr=0.2)
    checkpoint["param_groups"][1]["betas"] = [0.9, 0.999]
    optimizer = fresh_soren()
    optimizer.load_state_dict(checkpoint)
    assert [(g["lr"], g.get("initial_lr")) for g in optimizer.param_groups] == [(0.03, 0.2), (0.01, None)]


def test_a_checkpoint_from_before_a_parameters_first_step_is_complete():
    fresh_soren().load_state_dict(fresh_soren().state_dict())
    model = small_model()
    optimizer = Soren(groups(model), lr=0.1)
    model[0].weight.grad = torch.ones(8, 6)
    optimizer.step()
    fresh_soren().load_state_dict(optimizer.state_dict())
