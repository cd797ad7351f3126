"""Second moments of a map's output: NorMuon's and AdaMuon's steps bit for bit, layouts, resuming, refusals."""

import copy
import math

import pytest
import torch
from soren_align.optim import HTMuon, Muon, Soren, build_optimizer
from soren_align.spectral import newton_schulz
from torch import nn

SHAPES = {"wide": (6, 20), "tall": (33, 8), "square": (16, 16)}
NORMUON = {"second_moment": "rows", "adjust_lr_fn": "match_rms_measured"}
ADAMUON = {"second_moment": "elements", "adjust_lr_fn": "match_rms_measured", "map_input": "sign"}
LR, BETA, DECAY, EPS = 0.02, 0.95, 0.1, 1e-8


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    # Rows of very different sizes, so that the moments matter.
    return {name: torch.randn(shape, generator=generator) * torch.logspace(-2, 0, shape[0])[:, None]
            for name, shape in SHAPES.items()}  # fmt: skip


def parameters_of(value=1.0):
    return {name: nn.Parameter(torch.full(shape, value)) for name, shape in SHAPES.items()}


def trained(steps, make=Muon, **settings):
    parameters = parameters_of()
    optimizer = make(parameters.items(), lr=LR, **settings)
    run(optimizer, parameters, steps)
    return parameters, optimizer


def run(optimizer, parameters, steps):
    for step in steps:
        for name, grad in gradients(step).items():
            parameters[name].grad = grad
        optimizer.step()


def frobenius(x):
    """Row by row, as the package sums: one float32 sum over a large matrix is inaccurate."""
    return torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1, keepdim=True), dim=-2, keepdim=True)


def plain_loop(kind, num_steps, scale_of):
    """NorMuon and AdaMuon as in their codes (see second_moment.py), with the package's map and exact sums of squares.

    scale_of: m, n -> the scale of the learning rate; None: to an RMS of 0.2, as both papers do.
    """
    weights = {name: p.detach() for name, p in parameters_of().items()}
    momenta = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    moments = {name: torch.zeros(shape if kind == "elements" else (shape[0], 1)) for name, shape in SHAPES.items()}
    for step in range(num_steps):
        for name, g in gradients(step).items():
            (m, n), w, v = SHAPES[name], weights[name], moments[name]
            momenta[name].lerp_(g, 1 - BETA)
            update = g.lerp(momenta[name], BETA)
            o = newton_schulz(update.sign() if kind == "elements" else update, steps=5)
            if kind == "rows":
                v.lerp_(o.square().mean(-1, keepdim=True), 1 - BETA)
                divided = o / (v.sqrt() + EPS)
                o = divided * (frobenius(o) / frobenius(divided))  # the norm as it was, dion's order
                if scale_of is None:
                    o = o / (frobenius(o) / math.sqrt(m * n))
            else:
                v.lerp_(o.square(), 1 - BETA)
                divided = o / (v.sqrt() + EPS)
                norm = divided.double().square().sum().sqrt()
                wanted = o.double().square().sum().sqrt() if scale_of else math.sqrt(m * n)
                o = divided * (wanted / norm).float()
            w.mul_(1 - LR * DECAY).add_(o, alpha=-(LR * (scale_of(m, n) if scale_of else 0.2)))
    return weights, moments


@pytest.mark.parametrize("kind", ["rows", "elements"])
@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_measured", "original", "match_rms_adamw"])
def test_the_steps_are_bit_for_bit_those_of_a_plain_loop(kind, adjust_lr_fn):
    scales = {"original": lambda m, n: math.sqrt(max(1, m / n)), "match_rms_measured": None,
              "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n))}  # fmt: skip
    expected, moments = plain_loop(kind, 5, scales[adjust_lr_fn])
    settings = {**(NORMUON if kind == "rows" else ADAMUON), "adjust_lr_fn": adjust_lr_fn}
    parameters, optimizer = trained(range(5), weight_decay=DECAY, **settings)
    key = "exp_avg_sq_rows" if kind == "rows" else "exp_avg_sq"
    for name, parameter in parameters.items():
        assert torch.equal(optimizer.state[parameter][key].flatten(), moments[name].flatten())
        assert torch.equal(parameter, expected[name])
    plain, _ = trained(range(5), weight_decay=DECAY, adjust_lr_fn=adjust_lr_fn)
    assert all((p - plain[name]).abs().max() > 1e-3 for name, p in parameters.items()), "else it would show nothing"


@pytest.mark.parametrize("make", [Soren, Muon, HTMuon])
@pytest.mark.parametrize("settings", [NORMUON, ADAMUON], ids=["rows", "elements"])
def test_with_any_map_an_update_has_the_rms_of_the_recipe(make, settings):
    parameters, _ = trained([0], make, weight_decay=0.0, match_rms=0.3, **settings)
    for parameter in parameters.values():
        assert float((parameter.detach() - 1).square().mean().sqrt()) == pytest.approx(0.3 * LR, rel=1e-4)


def test_the_sign_alone_is_the_step_of_the_signs():
    """The momentum of one step has the signs of the gradient, and the update of their own step."""
    parameters, _ = trained([0], adjust_lr_fn="original", map_input="sign")
    expected = parameters_of()
    optimizer = Muon(expected.items(), lr=LR, adjust_lr_fn="original")
    for name, grad in gradients(0).items():
        expected[name].grad = grad.sign()
    optimizer.step()
    assert all((p - expected[name]).abs().max() < 1e-3 * LR for name, p in parameters.items())


def test_sorens_map_of_signs_is_guarded_by_their_norm():
    """The norm of signs, sqrt(m n), is not bounded by that of the gradients, by which a step knows its inputs."""
    shape, grads = (48, 64), torch.randn(48, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    weights = []
    for name in ("exact", "minimax"):
        parameter = nn.Parameter(torch.zeros(shape))
        optimizer = Soren([parameter], lr=1.0, map=name, adjust_lr_fn="match_rms_measured", map_input="sign")
        for _ in range(2):
            parameter.grad = grads.clone()
            optimizer.step()
        weights.append(parameter.detach())
    assert float((weights[0] - weights[1]).norm() / weights[0].norm()) < 0.2


LAYOUTS = [("transposed", 1), ("gate_up", 2), ("transposed gate_up", 2), ("transposed interleaved gate_up", 2),
           ("qkv", 3)]  # fmt: skip


def stored(matrices, layout):
    """Matrices [outputs, inputs], as one weight of that layout."""
    if layout == "transposed interleaved gate_up":
        return torch.stack([m.T for m in matrices], -1).flatten(1)
    if "transposed" in layout:
        return torch.cat([m.T for m in matrices], 1)
    return torch.cat(matrices)


@pytest.mark.parametrize(("layout", "number"), LAYOUTS)
@pytest.mark.parametrize("settings", [NORMUON, ADAMUON], ids=["rows", "elements"])
@pytest.mark.parametrize("num_experts", [None, 3])
@pytest.mark.parametrize("workspace_mb", [0, 16])
def test_rows_are_outputs_in_every_layout(layout, number, settings, num_experts, workspace_mb):
    """A weight that stores several matrices, transposed or not, takes the steps of matrices of their own."""
    names = [f"{expert}.{i}" for expert in range(num_experts or 1) for i in range(number)]
    generator = torch.Generator().manual_seed(0)
    grads = [{name: torch.randn(6, 10, generator=generator) * torch.logspace(-1, 0, 6)[:, None] for name in names}
             for _ in range(3)]  # fmt: skip
    settings = {"map": "exact", "workspace_mb": workspace_mb, "weight_decay": 0.0, **settings}

    def together(tensors):
        experts = [stored([tensors[f"{e}.{i}"] for i in range(number)], layout) for e in range(num_experts or 1)]
        return torch.stack(experts) if num_experts else experts[0]

    apart = {name: nn.Parameter(torch.zeros(6, 10)) for name in names}
    weight = nn.Parameter(torch.zeros_like(together(grads[0])))
    first = Soren(apart.items(), lr=LR, **settings)
    groups = [{"params": [("w", weight)], "weight_layouts": {"w": layout}}]
    second = Soren(groups, lr=LR, **settings)
    for step in grads:
        weight.grad = together(step)
        second.step()
        for name, grad in step.items():
            apart[name].grad = grad
        first.step()
    torch.testing.assert_close(weight.detach(), together({n: p.detach() for n, p in apart.items()}), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [NORMUON, {**NORMUON, "momentum_dtype": "bfloat16"}, ADAMUON], ids=["rows", "bfloat16", "elements"]
)
def test_a_checkpoint_continues_bit_for_bit(settings):
    straight, _ = trained(range(6), **settings)
    half, optimizer = trained(range(3), **settings)
    saved, resumed = copy.deepcopy(optimizer.state_dict()), parameters_of()
    second = Muon(resumed.items(), lr=LR, **settings)
    second.load_state_dict(saved)
    for name, parameter in resumed.items():
        parameter.data = half[name].detach().clone()
    run(second, resumed, range(3, 6))
    assert all(torch.equal(p, straight[name]) for name, p in resumed.items())


@pytest.mark.parametrize(("settings", "key", "message"), [
    (NORMUON, "exp_avg_sq_rows", "the checkpoint lacks this rank's part of the state exp_avg_sq_rows of wide"),
    (ADAMUON, "exp_avg_sq", "the checkpoint has no exp_avg_sq of wide"),
])  # fmt: skip
def test_a_checkpoint_without_the_moments_is_refused(settings, key, message):
    _, optimizer = trained([0], **settings)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0][key]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)


def test_a_checkpoint_of_other_moments_is_refused_and_one_from_before_them_is_not():
    _, rows = trained([0], **NORMUON)
    _, plain = trained([0], adjust_lr_fn="match_rms_measured")
    saved = copy.deepcopy(plain.state_dict())
    with pytest.raises(ValueError, match="group 0 second_moment: none in the checkpoint, rows in this optimizer"):
        rows.load_state_dict(saved)
    for key in ("map_input", "second_moment", "second_moment_beta", "match_rms"):
        del saved["param_groups"][0][key]
    plain.load_state_dict(saved)
    with pytest.raises(ValueError, match="group 0 second_moment: none"):
        rows.load_state_dict(saved)


@pytest.mark.parametrize(("settings", "message"), [
    ({"second_moment": "columns"}, "second_moment: found 'columns'; write one of 'none', 'rows', 'elements'"),
    ({"second_moment_beta": 0.9}, "second_moment_beta: has no effect without a second moment"),
    ({"second_moment": "rows", "second_moment_beta": 1.0}, "second_moment_beta: found 1.0; write a number"),
    ({"match_rms": 0.3, "adjust_lr_fn": "original"}, "match_rms: has no effect with adjust_lr_fn='original'"),
    ({"match_rms": "adam"}, "match_rms: found 'adam'; write a number, or 'adamw'"),
    ({"match_rms": 0.0}, "match_rms: found 0.0; write a finite number, above 0"),
    ({"map_input": "gradient"}, "map_input: found 'gradient'; write one of 'momentum', 'sign'"),
])  # fmt: skip
def test_a_wrong_combination_gets_one_sentence(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        Muon(parameters_of().items(), **settings)
    assert "\n" not in str(caught.value)


def test_match_rms_adamw_is_that_of_adamws_first_beta():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    settings = {"lr": 0.1, "aux": ["1.weight"], "adjust_lr_fn": "match_rms_measured", "match_rms": "adamw"}
    built = build_optimizer(model, name="muon", betas=(0.8, 0.99), **settings)
    assert built.param_groups[0]["match_rms"] == pytest.approx(math.sqrt(0.2 / 1.8))
    alone = Muon(parameters_of().items(), adjust_lr_fn="match_rms_adamw", match_rms="adamw")
    assert alone.param_groups[0]["match_rms"] == pytest.approx(math.sqrt(0.1 / 1.9))
    assert alone.lr_scale("match_rms_adamw", 4, 9, match_rms=0.5) == 0.5 * 3


@pytest.mark.parametrize("settings", [NORMUON, ADAMUON], ids=["rows", "elements"])
def test_a_zero_gradient_changes_nothing(settings):
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = Muon([parameter], lr=LR, weight_decay=0.0, **settings)
    for _ in range(2):
        parameter.grad = torch.zeros(3, 5)
        optimizer.step()
    assert torch.equal(parameter, torch.ones(3, 5))
