"""What torch's own optimizers do in a step, ours do: after the ideas of torch's test_optim.py."""

import copy
import pickle

import pytest
import torch
from soren_align.optim import AdamW, Muon, Soren
from tests.support.optimizers import (
    BFLOAT16_MAPS,
    EVERY_OPTIMIZER,
    OPTIMIZERS,
    assert_same_weights,
    gradients,
    groups,
    small_model,
    trained,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def state_of(optimizer):
    """Copies of everything that a step may change."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy([(p.detach(), optimizer.state.get(p, {})) for p in params]), optimizer.num_maps


def assert_same_state(one, other):
    assert one[1] == other[1]
    for (weights, state), (expected, expected_state) in zip(one[0], other[0], strict=True):
        assert torch.equal(weights, expected)
        assert state.keys() == expected_state.keys()
        assert all(torch.equal(state[key], expected_state[key]) for key in state)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_within_autocast_has_the_bits_of_one_outside(make, dtype):
    plain, _ = trained(make, 2)
    model = small_model()
    with torch.autocast("cpu", dtype):
        trained(make, 2, model)
    assert_same_weights(model, plain)


@EVERY_OPTIMIZER
def test_a_step_has_the_same_bits_in_any_matmul_precision(make):
    def large_enough():  # for oneDNN to multiply it in bfloat16, on a CPU that can
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(48, 64))

    plain, _ = trained(make, 2, large_enough())
    torch.set_float32_matmul_precision("medium")
    try:
        model, _ = trained(make, 2, large_enough())
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert_same_weights(model, plain)


@EVERY_OPTIMIZER
def test_hooks_run_around_a_step(make):
    model = small_model()
    optimizer, calls = make(groups(model)), []
    gradients(model, 0)
    before = model[0].weight.detach().clone()

    def hook(name):
        return lambda o, args, kwargs: calls.append((name, o is optimizer, torch.equal(model[0].weight, before)))

    handles = [
        register_optimizer_step_pre_hook(hook("global pre")), register_optimizer_step_post_hook(hook("global post")),
        optimizer.register_step_pre_hook(hook("pre")), optimizer.register_step_post_hook(hook("post")),
    ]  # fmt: skip
    optimizer.step()
    assert sorted(calls) == sorted(
        [("global pre", True, True), ("pre", True, True), ("post", True, False), ("global post", True, False)]
    )
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(calls) == 4


@EVERY_OPTIMIZER
def test_a_closure_is_called_once_with_gradients_on_also_within_no_grad(make):
    model = small_model()
    optimizer, losses = make(groups(model)), []

    def closure():
        optimizer.zero_grad()
        losses.append(model(torch.ones(4, 6)).square().sum())
        losses[-1].backward()
        return losses[-1]

    with torch.no_grad():
        assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    assert optimizer.step(closure) < losses[0]


@EVERY_OPTIMIZER
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compensation", ["none", "kahan"])
def test_steps_in_any_dtype_follow_those_in_float64(make, dtype, compensation):
    model, optimizer = trained(lambda g: make(g, 0.01, compensation=compensation), 3, small_model(dtype))
    wide = small_model(dtype).double()  # from the same weights, by the same gradients
    second = make(groups(wide), 0.01)
    for step in range(3):
        gradients(model, step)
        for p, q in zip(wide.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.double()
        second.step()
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        assert p.dtype == dtype
        if make not in BFLOAT16_MAPS:
            assert (p - q).abs().max() < {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype]
        momentum = torch.float64 if dtype == torch.float64 else torch.float32
        state = {key: value.dtype for key, value in optimizer.state[p].items()}
        compensated = dtype == torch.bfloat16 and compensation == "kahan"
        assert state.pop("compensation", None) == (torch.int16 if compensated else None)
        assert state.pop("step") == torch.float32
        assert set(state.values()) == {momentum}


@EVERY_OPTIMIZER
def test_steps_are_counted_past_256_under_a_default_dtype_of_bfloat16(make):
    torch.set_default_dtype(torch.bfloat16)
    try:
        p = torch.nn.Parameter(torch.ones(2, 3))
        optimizer = make([p])
        for _ in range(258):
            p.grad = torch.ones(2, 3, dtype=torch.bfloat16)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[p]["step"] == 258


@EVERY_OPTIMIZER
def test_parameters_and_gradients_may_lie_in_memory_as_they_like(make):
    models = []
    for layout in (lambda t: t, lambda t: t.t().contiguous().t(), lambda t: torch.stack([t, t], -1)[..., 0]):
        p = torch.nn.Parameter(layout(small_model(torch.float64)[0].weight.detach()))
        optimizer = make([p])
        for seed in range(2):
            grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            p.grad = layout(grad)
            optimizer.step()
        models.append(p.detach())
    assert all(torch.allclose(p, models[0], rtol=0, atol=1e-13) for p in models[1:])


@EVERY_OPTIMIZER
def test_a_parameter_without_a_gradient_stays_and_zero_grad_clears(make):
    model = small_model()
    optimizer = make(groups(model))
    gradients(model, 0)
    model[0].weight.grad = model[2].bias.grad = None
    before = copy.deepcopy(model)
    optimizer.step()
    assert torch.equal(model[0].weight, before[0].weight)
    assert torch.equal(model[2].bias, before[2].bias)
    assert not torch.equal(model[2].weight, before[2].weight)
    optimizer.zero_grad()
    before = state_of(optimizer)
    optimizer.step()
    assert_same_state(state_of(optimizer), before)
    gradients(model, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.step()


@EVERY_OPTIMIZER
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_matrix_is_left_out(make, shape):
    empty, p = torch.nn.Parameter(torch.ones(shape)), torch.nn.Parameter(torch.ones(4, 5))
    optimizer = make([empty, p], **({} if make is OPTIMIZERS["AdamW"] else {"adjust_lr_fn": "original"}))
    make([empty])
    empty.grad, p.grad = torch.ones(shape), torch.ones(4, 5)
    optimizer.step()
    assert not torch.equal(p, torch.ones(4, 5))
    assert optimizer.num_maps == (optimizer.rule == "spectral")


@EVERY_OPTIMIZER
def test_a_group_that_is_added_is_stepped_by_its_own_settings(make):
    _, optimizer = trained(make, 1)
    added = torch.nn.Parameter(torch.ones(5, 3))
    optimizer.add_param_group({"params": (pair for pair in [("added", added)]), "lr": 0.5, "weight_decay": 0.2})
    added.grad = torch.zeros(5, 3)
    optimizer.step()
    assert torch.allclose(added, torch.full((5, 3), 1 - 0.5 * 0.2))


@EVERY_OPTIMIZER
@pytest.mark.parametrize(("fault", "error", "message"), [
    ({"params": [("x", torch.nn.Parameter(torch.ones(3)))], "rule": "spectral"}, ValueError, "rule|matrices"),
    ({"params": [("x", torch.ones(2, 2, dtype=torch.int64))]}, ValueError, "updates real numbers, but x is torch.int"),
    ({"params": [("x", torch.nn.Parameter(torch.ones(2, 2)))], "lr": -1.0}, ValueError, "lr: found -1.0"),
    ({"params": [("x", torch.nn.Parameter(torch.ones(2, 2)))], "lr": torch.inf}, ValueError, "lr: found inf"),
    ({"params": [("x", torch.nn.Parameter(torch.ones(2, 2)))], "maximize": True}, ValueError, "maximize: is no"),
    ({"params": [("x", "weights")]}, TypeError, "can only optimize Tensors"),
    ({"params": {torch.nn.Parameter(torch.ones(2, 2))}}, TypeError, "ordered collections"),
])  # fmt: skip
def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was(make, fault, error, message):
    model, optimizer = trained(make, 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=message):
        optimizer.add_param_group(fault)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    gradients(model, 1)
    optimizer.step()


@pytest.mark.parametrize("optimizer_class", [Soren, Muon, AdamW])
@pytest.mark.parametrize("option", ["maximize", "differentiable", "foreach", "fused", "capturable", "amsgrad"])
def test_what_is_not_supported_is_refused_by_name(optimizer_class, option):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        optimizer_class(small_model()[0].weight, lr=0.1, **{option: True})


@EVERY_OPTIMIZER
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copied_or_pickled_optimizer_goes_on_alike(make, copied):
    model, optimizer = trained(make, 2)
    optimizer.workspace_mb = None if optimizer.workspace_mb is None else 3
    model2, optimizer2 = copied((model, optimizer))
    for step in (2, 3):
        for m, o in ((model, optimizer), (model2, optimizer2)):
            gradients(m, step)
            o.step()
    assert_same_weights(model, model2)


@EVERY_OPTIMIZER
def test_a_grad_scaler_steps_as_without_and_skips_a_step_whole(make):
    plain, _ = trained(make, 2)
    model = small_model()
    optimizer, scaler = make(groups(model)), torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    for step in range(2):
        gradients(model, step)
        for p in model.parameters():
            p.grad *= scaler.get_scale()  # a power of two
        scaler.step(optimizer)
        scaler.update()
    assert_same_weights(model, plain)

    gradients(model, 2)
    model[2].bias.grad[0] = torch.inf
    before = state_of(optimizer)
    assert scaler.step(optimizer) is None
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert_same_state(state_of(optimizer), before)


@EVERY_OPTIMIZER
@torch._dynamo.config.patch(disable=False)  # in case that the environment says TORCH_COMPILE_DISABLE
def test_a_compiled_step_is_the_same_step_and_counted(make):
    plain, reference = trained(make, 3)
    model = small_model()
    optimizer = make(groups(model))
    step = torch.compile(optimizer.step, backend="eager")
    for seed in range(3):
        gradients(model, seed)
        step()
    assert_same_weights(model, plain)
    assert optimizer.num_maps == reference.num_maps == (6 if optimizer.rule == "spectral" else 0)
