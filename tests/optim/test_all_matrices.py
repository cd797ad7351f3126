"""With optimizer.matrices "all-2d" every parameter of two dimensions is a matrix, as in the authors' released code."""

import pytest
import torch
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.optim import build_optimizer, param_groups, route
from soren_align.optim.layout import WeightLayout
from tests.support.tiny_models import tiny_llama
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

RATES = {"lr": 0.03, "aux_lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-10}
INSIDE = 7  # matrices of a block


def spectral(model, **settings):
    """Reasons of the matrices by name."""
    return {r.name: r.reason for r in route(model, **settings) if r.rule == "spectral"}


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_matrices_a_tied_one_once(tied):
    model = tiny_llama(40, tie_word_embeddings=tied)
    inside, everything = spectral(model), spectral(model, matrices="all-2d")
    assert len(inside) == 2 * INSIDE
    tie = ", tied to lm_head.weight" if tied else ""
    others = {"model.embed_tokens.weight": f"input embedding{tie}"}
    assert everything == inside | others | ({} if tied else {"lm_head.weight": "output embedding"})
    assert {p.ndim for r in route(model, matrices="all-2d") if r.rule == "adamw" for p in [r.parameter]} == {1}
    groups = param_groups(model, lr=0.1, aux_lr=0.1, matrices="all-2d")
    assert [len(group["params"]) for group in groups] == [len(everything), 5]
    assert not any("weight_layouts" in group for group in groups)


def test_aux_still_names_parameters_for_adamw():
    names = spectral(tiny_llama(40), matrices="all-2d", aux=["lm_head.*", "*.1.*.q_proj.weight"])
    assert len(names) == 2 * INSIDE
    assert "model.embed_tokens.weight" in names
    assert not {"lm_head.weight", "model.layers.1.self_attn.q_proj.weight"} & set(names)


def test_every_other_parameter_of_two_dimensions_is_one_too():
    net = nn.Sequential(nn.Linear(3, 1), nn.Conv2d(1, 1, 2, bias=False), nn.Embedding(4, 3))
    net.table = nn.Parameter(torch.zeros(3, 3))
    assert set(spectral(net)) == set()
    assert set(spectral(net, matrices="all-2d")) == {"0.weight", "2.weight", "table"}


def test_transposed_weights_are_mapped_as_before():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    weight_layouts = {r.name: r.layout for r in route(model, matrices="all-2d") if r.rule == "spectral"}
    assert weight_layouts["transformer.wte.weight"] == weight_layouts["transformer.wpe.weight"] == WeightLayout()
    assert weight_layouts["transformer.h.0.mlp.c_fc.weight"] == WeightLayout(transposed=True)


def released(n: torch.Tensor) -> torch.Tensor:
    """The map of the released code at commit 3cfc0c6, float64, by its definition."""
    q, t = n / n.norm(), n / (4 * n.norm())
    for _ in range(5):
        q = (3 * q - q @ q.T @ q) / 2
    for _ in range(2):
        t = (3 * t - t @ t.T @ t) / 2
    return (q + t) / 2


def released_exact(n: torch.Tensor) -> torch.Tensor:
    """The map of the released code at commit 8f89e16, float64, by its definition."""
    u, sigma, vh = torch.linalg.svd(n, full_matrices=False)
    return (u / (1 + torch.exp(-sigma))) @ vh


def reference_step(weight, gradient, state, step, spectral_map):
    """One step of the released code's rule for a parameter, in float64; `state` is modified."""
    if weight.ndim == 2:
        state["m"] = 0.95 * state.get("m", 0) + 0.05 * gradient
        scale = max(1, weight.shape[0] / weight.shape[1]) ** 0.5
        return weight * (1 - 0.03 * 0.1) - 0.03 * scale * spectral_map(0.95 * state["m"] + 0.05 * gradient)
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * gradient
    state["v"] = 0.95 * state.get("v", 0) + 0.05 * gradient**2
    return weight - 1e-3 * state["m"] / (1 - 0.9**step) / ((state["v"] / (1 - 0.95**step)).sqrt() + 1e-10)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("map_name", "spectral_map"), [("released", released), ("exact", released_exact)])
def test_steps_of_both_states_of_the_released_code_are_those_of_a_plain_reference(tied, map_name, spectral_map):
    model = tiny_llama(40, tie_word_embeddings=tied)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    settings = {"map": map_name, "adjust_lr_fn": "original", "matrices": "all-2d"}
    optimizer = build_optimizer(model, name="soren", **RATES, **settings)
    states, generator = {name: {} for name in expected}, torch.Generator().manual_seed(1)
    for step in (1, 2, 3):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            expected[name] = reference_step(expected[name], parameter.grad.double(), states[name], step, spectral_map)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.double(), expected[name], rtol=0, atol=1e-6)  # float32's rounding


def test_adamw_has_its_rate_of_matrices_there_too():
    optimizer = build_optimizer(tiny_llama(40), name="adamw", lr=0.1, aux_lr=0.01, matrices="all-2d")
    assert [(g["lr"], len(g["params"])) for g in optimizer.param_groups] == [(0.1, 2 * INSIDE + 2), (0.01, 5)]


def test_a_recipe_with_an_adapter_has_no_such_choice():
    assert recipe.load("quickstart/sft", ["optimizer.matrices=all-2d"]).optimizer.matrices == "all-2d"
    with pytest.raises(UserError, match=r"optimizer.matrices: has no effect on an adapter"):
        recipe.load("quickstart/sft-lora", ["optimizer.matrices=all-2d"])
