"""Weight decay towards the weights before the first step; test_reference and test_parity compare whole steps."""

import copy

import pytest
import torch
from soren_align.core.errors import UserError
from soren_align.optim import AdamW, Muon, Soren, build_optimizer
from soren_align.planning.memory import ModelSizes, Rank
from soren_align.recipe import OPTIMIZER_SECTIONS, Parallel, load
from tests.support.toy import Toy
from torch import nn

LR, DECAY = 0.01, 20.0
TO_START = {"weight_decay": DECAY, "weight_decay_to": "start"}
SHAPES = {"w": (6, 9), "v": (8, 3)}


def parameters_of(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def step(optimizer, parameters, number):
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


@pytest.mark.parametrize("make", [AdamW, Muon, Soren])
def test_a_step_is_one_without_decay_from_weights_nearer_to_the_start(make):
    scale = {} if make is AdamW else {"adjust_lr_fn": "original"}
    parameters, others = parameters_of(), parameters_of()
    optimizer = make(parameters.items(), LR, **scale, **TO_START)
    plain = make(others.items(), LR, weight_decay=0.0, **scale)
    observed = {}
    optimizer.update_observers = frozenset({lambda u: observed.update({u.name: [a for _, a, _ in u.applied()]})})
    for number in range(4):
        step(optimizer, parameters, number)
        with torch.no_grad():
            for name, start in parameters_of().items():
                others[name].sub_(LR * DECAY * (others[name] - start))
        step(plain, others, number)
    for name, start in parameters_of().items():
        torch.testing.assert_close(parameters[name], others[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.cat(observed[name]), parameters[name].detach(), rtol=1e-5, atol=1e-6)
        assert (parameters[name] - start).norm() > 0.01


def test_bfloat16_weights_with_a_compensation_take_the_steps_of_float32():
    # rounded to bfloat16 first, so that both have one start
    narrow = parameters_of(torch.bfloat16)
    wide = {name: nn.Parameter(parameter.detach().float()) for name, parameter in narrow.items()}
    settings = {"adjust_lr_fn": "original", **TO_START}
    optimizers = [Muon(narrow.items(), LR, compensation="kahan", **settings), Muon(wide.items(), LR, **settings)]
    for number in range(4):
        step(optimizers[0], narrow, number)
        for name, parameter in wide.items():
            parameter.grad = narrow[name].grad.float()
        optimizers[1].step()
    for name, parameter in narrow.items():
        state = optimizers[0].state[parameter]
        assert state["start"].dtype == torch.bfloat16
        assert (parameter.float() - wide[name]).abs().max() <= wide[name].abs().max() * 2**-8


@pytest.mark.parametrize("make", [AdamW, Soren])
def test_a_resumed_run_decays_to_the_first_start(make):
    scale = {} if make is AdamW else {"adjust_lr_fn": "original"}
    parameters = parameters_of()
    optimizer = make(parameters.items(), LR, **scale, **TO_START)
    for number in range(2):
        step(optimizer, parameters, number)
    resumed = copy.deepcopy(parameters)
    again = make(resumed.items(), LR, **scale, **TO_START)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own, weights in ((optimizer, parameters), (again, resumed)):
        step(own, weights, 2)
    for name, start in parameters_of().items():
        assert torch.equal(parameters[name], resumed[name])
        assert torch.equal(again.state[resumed[name]]["start"], start)


def test_a_checkpoint_without_the_starting_weights_is_refused():
    parameters = parameters_of()
    optimizer = Muon(parameters.items(), LR, weight_decay=DECAY)
    step(optimizer, parameters, 0)
    with pytest.raises(ValueError, match="weight_decay_to: zero in the checkpoint, start in this optimizer"):
        Muon(parameters.items(), LR, **TO_START).load_state_dict(optimizer.state_dict())


def test_only_groups_with_decay_keep_a_copy():
    model = Toy(40)
    settings = {"adjust_lr_fn": "original", **TO_START}
    optimizer = build_optimizer(model, name="soren", lr=LR, **settings)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    copies = [["start" in optimizer.state[p] for p in group["params"]] for group in optimizer.param_groups]
    assert [{*copy} for copy in copies] == [{True}, {False}]  # matrices, others: their decay is 0


@pytest.mark.parametrize(("overrides", "message"), [
    (("model.lora={r: 4}",), "not possible with a new adapter, whose product starts at zero; remove this key"),
    (("optimizer.weight_decay=0",), "has no effect without weight decay; write weight_decay, or remove this key"),
])  # fmt: skip
def test_where_it_has_no_use_a_recipe_is_refused(overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        load("quickstart/sft", overrides=["optimizer.weight_decay_to=start", *overrides])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["soren", "adamw"])
@pytest.mark.parametrize(("kind", "num_ranks"), [("ddp", 2), ("zero", 2)])
def test_the_plan_counts_the_copies(name, kind, num_ranks):
    mode = Parallel(kind, config={"zero_optimization": {"stage": 3}} if kind == "zero" else {})

    def num_bytes(**settings):
        section = OPTIMIZER_SECTIONS[name].model_validate({"name": name, "lr": 0.1, **settings})
        rank = Rank(ModelSizes(SHAPES, 10, weight_bytes=2), mode, num_ranks, section)
        return rank.optimizer_states("", "device").num_bytes

    numel, itemsize, share = 6 * 9 + 8 * 3, *((2, 1) if kind == "ddp" else (4, 2))
    plain, matrices = num_bytes(), num_bytes(weight_decay_to="start")
    both = num_bytes(weight_decay_to="start", aux_weight_decay=0.1)
    assert [matrices - plain, both - matrices] == [numel * itemsize // share, 10 * itemsize // share]
