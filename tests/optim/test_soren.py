"""What a step of Soren does, and what it refuses."""

import copy
import functools
import math
from types import SimpleNamespace

import pytest
import torch
from soren_align.optim import AdamW, HTMuon, Muon, Soren
from soren_align.spectral import (
    MAPS,
    SOREN_MAPS,
    exact_sigmoid,
    minimax_sigmoid,
    newton_schulz,
    released_sigmoid,
    soft_newton_schulz,
    spectral_power,
)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameter(*shape, grad=None, dtype=torch.float32):
    p = torch.nn.Parameter(randn(*shape, dtype=dtype))
    p.grad = grad
    return p


def snapshot(optimizer):
    """Everything that a step may change."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [dict(optimizer.state[p]) if p in optimizer.state else {} for p in params]
    return copy.deepcopy(([p.detach() for p in params], states)), optimizer.num_maps


def assert_unchanged(optimizer, before):
    (params, states), num_maps = snapshot(optimizer)
    assert num_maps == before[1]
    assert all(torch.equal(a, b) for a, b in zip(params, before[0][0], strict=True))
    for now, then in zip(states, before[0][1], strict=True):
        assert now.keys() == then.keys()
        assert all(torch.equal(now[key], then[key]) for key in now)


def test_the_first_step_maps_one_minus_momentum_squared_of_the_gradient():
    grad = (randn(4, 6, seed=1) / 10).half().float()  # of few bits, so that three quarters of it are exact
    p, seen = parameter(4, 6, grad=grad), []
    optimizer = Soren([p], lr=1.0, momentum=0.5)
    optimizer.map_observers = frozenset({lambda applied: seen.append(applied.output)})
    optimizer.step()
    assert torch.equal(seen[0], minimax_sigmoid(grad * (1 - 0.5**2)))


@pytest.mark.parametrize(("make", "spectral_map"), [
    (Soren, minimax_sigmoid),
    (lambda params, **kw: Soren(params, map={"name": "minimax", "resolution": 0.001}, **kw),
     lambda x: minimax_sigmoid(x, resolution=0.001)),
    (lambda params, **kw: Soren(params, map="sns", **kw), soft_newton_schulz),
    (lambda params, **kw: Soren(params, map={"name": "sns", "steps": 7}, **kw), lambda x: soft_newton_schulz(x, 7)),
    (lambda params, **kw: Soren(params, map={"name": "released", "steps": 7}, **kw), lambda x: released_sigmoid(x, 7)),
    (lambda params, **kw: Soren(params, map="exact", **kw), exact_sigmoid),
    (lambda params, **kw: Muon(params, **{"adjust_lr_fn": "none", **kw}), newton_schulz),
    (lambda params, **kw: HTMuon(params, **{"adjust_lr_fn": "none", **kw}), lambda x: spectral_power(x, 0.125)),
])  # fmt: skip
@pytest.mark.parametrize("nesterov", [True, False])
def test_three_steps_follow_the_algorithm(make, spectral_map, nesterov):
    grads = [randn(5, 8, seed=seed) / 10 for seed in range(1, 4)]
    p = parameter(5, 8)
    w, m = p.detach().clone(), torch.zeros(5, 8)
    optimizer = make([p], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.2)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        m = 0.9 * m + 0.1 * grad
        n = 0.1 * grad + 0.9 * m if nesterov else m
        w = w - 0.1 * 0.2 * w - 0.1 * spectral_map(n)
        # bfloat16 inside Muon's map: an ulp of difference in N may move its result by 1e-2
        assert torch.allclose(p, w, atol=3e-3 if spectral_map is newton_schulz else 1e-5)
        assert torch.equal(p.grad, grad)
    assert optimizer.state[p]["step"] == 3
    assert torch.allclose(optimizer.state[p]["exp_avg"], m)
    assert optimizer.num_maps == 3


@pytest.mark.parametrize(("adjust_lr_fn", "shape", "factor"), [
    ("none", (12, 3), 1),
    ("original", (12, 3), 2),
    ("original", (3, 12), 1),
    ("match_rms_adamw", (16, 3), 1.6),  # 0.2 sqrt(16), over the sigmoid's half
    ("match_rms_adamw", (3, 16), 1.6),
])  # fmt: skip
def test_adjust_lr_fn_scales_the_step_and_not_the_decay(adjust_lr_fn, shape, factor):
    seen, p = [], parameter(*shape, grad=randn(*shape, seed=1))
    before = p.detach().clone()
    optimizer = Soren([p], lr=0.1, weight_decay=0.3, adjust_lr_fn=adjust_lr_fn)
    optimizer.map_observers = frozenset({lambda applied: seen.append(applied.output)})
    optimizer.step()
    assert torch.allclose(p, before * (1 - 0.03) - 0.1 * factor * seen[0], atol=1e-6)


def test_matched_to_adamw_the_update_of_a_full_spectrum_has_rms_a_fifth_of_lr():
    p = torch.nn.Parameter(torch.zeros(64, 64))
    p.grad = torch.linalg.qr(randn(64, 64))[0] * 1e-3
    Soren([p], lr=1.0, map="exact", adjust_lr_fn="match_rms_adamw").step()
    assert p.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("optimizer_class", [Soren, Muon, HTMuon])
def test_a_zero_gradient_leaves_only_the_weight_decay(optimizer_class):
    p = parameter(4, 6, grad=torch.zeros(4, 6))
    before = p.detach().clone()
    optimizer_class([p], lr=0.5, weight_decay=0.1).step()
    assert torch.equal(p, before * (1 - 0.5 * 0.1))


@pytest.mark.parametrize("spectral_map", ["minimax", "sns", "released", "exact"])
def test_matrices_of_one_shape_are_mapped_together_within_the_workspace(spectral_map, monkeypatch):
    def trained(workspace_mb):
        shapes = [(6, 9), (9, 6), (6, 9), (6, 9), (4, 4), (6, 9)]
        params = [parameter(*shape, grad=randn(*shape, seed=i)) for i, shape in enumerate(shapes)]
        optimizer = Soren(params, lr=0.1, map=spectral_map, workspace_mb=workspace_mb)
        seen, batches, plain = [], [], optimizer.map_matrix
        monkeypatch.setattr(optimizer, "map_matrix", lambda x, *more: batches.append(tuple(x.shape)) or plain(x, *more))
        optimizer.update_observers = frozenset({seen.append})
        for _ in range(2):
            optimizer.step()
        assert optimizer.num_maps == 12
        assert {u.name for u in seen} == {f"parameter {i}" for i in range(6)}
        return [p.detach() for p in params], batches[: len(batches) // 2]

    alone, one_by_one = trained(0)
    assert one_by_one == [(6, 9)] * 4 + [(9, 6), (4, 4)]
    together, whole = trained(None)
    assert whole == [(4, 6, 9), (9, 6), (4, 4)]
    each = (MAPS["minimax"].num_workspace_numbers(6, 9) + 2 * 54) * 4 / 2**20
    _, in_threes = trained(3.5 * each)
    assert in_threes == [(3, 6, 9), (6, 9), (9, 6), (4, 4)]
    for a, b in zip(alone, together, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_parameters_of_different_dtypes_are_not_mapped_together():
    params = [parameter(6, 9, grad=randn(6, 9, dtype=dtype), dtype=dtype) for dtype in (torch.float32, torch.float64)]
    optimizer = Soren(params, lr=0.1)
    optimizer.step()
    assert [optimizer.state[p]["exp_avg"].dtype for p in params] == [torch.float32, torch.float64]


def test_tiny_and_huge_gradients_give_finite_bounded_steps():
    for scale in (1e-45, 1e-30, 1e-12, 1e6, 1e20, 1e38):
        sns, released, exact = (functools.partial(Soren, map=name) for name in ("sns", "released", "exact"))
        for make in (Soren, sns, released, exact, HTMuon, Muon):
            p = torch.nn.Parameter(torch.zeros(4, 6))
            p.grad = torch.full((4, 6), scale)
            optimizer = make([p], lr=1.0, adjust_lr_fn="none")
            optimizer.step()
            bound = 1.2 if make is not HTMuon else 1.2 * max(1, (scale * math.sqrt(24)) ** 0.125)
            assert torch.linalg.matrix_norm(p.detach(), ord=2) <= bound
            assert optimizer.num_guarded == (make in (Soren, sns) and scale > 100)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["matrix", "vector"])
def test_a_gradient_that_is_not_finite_stops_the_step_and_changes_nothing(bad, where):
    matrix, vector = parameter(4, 6, grad=randn(4, 6)), parameter(9, grad=randn(9))
    groups = [{"params": [("matrix", matrix)]}, {"params": [("vector", vector)], "rule": "adamw", "lr": 0.1}]
    optimizer = Soren(groups, lr=0.1)
    optimizer.step()
    before = snapshot(optimizer)
    {"matrix": matrix, "vector": vector}[where].grad.view(-1)[5] = bad
    message = f"NaN or infinity in the gradient of {where}; the optimizer did not apply this step"
    with pytest.raises(FloatingPointError, match=message):
        optimizer.step()
    assert_unchanged(optimizer, before)


def test_the_largest_finite_gradient_is_not_taken_for_an_infinity():
    p = parameter(3, grad=torch.full((3,), torch.finfo(torch.float32).max))
    AdamW([p]).step()


@pytest.mark.parametrize("optimizer_class", [Soren, Muon, HTMuon])
def test_what_is_not_a_matrix_is_refused_by_name(optimizer_class):
    name = optimizer_class.__name__
    message = rf"{name} updates matrices, but model.norm.weight has shape \(8,\). Route it to"
    with pytest.raises(ValueError, match=message):
        optimizer_class([("model.norm.weight", parameter(8))], lr=0.1)
    with pytest.raises(ValueError, match=rf"{name} updates matrices, but parameter 1 has shape \(2, 3, 4\)"):
        optimizer_class([parameter(2, 3), parameter(2, 3, 4)], lr=0.1)


def test_an_emptied_parameter_counts_by_its_true_shape():
    p = torch.nn.Parameter(torch.empty(0))
    p.ds_shape = torch.Size([4, 6])
    Soren([p], lr=0.1)
    p.ds_shape = torch.Size([24])
    with pytest.raises(ValueError, match=r"has shape \(24,\)"):
        Soren([p], lr=0.1)


def test_a_flat_shard_swapped_in_later_is_refused_at_the_step():
    optimizer = Soren([("a", parameter(4, 6)), ("b", parameter(4, 6))], lr=0.1)
    shard = parameter(24, grad=randn(24))
    shard.ds_shape = torch.Size([4, 6])
    optimizer.param_groups[0]["params"] = [shard]
    before = shard.detach().clone()
    with pytest.raises(ValueError, match=r"Soren updates whole matrices, but parameter 0 is a shard of shape \(24,\)"):
        optimizer.step()
    assert torch.equal(shard, before)


def test_sparse_complex_and_whole_number_parameters_are_refused():
    p = parameter(4, 6, grad=torch.eye(4, 6).to_sparse())
    with pytest.raises(ValueError, match="needs dense gradients, but the gradient of parameter 0"):
        Soren([p], lr=0.1).step()
    with pytest.raises(ValueError, match="updates real numbers"):
        Soren([torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], lr=0.1)


@pytest.mark.parametrize(("settings", "message"), [
    ({"lr": -1.0}, "Soren group 0 lr: found -1.0; write a finite number, at least 0"),
    ({"lr": float("nan")}, "lr: found nan"),
    ({"lr": torch.ones(2)}, "write one number"),
    ({"momentum": 1.0}, "momentum: found 1.0; write a number, at least 0 and below 1"),
    ({"weight_decay": -0.1}, "weight_decay: found -0.1"),
    ({"map": {"name": "sns", "steps": 0}}, "map: sns steps: found 0; write a whole number, at least 1 and at most 99"),
    ({"map": "snss"}, "map: found 'snss'; write one of 'minimax', 'sns', 'released', 'exact'"),
    ({"map": {"steps": 15}}, "map: found None; write one of 'minimax', 'sns', 'released', 'exact'"),
    ({"map": {"name": "minimax", "steps": 15}}, "map 'minimax' has no setting 'steps'; write one of 'resolution'"),
    ({"map": {"name": "exact", "steps": 15}}, "map: map 'exact' has no setting 'steps'; remove 'steps'"),
    ({"map": {"name": "minimax", "resolution": 0.02}}, "map: minimax resolution: found 0.02; write one of 0.0004"),
    ({"adjust_lr_fn": "orignal"}, "adjust_lr_fn: found 'orignal'; write one of 'none', 'original'"),
])  # fmt: skip
def test_a_setting_that_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Soren([parameter(4, 6)], **{"lr": 0.1, **settings})


@pytest.mark.parametrize(("name", "precision", "words"), [
    ("exact", "float32", "'exact' write 'auto'"), ("released", "bfloat16", "'released' write 'auto' or 'float32'"),
    ("sns", "float16", "'sns' write 'auto' or 'float32' or 'bfloat16'")])  # fmt: skip
def test_a_precision_that_the_map_does_not_have_is_refused(name, precision, words):
    with pytest.raises(ValueError, match=f"Soren precision: found '{precision}'; for map {words}"):
        Soren([parameter(4, 6)], lr=0.1, map=name, precision=precision)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_the_map_has_the_precision_of_the_optimizer_and_of_its_copy(precision):
    grad, outputs = randn(24, 40) / 100, []
    optimizer = Soren([parameter(24, 40)], lr=0.1, momentum=0.0, precision=precision)
    for each in (copy.deepcopy(optimizer), optimizer):
        each.param_groups[0]["params"][0].grad = grad
        each.map_observers = frozenset({lambda applied: outputs.append(applied.output)})
        each.step()
    wanted = minimax_sigmoid(grad, precision=precision)
    assert len(outputs) == 2
    assert all(torch.equal(output, wanted) for output in outputs)
    assert not torch.allclose(wanted, minimax_sigmoid(grad), atol=1e-5)


def test_auto_is_float16_on_cuda_for_float32_the_minimax_map_and_many_rows_alone():
    def auto(name, is_cuda, dtype=torch.float32, shape=(2, 640, 64)):
        return optimizer.factor_precision(SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=shape), SOREN_MAPS[name])

    optimizer = Soren([parameter(4, 6)], lr=0.1)
    assert auto("minimax", True) == "float16"
    others = (("minimax", False), *((name, True) for name in ("sns", "released", "exact")),
              ("minimax", True, torch.float64), ("minimax", True, torch.float32, (640, 63)))  # fmt: skip
    assert {auto(*case) for case in others} == {"float32"}


def test_groups_hold_the_settings_of_their_rule_and_no_others():
    groups = [{"params": [parameter(4, 6)]}, {"params": [parameter(9)], "rule": "adamw", "lr": 0.3}]
    spectral, adamw = Soren(groups, lr=0.1).param_groups
    assert spectral.keys() == {
        *("params", "rule", "lr", "weight_decay", "weight_decay_to", "compensation", "momentum", "momentum_dtype"),
        *("nesterov", "adjust_lr_fn", "map", "map_input", "second_moment", "second_moment_beta", "match_rms"),
    }
    assert adamw.keys() == {"params", "rule", "lr", "weight_decay", "weight_decay_to", "compensation", "betas", "eps"}
    assert spectral["map"] == {"name": "minimax", "resolution": 0.0004}
    assert (spectral["lr"], adamw["lr"]) == (0.1, 0.3)


@pytest.mark.parametrize(("group", "message"), [
    ({"rule": "adamw"}, "lr: is missing; write the learning rate of this group"),
    ({"rule": "adamw", "lr": 0.1, "ns_steps": 5}, "ns_steps: is no setting of rule 'adamw'"),
    ({"betas": (0.9, 0.99)}, "betas: is no setting of rule 'spectral'"),
    ({"rule": "adam", "lr": 0.1}, "rule: found 'adam'; write adamw or spectral"),
    ({"momentun": 0.9}, "momentun: is no setting of rule 'spectral'"),
])  # fmt: skip
def test_a_group_with_foreign_settings_is_refused(group, message):
    with pytest.raises(ValueError, match=message):
        Soren([{"params": [parameter(4, 6)], **group}], lr=0.1)


def test_adamw_has_no_spectral_groups():
    with pytest.raises(ValueError, match="rule: found 'spectral'; write adamw"):
        AdamW([{"params": [parameter(4, 6)], "rule": "spectral"}])


def test_bfloat16_weights_keep_float32_momentum_and_are_rounded_once():
    grads = [randn(4, 6, seed=seed, dtype=torch.bfloat16) for seed in (1, 2)]
    for make, state in ((Soren, ["exp_avg"]), (AdamW, ["exp_avg", "exp_avg_sq"])):
        narrow, wide = parameter(4, 6, dtype=torch.bfloat16), parameter(4, 6)
        wide.data = narrow.detach().float()
        ours, reference = make([narrow], lr=0.1), make([wide], lr=0.1)
        for grad in grads:
            narrow.grad, wide.grad = grad, grad.float()
            wide.data = narrow.detach().float()
            ours.step()
            reference.step()
            assert torch.equal(narrow, wide.to(torch.bfloat16))
        assert all(ours.state[narrow][key].dtype == torch.float32 for key in state)


def test_the_guard_is_counted():
    calm, wild = parameter(4, 6, grad=randn(4, 6) / 10), parameter(4, 6, grad=randn(4, 6) * 1e4)
    optimizer = Soren([calm, wild], lr=0.1)
    for expected in (1, 2):
        optimizer.step()
        assert (optimizer.num_maps, optimizer.num_guarded) == (2 * expected, expected)


def test_the_observer_sees_every_update_as_it_happened():
    matrix, vector, idle = parameter(4, 6, grad=randn(4, 6)), parameter(9, grad=randn(9)), parameter(3)
    groups = [
        {"params": [("matrix", matrix)]},
        {"params": [("vector", vector), ("idle", idle)], "rule": "adamw", "lr": 0.1},
    ]
    before, seen, outputs = [matrix.detach().clone(), vector.detach().clone()], [], []
    optimizer = Soren(groups, lr=0.1, weight_decay=0.0)
    optimizer.update_observers = frozenset({lambda update: seen.append((update, *update.applied()))})
    optimizer.map_observers = frozenset({outputs.append})
    optimizer.step()
    assert [(u.name, u.group["rule"]) for u, _ in seen] == [("matrix", "spectral"), ("vector", "adamw")]
    (of_matrix, of_vector) = (numbers for _, numbers in seen)
    assert torch.equal(of_vector[0], before[1])
    assert torch.equal(of_matrix[1], matrix)
    # The fused kernel and the two operations of decay_and_add_ round differently: by an ulp of the weight or update.
    assert torch.allclose(of_vector[1], vector, rtol=2**-22, atol=0.1 * 2**-22)
    (applied,) = outputs
    assert (applied.name, applied.group) == ("matrix", optimizer.param_groups[0])
    assert torch.allclose(before[0] - 0.1 * applied.output, matrix)
    assert torch.allclose(minimax_sigmoid(applied.input), applied.output, atol=1e-6)


@pytest.mark.parametrize("optimizer_class", [Soren, AdamW])
def test_step_counts_are_new_tensors(optimizer_class):
    p = parameter(4, 6, grad=randn(4, 6))
    optimizer = optimizer_class([p], lr=0.1)
    optimizer.step()
    first = optimizer.state[p]["step"]
    optimizer.step()
    assert (first, optimizer.state[p]["step"]) == (1, 2)
