"""Matrices that transformers stores otherwise than nn.Linear does: which they are, and that all of them are found."""

import pytest
import torch
from soren_align.optim import (
    WeightLayout,
    matrices_of,
    names_of_matrices,
    route,
    routing_table,
    share_notices,
    spectral_share,
)
from tests.support.architectures import config_of
from transformers import AutoModelForCausalLM, DbrxConfig, DbrxForCausalLM

HALVES = ("gate_up", "transposed gate_up", "transposed interleaved gate_up")


def routes(architecture, **changes):
    with torch.device("meta"):
        return {r.name: r for r in route(AutoModelForCausalLM.from_config(config_of(architecture, **changes)))}


@pytest.mark.parametrize("text", [
    "linear", "transposed", *HALVES, "qkv", "blocks q:64 k:32 v:32", "blocks 12*8", "transposed blocks gate:8 up:8",
])  # fmt: skip
def test_a_layout_is_written_as_checkpoints_have_it_and_read_back(text):
    assert str(WeightLayout.parse(text)) == text


@pytest.mark.parametrize("storage", HALVES)
def test_halves_are_joined_where_they_were(storage):
    slabs, layout = torch.arange(5 * 4 * 6.0).view(5, 4, 6), WeightLayout.parse(storage)
    halves = layout.split(slabs)
    assert halves.shape == (5, 2, 2, 6) if storage == "gate_up" else (5, 2, 4, 3)
    assert torch.equal(layout.join(halves.clone()), slabs)
    assert torch.equal(layout.join(layout.split(slabs[0])), slabs[0])
    expected = {"gate_up": slabs[0][:2], "transposed gate_up": slabs[0][:, :3]}
    assert torch.equal(halves[0][0], expected.get(storage, slabs[0][:, 0::2]))


def test_thirds_are_joined_where_they_were():
    slabs, layout = torch.arange(5 * 6 * 4.0).view(5, 6, 4), WeightLayout.parse("qkv")
    thirds = layout.split(slabs)
    assert torch.equal(thirds[0], slabs[0].view(3, 2, 4))
    assert torch.equal(layout.join(thirds.clone()), slabs)
    assert torch.equal(layout.join(layout.split(slabs[0])), slabs[0])
    assert list(dict(matrices_of("in", slabs[0], layout))) == ["in.q", "in.k", "in.v"]
    assert layout.matrix_shape((6, 4)) == (2, 4)


@pytest.mark.parametrize("storage", ["linear", "transposed", *HALVES])
def test_every_number_of_a_parameter_is_in_one_named_matrix(storage):
    parameter, layout = torch.arange(3 * 4 * 6).view(3, 4, 6), WeightLayout.parse(storage)
    matrices = dict(matrices_of("experts", parameter, layout))
    assert list(matrices) == names_of_matrices("experts", parameter.shape, layout)
    assert sorted(int(n) for matrix in matrices.values() for n in matrix.flatten()) == list(range(72))
    outputs, inputs = layout.matrix_shape((4, 6))
    assert {tuple(m.shape) for m in matrices.values()} == {(inputs, outputs) if "tr" in storage else (outputs, inputs)}


@pytest.mark.parametrize(("architecture", "gate_up", "down"), [
    ("mixtral", "gate_up", "linear"), ("deepseek_v3", "gate_up", "linear"),
    ("gpt_oss", "transposed interleaved gate_up", "transposed"), ("llama4_text", "transposed gate_up", "transposed"),
    ("granitemoe", "gate_up", "linear"),
])  # fmt: skip
def test_experts_are_stored_as_their_layers_read_them(architecture, gate_up, down):
    found = routes(architecture)
    experts = {name.split(".")[-1]: r for name, r in found.items() if len(r.shape) == 3}
    assert (str(experts["gate_up_proj"].layout), str(experts["down_proj"].layout)) == (gate_up, down)
    assert all(r.rule == "spectral" for r in experts.values())
    assert (experts["gate_up_proj"].num_matrices, experts["down_proj"].num_matrices) == (8, 4)
    inner = config_of(architecture)
    width = getattr(inner, "moe_intermediate_size", None) or inner.intermediate_size
    shapes = [[*experts[name].matrix_shapes] for name in ("gate_up_proj", "down_proj")]
    assert shapes == [[(width, 32)], [(32, width)]]


def test_experts_of_jetmoe_are_stored_in_halves_in_the_mlp_and_plain_in_the_attention():
    found = routes("jetmoe")
    experts = {
        name.removeprefix("model.layers.0."): r for name, r in found.items() if len(r.shape) == 3 and ".0." in name
    }
    assert {name: (r.rule, str(r.layout), *r.matrix_shapes, r.num_matrices) for name, r in experts.items()} == {
        "mlp.input_linear.weight": ("spectral", "gate_up", (48, 32), 8),
        "mlp.output_linear.weight": ("spectral", "linear", (32, 48), 4),
        "self_attention.experts.input_linear.weight": ("spectral", "linear", (16, 32), 4),
        "self_attention.experts.output_linear.weight": ("spectral", "linear", (32, 16), 4),
    }


def test_a_layer_of_gpt_2_is_stored_as_inputs_by_outputs():
    layer = routes("gpt2")["transformer.h.0.mlp.c_fc.weight"]
    assert (layer.rule, layer.shape, [*layer.matrix_shapes]) == ("spectral", (32, 128), [(128, 32)])


@pytest.mark.parametrize(("architecture", "name", "reason"), [
    ("llama4_text", "model.layers.0.feed_forward.router.weight", "router"),
    ("mixtral", "model.layers.0.mlp.gate.weight", "router"),
    ("jetmoe", "model.layers.0.mlp.router.layer.weight", "router"),
    ("jetmoe", "model.layers.0.self_attention.experts.router.layer.weight", "router"),
    ("qwen3_next", "model.layers.0.mlp.shared_expert_gate.weight", "a vector: one row or column"),
    ("gpt_oss", "model.layers.0.mlp.experts.down_proj_bias", "bias"),
])  # fmt: skip
def test_routers_and_gates_of_one_row_go_to_adamw(architecture, name, reason):
    found = routes(architecture)[name]
    assert (found.rule, found.reason) == ("adamw", reason)


def test_a_linear_layer_inside_a_router_is_one():
    sizes = {"vocab_size": 121, "d_model": 32, "n_heads": 4, "n_layers": 1, "pad_token_id": 0}
    attention, experts = {"kv_n_heads": 2, "rope_theta": 1e4}, {"ffn_hidden_size": 24, "moe_num_experts": 4}
    with torch.device("meta"):
        model = DbrxForCausalLM(DbrxConfig(**sizes, attn_config=attention, ffn_config=experts))
    (router,) = (r for r in route(model) if "router" in r.name)
    assert (router.rule, router.reason) == ("adamw", "router")


def test_less_than_half_under_the_named_optimizer_is_worth_a_notice():
    table = routing_table([*routes("llama").values()])
    assert spectral_share(table) == pytest.approx(15360 / (15360 + 2 * 3872 + 160))
    assert share_notices("soren", table) == []
    few = routing_table([*routes("llama", vocab_size=1000).values()])
    (notice,) = share_notices("soren", few)
    assert "soren updates only 19.3% of the trained parameters" in notice
    assert "most of them are of this kind: " in notice
    assert share_notices("adamw", few) == []
