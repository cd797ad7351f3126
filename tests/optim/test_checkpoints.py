"""A checkpoint is resumed exactly, or refused with a reason."""

import copy

import pytest
import torch

from soren_align.optim import AdamW, HTMuon, Muon, Soren

MAKERS = {
    "soren": lambda groups, **kw: Soren(groups, lr=0.1, **kw),
    "soren exact": lambda groups, **kw: Soren(groups, lr=0.1, map="exact", **kw),
    "muon": lambda groups, **kw: Muon(groups, lr=0.1, **kw),
    "htmuon": lambda groups, **kw: HTMuon(groups, lr=0.1, **kw),
}


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)


def groups(net, aux_lr=0.01):
    named = list(net.named_parameters())
    return [{"params": [(n, p) for n, p in named if p.ndim == 2]},
            {"params": [(n, p) for n, p in named if p.ndim != 2], "rule": "adamw", "lr": aux_lr}]  # fmt: skip


def train(net, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(5, 6, generator=generator).to(next(net.parameters()).dtype)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(make, dtype, tmp_path):
    whole = model(dtype)
    optimizer = make(groups(whole))
    train(whole, optimizer, 3, seed=1)
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    train(whole, optimizer, 3, seed=2)

    resumed = model(dtype)
    optimizer = make(groups(resumed))
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert {s.dtype for state in optimizer.state.values() for s in state.values()} == {torch.float32}
    train(resumed, optimizer, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_adamw_alone_is_resumed_too():
    whole = model()
    optimizer = AdamW(whole.named_parameters(), lr=0.1)
    train(whole, optimizer, 2, seed=1)
    resumed = copy.deepcopy(whole)
    second = AdamW(resumed.named_parameters(), lr=0.1)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(whole, optimizer, 2, seed=2)
    train(resumed, second, 2, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_the_state_is_tensors_under_the_names_of_adam():
    net = model()
    optimizer = Soren(groups(net), lr=0.1)
    train(net, optimizer, 1, seed=1)
    kept = [optimizer.state[p].keys() for group in optimizer.param_groups for p in group["params"]]
    assert kept == [{"step", "exp_avg"}] * 2 + [{"step", "exp_avg", "exp_avg_sq"}] * 2


def saved(**settings):
    net = model()
    optimizer = Soren(groups(net), lr=0.1, **settings)
    train(net, optimizer, 1, seed=1)
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(("key", "was", "now"), [
    ("map", {"name": "minimax", "resolution": 0.0004}, {"name": "exact"}),
    ("map", {"name": "minimax", "resolution": 0.0004}, {"name": "minimax", "resolution": 0.01}),
    ("momentum", 0.95, 0.9),
    ("nesterov", True, False),
    ("weight_decay", 0.1, 0.0),
    ("adjust_lr_fn", "none", "original"),
])  # fmt: skip
def test_a_checkpoint_with_another_setting_is_refused(key, was, now):
    optimizer = Soren(groups(model()), lr=0.1, **{key: now})
    with pytest.raises(ValueError, match=f"group 0 {key}: {was} in the checkpoint, {now} in this optimizer"):
        optimizer.load_state_dict(saved())
    assert not optimizer.state


def test_every_setting_that_differs_is_named():
    checkpoint = saved()
    checkpoint["param_groups"][1].update(betas=(0.8, 0.9), eps=1e-6)
    checkpoint["param_groups"][0]["param_names"][1] = "2.other"
    with pytest.raises(ValueError, match="other optimizer settings") as error:
        Soren(groups(model()), lr=0.1, momentum=0.9).load_state_dict(checkpoint)
    assert str(error.value).splitlines()[1:] == [
        "group 0 momentum: 0.95 in the checkpoint, 0.9 in this optimizer",
        "group 0 param_names: 2.other in the checkpoint, 2.weight in this optimizer",
        "group 1 betas: (0.8, 0.9) in the checkpoint, (0.9, 0.999) in this optimizer",
        "group 1 eps: 1e-06 in the checkpoint, 1e-08 in this optimizer",
    ]


def test_a_checkpoint_of_another_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"group 0 map: \{'name': 'minimax', .* in the checkpoint, nothing in this"):
        Muon(groups(model()), lr=0.1).load_state_dict(saved())
    with pytest.raises(ValueError, match="the checkpoint has 2 parameter groups, this optimizer 1"):
        AdamW(model().named_parameters(), lr=0.1).load_state_dict(saved())


def test_learning_rates_come_from_the_checkpoint():
    checkpoint = saved()
    checkpoint["param_groups"][0].update(lr=0.03, initial_lr=0.2)
    optimizer = Soren(groups(model()), lr=0.1)
    optimizer.load_state_dict(checkpoint)
    assert [(g["lr"], g.get("initial_lr")) for g in optimizer.param_groups] == [(0.03, 0.2), (0.01, None)]


def test_betas_that_became_a_list_are_still_the_same():
    checkpoint = saved()
    checkpoint["param_groups"][1]["betas"] = [0.9, 0.999]
    Soren(groups(model()), lr=0.1).load_state_dict(checkpoint)


def test_a_checkpoint_without_a_parameters_momentum_is_refused():
    for broken in ("whole state", "momentum"):
        checkpoint = saved()
        if broken == "whole state":
            del checkpoint["state"][1]
        else:
            del checkpoint["state"][1]["exp_avg"]
        with pytest.raises(ValueError, match=r"the checkpoint lacks .*exp_avg of 2.weight; it cannot be resumed from"):
            Soren(groups(model()), lr=0.1).load_state_dict(checkpoint)


def test_a_momentum_of_another_shape_is_refused():
    checkpoint = saved()
    checkpoint["state"][0]["exp_avg"] = torch.zeros(6, 8)
    with pytest.raises(ValueError, match=r"momentum of shape \(6, 8\) for 0.weight of shape \(8, 6\)"):
        Soren(groups(model()), lr=0.1).load_state_dict(checkpoint)


def test_a_checkpoint_from_before_the_first_step_is_complete():
    Soren(groups(model()), lr=0.1).load_state_dict(Soren(groups(model()), lr=0.1).state_dict())


def test_a_parameter_that_never_had_a_gradient_does_not_break_a_resume():
    net = model()
    optimizer = Soren(groups(net), lr=0.1)
    net[0].weight.grad = torch.ones(8, 6)
    optimizer.step()
    Soren(groups(model()), lr=0.1).load_state_dict(optimizer.state_dict())


def test_a_copied_optimizer_goes_on_alike():
    net = model()
    optimizer = Soren(groups(net), lr=0.1)
    train(net, optimizer, 2, seed=1)
    net2, optimizer2 = copy.deepcopy((net, optimizer))
    train(net, optimizer, 2, seed=2)
    train(net2, optimizer2, 2, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), net2.parameters(), strict=True))
