"""Every scheduler of torch moves our optimizers' learning rates, and momentum, as it moves torch's own."""

import copy

import pytest
import torch
from tests.support.optimizers import EVERY_OPTIMIZER, assert_same_weights, gradients, groups, small_model
from torch.optim import lr_scheduler as schedulers

SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 3], gamma=0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, total_iters=3),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.5, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5, power=2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CyclicLR, momentum at rest": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=8),
    "OneCycleLR, momentum at rest": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=False),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)], [2]),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=3),
}  # fmt: skip
NUM_STEPS = 6

EVERY_SCHEDULER = pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS.keys())


def advance(scheduler):
    scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))


def moved(group):
    """What a scheduler may move in a group."""
    return {key: group[key] for key in ("lr", "momentum", "betas") if key in group}


def take_steps(model, optimizer, scheduler, steps):
    history = []
    for step in steps:
        gradients(model, step)
        optimizer.step()
        history.append([moved(group) for group in optimizer.param_groups])
        advance(scheduler)
    return history


def reference_history(schedule, optimizer_class, **settings):
    """The same groups under an optimizer of torch."""
    model = small_model()
    of_groups = [{k: v for k, v in group.items() if k != "rule"} for group in groups(model)]
    optimizer = optimizer_class(of_groups, lr=0.05, **settings)
    return take_steps(model, optimizer, schedule(optimizer), range(NUM_STEPS))


@EVERY_OPTIMIZER
@EVERY_SCHEDULER
def test_a_scheduler_moves_what_it_moves_in_torchs_optimizers(make, schedule):
    model = small_model()
    optimizer = make(groups(model))
    matrices_by_adamw = optimizer.rule == "adamw"
    history = take_steps(model, optimizer, schedule(optimizer), range(NUM_STEPS))
    if matrices_by_adamw:
        assert history == reference_history(schedule, torch.optim.AdamW)
    else:
        reference = reference_history(schedule, torch.optim.SGD, momentum=0.95)
        assert [step[0] for step in history] == [step[0] for step in reference]
        assert [step[1]["lr"] for step in history] == [step[1]["lr"] for step in reference]
        assert {step[1]["betas"] for step in history} == {(0.9, 0.999)}  # cycle_momentum leaves them alone

    # The steps were taken with these values.
    by_hand = small_model()
    optimizer = make(groups(by_hand))
    for step, values in enumerate(history):
        for group, value in zip(optimizer.param_groups, values, strict=True):
            group.update(value)
        gradients(by_hand, step)
        optimizer.step()
    assert_same_weights(model, by_hand)


@EVERY_OPTIMIZER
@EVERY_SCHEDULER
def test_a_resumed_schedule_goes_on_as_if_uninterrupted(make, schedule):
    model = small_model()
    optimizer = make(groups(model))
    scheduler = schedule(optimizer)
    take_steps(model, optimizer, scheduler, range(3))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    take_steps(model, optimizer, scheduler, range(3, NUM_STEPS))

    resumed = small_model()
    second = make(groups(resumed))
    rescheduled = schedule(second)
    resumed.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    rescheduled.load_state_dict(saved[2])
    take_steps(resumed, second, rescheduled, range(3, NUM_STEPS))
    assert_same_weights(model, resumed)


@EVERY_OPTIMIZER
def test_a_learning_rate_that_is_a_tensor_is_moved_too(make):
    history, models = [], []
    for lr in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        model = small_model()
        optimizer = make([{"params": [p for p in model.parameters() if p.ndim == 2]}], lr)
        scheduler = schedulers.ExponentialLR(optimizer, 0.5)
        gradients(model, 0)
        optimizer.step()
        scheduler.step()
        history.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        models.append(model)
    assert history == [0.025, 0.025]
    assert all(torch.allclose(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
