"""LoRA factors that are updated as their product: the update does not depend on which factors the product has."""

import io
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from soren_align.optim import HTMuon, Muon, Soren, build_optimizer, param_groups, route
from soren_align.optim.layout import Batch
from soren_align.optim.product import WEIGHTS, num_flops, product_directions
from tests.support.tiny_models import tiny_llama
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

M, N, R = 24, 36, 4
NAMES = {"A": "lora_A.weight", "B": "lora_B.weight"}
LAYOUTS = {"lora_A.weight": f"lora_A {M}", "lora_B.weight": f"lora_B {N}"}
LR, DECAY, MOMENTUM = 0.5, 0.1, 0.9
MEASURED = {"adjust_lr_fn": "match_rms_measured"}
MAPS = ("minimax", "exact", "sns", "released", "identity", "tanh", "high_pass")
SETTINGS = [{"map": name} for name in MAPS]
SETTINGS += [{"optimizer_class": HTMuon, "p": 0.5}, {"map": "exact", "nesterov": False}]


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def start(is_zero=False):
    """A [R, N] and B [M, R]."""
    return normal(3, R, N) / 2, normal(4, M, R) / 2 * (not is_zero)


def changes_of_factors():
    """Q [R, R] of condition 10, and one that only exchanges the scales of A and B."""
    left, right = (torch.linalg.qr(normal(seed, R, R))[0] for seed in (1, 2))
    return {"condition 10": left @ torch.diag(torch.linspace(1, 10, R).double()) @ right, "scale": 30 * torch.eye(R)}


def loss_of(product, step):
    """A loss that is not linear in the product."""
    wanted = normal(30 + step, M, 20).to(product)
    return (torch.tanh(product @ normal(10 + step, N, 20).to(product)) - wanted).square().mean()


def train(a, b, optimizer_class=Soren, num_steps=3, lr=LR, is_product=True, **settings):
    """The optimizer, and the factors after some steps."""
    factors = {"A": nn.Parameter(a.clone()), "B": nn.Parameter(b.clone())}
    group = {"params": [(NAMES[key], factors[key]) for key in factors]}
    layouts = {"weight_layouts": LAYOUTS} if is_product else {}
    defaults = {"weight_decay": DECAY, "momentum": MOMENTUM, **MEASURED}
    optimizer = optimizer_class([{**group, **layouts}], lr=lr, **{**defaults, **settings})
    for step in range(num_steps):
        loss_of(factors["B"] @ factors["A"], step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, factors["A"].detach(), factors["B"].detach()


def gauge_difference(dtype, change, **settings):
    """How much the product's change depends on its factors, relative to that change."""
    (a, b), q, updates = start(), changes_of_factors()[change].double(), []
    for first, second in ((a, b), (q @ a, b @ q.inverse())):
        first, second = first.to(dtype), second.to(dtype)
        _, new_a, new_b = train(first, second, **settings)
        updates.append(new_b.double() @ new_a.double() - second.double() @ first.double())
    return float((updates[0] - updates[1]).norm() / updates[0].norm())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("change", changes_of_factors())
def test_the_product_moves_alike_whatever_its_factors_are(settings, change):
    """In float64, of three steps with momentum and decay, after which the momenta are those of other factors too."""
    assert gauge_difference(torch.float64, change, **settings) <= 1e-9


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_measured", "match_rms_adamw", "original", "none"])
def test_float32_factors_move_the_product_alike_within_1e_5(settings, adjust_lr_fn):
    """In one step: a change of condition 10 enlarges the rounding of the factors by 10, and minimax that of small
    singular values."""
    settings = {**settings, "adjust_lr_fn": adjust_lr_fn}
    assert gauge_difference(torch.float32, "condition 10", num_steps=1, **settings) <= 1e-5


@pytest.mark.parametrize("change", changes_of_factors())
def test_a_map_of_each_factor_moves_the_product_elsewhere(change):
    """Else the tests above would show nothing."""
    assert gauge_difference(torch.float64, change, map="exact", is_product=False) > 0.1


def sigmoid_of(x):
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return u @ torch.diag(torch.where(s > 1e-12, s.sigmoid(), 0.0)) @ v


def plain_loop(a, b, num_steps, lr):
    """The steps by matrices [m, n]: bases of the product by SVD, and the gradient of the product in them."""
    momenta = [torch.zeros_like(a), torch.zeros_like(b)]
    for step in range(num_steps):
        product = (b @ a).requires_grad_()
        loss_of(product, step).backward()
        inputs = []
        for momentum, grad in zip(momenta, (b.T @ product.grad, product.grad @ a.T), strict=True):
            momentum.mul_(MOMENTUM).add_(grad, alpha=1 - MOMENTUM)
            inputs.append(MOMENTUM * momentum + (1 - MOMENTUM) * grad)
        (left, tall, _), (_, _, right) = (torch.linalg.svd(x, full_matrices=False) for x in (b, a))
        l_inverse, m_inverse = torch.linalg.pinv(a @ right.T), torch.linalg.pinv(left.T @ b)
        left = left * (tall > 1e-12)
        y_b = sigmoid_of(inputs[1] @ l_inverse.T)
        y_a = sigmoid_of(m_inverse.T @ inputs[0])
        p = left.T @ b @ a @ right.T
        damping = (0.2 * lr) ** 2 * M * N / R  # an update of B alone has this norm over sqrt(R)
        d = p @ p.T @ torch.linalg.inv(p @ p.T + damping * torch.eye(R))
        update = y_b @ right + left @ d @ y_a
        scale = 0.2 * lr / update.square().mean().sqrt()
        keep = 1 - lr * DECAY / 2
        a, b = keep * a - scale * m_inverse @ d @ y_a, keep * b - scale * y_b @ l_inverse
    return a, b


@pytest.mark.parametrize("is_zero", [False, True], ids=["B", "B = 0"])
def test_the_steps_are_those_of_a_plain_loop(is_zero):
    a, b = start(is_zero)
    expected = plain_loop(a, b, 5, LR / 10)
    _, new_a, new_b = train(a, b, num_steps=5, lr=LR / 10, map="exact")
    # `exact` decomposes Gram matrices, which squares the condition of the momenta
    torch.testing.assert_close((new_a, new_b), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("is_zero", [False, True], ids=["B", "B = 0"])
@pytest.mark.parametrize("optimizer_class", [Soren, HTMuon, Muon])
def test_the_update_of_the_product_has_the_stated_rms(is_zero, optimizer_class):
    """To first order in the rate; float64's rounding of a change of 1e-6 is 1e-10 of it."""
    (a, b), lr = start(is_zero), 1e-6
    _, new_a, new_b = train(a, b, optimizer_class, 1, lr, weight_decay=0.0)
    assert (new_b @ new_a - b @ a).square().mean().sqrt() == pytest.approx(0.2 * lr, rel=1e-4)
    assert not is_zero or torch.equal(new_a, a)


def test_the_product_decays_by_the_weight_decay():
    a, b = start()
    factors = {key: nn.Parameter(x.clone()) for key, x in (("A", a), ("B", b))}
    group = {"params": [(NAMES[key], factors[key]) for key in factors], "weight_layouts": LAYOUTS}
    optimizer = Soren([group], lr=1e-3, weight_decay=0.1, **MEASURED)
    for factor in factors.values():
        factor.grad = torch.zeros_like(factor)
    optimizer.step()
    ratio = (factors["B"] @ factors["A"]).detach() / (b @ a)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 1 - 1e-4), rtol=0, atol=1e-8)  # (lr wd)^2


def test_the_second_step_from_zero_changes_a_little():
    """Without the damping dA would be as large as A: its product with dB would exceed the update itself."""
    a, b = start(is_zero=True)
    _, a1, b1 = train(a, b, num_steps=1, lr=1e-3, weight_decay=0.0)
    _, a2, b2 = train(a, b, num_steps=2, lr=1e-3, weight_decay=0.0)
    update = (b2 - b1) @ a1 + b1 @ (a2 - a1)
    assert (a2 - a1).norm() > 1e-3 * a.norm()
    assert ((b2 - b1) @ (a2 - a1)).norm() < 0.5 * update.norm()
    assert (b2 @ a2 - b1 @ a1).square().mean().sqrt() < 1.5 * 0.2 * 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer_class", [Soren, HTMuon, Muon])
@pytest.mark.parametrize("fault", ["A = 0", "A = B = 0", "rank 2", "lr 0", "rank above n"])
def test_steps_of_factors_without_full_rank_are_finite(dtype, optimizer_class, fault):
    a, b = start()
    if "A" in fault:
        a = 0 * a
    if fault == "A = B = 0":
        b = 0 * b
    if fault == "rank 2":
        a[2:], b[:, 2:] = a[:2], 0
    if fault == "rank above n":
        a, b = normal(3, N + 3, N), normal(4, M, N + 3)
    rates = {"lr": 0.0} if fault == "lr 0" else {}
    _, new_a, new_b = train(a.to(dtype), b.to(dtype), optimizer_class, **rates)
    assert new_a.isfinite().all()
    assert new_b.isfinite().all()
    if fault in ("A = B = 0", "lr 0"):
        torch.testing.assert_close((new_a, new_b), (a.to(dtype), b.to(dtype)), rtol=0, atol=0)


def model():
    return get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear"))


def built(adapted, **settings):
    return build_optimizer(adapted, **{"name": "soren", "lr": 0.01, **MEASURED, "lora_update": "product", **settings})


def take_step(adapted, optimizer, step=0):
    tokens = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(step))
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.model
def test_the_factors_of_peft_are_routed_in_pairs():
    (group,) = param_groups(model(), lr=0.1, lora_update="product")
    reason = "LoRA factor, updated as the product B A (extension, not in the paper)"
    assert {r.reason for r in route(model(), lora_update="product")} == {reason}
    layouts = {name.removeprefix("base_model.model.model.layers."): x for name, x in group["weight_layouts"].items()}
    assert layouts["1.mlp.down_proj.lora_A.default.weight"] == "lora_A 16"
    assert layouts["1.mlp.down_proj.lora_B.default.weight"] == "lora_B 24"
    kinds = [layout.split()[0] for layout in layouts.values()]
    assert kinds == ["lora_A", "lora_B"] * 14
    assert "weight_layouts" not in param_groups(model(), lr=0.1)[0]


@pytest.mark.model
@pytest.mark.parametrize("name", ["soren", "muon", "htmuon"])
def test_batches_of_factors_take_the_steps_of_single_ones(name):
    weights = []
    for workspace_mb in (0, 0.02, 16):
        adapted = model()
        optimizer = built(adapted, name=name)
        optimizer.workspace_mb = workspace_mb
        for step in range(3):
            take_step(adapted, optimizer, step)
        weights.append({n: p.detach().clone() for n, p in adapted.named_parameters() if p.requires_grad})
        assert optimizer.num_maps == 3 * 28
    for others in weights[1:]:  # float32 in another order; Muon iterates in bfloat16
        torch.testing.assert_close(others, weights[0], rtol=0, atol=2e-2 if name == "muon" else 1e-5)


@pytest.mark.model
def test_a_checkpoint_continues_with_products_alone():
    adapted = model()
    optimizer = built(adapted)
    take_step(adapted, optimizer)
    file = io.BytesIO()
    torch.save({"model": adapted.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert {key for state in saved["optimizer"]["state"].values() for key in state} == {"step", "exp_avg"}
    resumed = model()
    resumed.load_state_dict(saved["model"])
    again = built(resumed)
    again.load_state_dict(saved["optimizer"])
    for pair in ((adapted, optimizer), (resumed, again)):
        take_step(*pair, step=1)
    for expected, parameter in zip(adapted.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    with pytest.raises(ValueError, match=r"group 0 weight_layouts: \['lora_A 16', .*\] in the checkpoint"):
        built(resumed, lora_update="factors").load_state_dict(saved["optimizer"])


def frozen(part):
    adapted = model()
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and part not in name)
    return adapted


REFUSALS = {
    "rows": (model, {"second_moment": "rows"}, "group 0 second_moment: found 'rows', which depends on the choice"),
    "sign": (model, {"map_input": "sign"}, "group 0 map_input: found 'sign', which depends on the choice"),
    "A frozen": (lambda: frozen("lora_A"), {}, "lora_B.default.weight is updated without the other factor"),
    "B frozen": (lambda: frozen("0.mlp.up_proj.lora_B"), {}, "up_proj.lora_A.default.weight is updated without"),
    "B in aux": (model, {"aux": ["*1.self_attn.o_proj.lora_B*"], "aux_lr": 0.1}, "o_proj.lora_A.default.weight is"),
    "nothing": (tiny_llama, {}, "'product' has no effect, because"),
}


@pytest.mark.model
@pytest.mark.parametrize("case", REFUSALS)
def test_settings_that_need_one_choice_of_factors_are_refused(case):
    make, settings, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        built(make(), **settings)


def test_flops_beside_the_maps_are_those_that_the_plan_counts():
    rank, rows, columns = 8, 640, 960  # products of [r, r] are 3% here
    a, b = torch.randn(rank, columns), torch.randn(rows, rank)
    factors = [Batch(x, "linear", [], lambda _: iter(()), {WEIGHTS: x}) for x in (a, b)]
    with FlopCounterMode(display=False) as counter:
        product_directions(*factors, lambda x, _: x, step_size=0.1, to_unit_rms=True)
    planned = num_flops(a.shape, f"lora_A {rows}") + num_flops(b.shape, f"lora_B {columns}")
    assert counter.get_total_flops() == pytest.approx(planned, rel=0.05)
    assert math.prod((10, rank, rank, columns)) + math.prod((8, rank, rank, rows)) == planned
