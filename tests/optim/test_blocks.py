"""`split`: which blocks of which weights are matrices of their own, and what is refused."""

import pytest
import torch
from soren_align.core.errors import UserError
from soren_align.optim import param_groups, route
from soren_align.optim.blocks import CONTIGUOUS, split_layout
from soren_align.optim.layout import WeightLayout, matrices_of
from soren_align.planning.plan import plan_training
from soren_align.recipe import load
from tests.support.architectures import config_of
from torch import nn
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.model


def model_of(architecture, **changes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(architecture, **changes))


def split(architecture, name, blocks, **changes):
    """The matrices of the first weight that is split, by name."""
    routes = route(model_of(architecture, **changes), split={name: blocks})
    first = next(r for r in routes if r.layout.sizes)
    assert all(r.layout == first.layout for r in routes if r.layout.sizes)
    matrices = matrices_of("w", first.parameter, first.layout)
    return {name: tuple(matrix.shape) for name, matrix in matrices}


@pytest.mark.parametrize(("architecture", "name", "blocks", "shapes"), [
    ("phi3", "*qkv_proj", ["q", "k", "v"], {"w.q": (32, 32), "w.k": (16, 32), "w.v": (16, 32)}),
    ("phi3", "*gate_up_proj.weight", ["gate", "up"], {"w.gate": (48, 32), "w.up": (48, 32)}),
    ("phi3", "*qkv_proj", [20, 44], {"w.0": (20, 32), "w.1": (44, 32)}),
    ("phi3", "*qkv_proj", ["heads"], {f"w.{head}": (8, 32) for head in range(8)}),
    ("llama", "*k_proj", ["heads"], {"w.0": (8, 32), "w.1": (8, 32)}),
    ("gpt2", "*c_attn", ["q", "k", "v"], {"w.q": (32, 32), "w.k": (32, 32), "w.v": (32, 32)}),
    ("gpt2", "*c_attn", ["heads"], {f"w.{head}": (32, 8) for head in range(12)}),
    ("gpt_neox", "*query_key_value", ["heads"], {f"w.{head}": (8, 32) for head in range(12)}),
])  # fmt: skip
def test_blocks_have_the_sizes_of_the_config(architecture, name, blocks, shapes):
    assert split(architecture, name, blocks) == shapes


def test_falcon_is_contiguous_only_with_one_key_and_value():
    shapes = split("falcon", "*query_key_value", ["q", "k", "v"], new_decoder_architecture=False, multi_query=True)
    assert shapes == {"w.q": (32, 32), "w.k": (8, 32), "w.v": (8, 32)}


QKV = "query_key_value"
REFUSED = [
    ("phi3", "*nothing", ["q"], r"split: '\*nothing' matches no weight that is a matrix of the optimizer"),
    ("phi3", "*norm", [2, 3], "matches no weight that is a matrix"),
    ("phi3", "*qkv_proj", [20, 40],
     r"qkv_proj.weight: has 64 rows, but 20 \+ 40 = 60; write row counts with the sum 64"),
    ("phi3", "*qkv_proj", ["k", "q", "v"], r"found \[k, q, v\], but it stores \[q, k, v\]; write these"),
    ("phi3", "*o_proj", ["q", "k", "v"], "the projections in o_proj are not known; write row counts"),
    ("phi3", "*down_proj", ["heads"], "its rows do not belong to attention heads; write"),
    ("gpt_neox", f"*{QKV}", ["q", "k", "v"],
     r"the rows of q, k, v are interleaved, so they are no blocks; write \[heads\]"),
    ("gpt_neox", f"*{QKV}", [32, 32, 32], "the rows of q, k, v are interleaved"),
    ("bloom", f"*{QKV}", ["q", "k", "v"], "in bloom the rows of q, k, v are interleaved"),
    ("falcon", f"*{QKV}", ["q", "k", "v"], "in falcon the rows of q, k, v are interleaved"),
    ("qwen3_next", "*in_proj_qkvz", [32, 32],
     "the rows of q, k, v, z are interleaved, so they are no blocks; remove this name"),
    ("deepseek_v3", "*kv_b_proj", ["k", "v"],
     "the rows of k, v are interleaved, so they are no blocks; remove this name"),
    ("mixtral", "*gate_up_proj", ["gate", "up"], "its projections are separate matrices already"),
    ("gpt2", "*c_attn", [64, 32], r"blocks of columns need equal sizes, not 64 \+ 32"),
    ("phi3", "*qkv_proj", [1, 63], "a block of one row is no matrix; write larger blocks"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "name", "blocks", "message"), REFUSED)
def test_what_cannot_be_split_is_one_sentence(architecture, name, blocks, message):
    with pytest.raises(ValueError, match=message):
        route(model_of(architecture), split={name: blocks})


def test_a_model_without_a_config_is_split_by_numbers_of_rows():
    model = nn.ModuleDict({"qkv_proj": nn.Linear(8, 24, bias=False)})
    (group,) = param_groups(model, lr=0.1, split={"qkv_proj": [8, 16]})
    assert group["weight_layouts"] == {"qkv_proj.weight": WeightLayout.parse("blocks 0:8 1:16")}
    message = r"does not state the number of attention heads \(num_attention_heads\); write row counts"
    with pytest.raises(ValueError, match=message):
        route(model, split={"qkv_proj": ["heads"]})
    with pytest.raises(ValueError, match=r"the order of q, k, v in this model is not known; write row counts"):
        route(model, split={"qkv_proj": ["q", "k", "v"]})


def test_the_first_name_that_matches_a_weight_counts():
    model = model_of("phi3")
    names = {"*.0.*qkv_proj": [32, 32], "*qkv_proj": ["q", "k", "v"]}
    layouts = {r.name: r.layout for r in route(model, split=names) if "qkv" in r.name}
    assert [*map(str, layouts.values())] == ["blocks 2*32", "blocks q:32 k:16 v:16"]


@pytest.mark.parametrize(("architecture", "layout"), [("phi3", "linear"), ("gpt2", "transposed")])
def test_a_contiguous_layer_stores_v_in_the_last_block(architecture, layout):
    """Without v the attention adds nothing: the output no longer depends on q and k."""
    layout = WeightLayout.parse(layout)
    torch.manual_seed(0)
    config = config_of(architecture)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(3, 99, (1, 12))

    def blocks(name, weight):
        return dict(matrices_of("w", weight, split_layout(name, weight.shape, layout, ["q", "k", "v"], config)))

    with torch.no_grad():
        for name, weight in model.named_parameters():
            layer = name.split(".")[-2]
            if (layer, config.model_type) in CONTIGUOUS and name.endswith("weight"):
                blocks(name, weight)["w.v"].zero_()
        before = model(tokens).logits
        for name, weight in model.named_parameters():
            if name.split(".")[-2] in ("qkv_proj", "c_attn") and name.endswith("weight"):
                matrices = blocks(name, weight)
                matrices["w.q"].normal_()
                matrices["w.k"].normal_()
        assert torch.allclose(model(tokens).logits, before, atol=1e-6)
        matrices["w.v"].normal_()
        assert not torch.allclose(model(tokens).logits, before, atol=1e-3)


SPLIT = 'optimizer.split={"*qkv_proj": [q, k, v]}'


def test_a_plan_counts_the_blocks_and_a_wrong_one_stops_before_data_are_read(tmp_path, monkeypatch):
    names = ["*q_proj", "*k_proj"]
    plans = []
    for overrides in ([], [f'optimizer.split={{"{names[0]}": [heads], "{names[1]}": [heads]}}']):
        plan, _ = plan_training(load("quickstart/sft", overrides))
        plans.append(plan)
    matrices = [plan["processes"]["num_matrices"] for plan in plans]
    shapes = [{tuple(size["shape"]) for size in plan["update_sizes"] if size["shape"]} for plan in plans]
    assert matrices[1] > matrices[0]
    assert len(shapes[1]) == len(shapes[0]) + 1
    monkeypatch.setattr("soren_align.training.setup.load_splits", None)
    with pytest.raises(UserError, match=r"^optimizer: split: '\*qkv' matches no weight"):
        plan_training(load("quickstart/sft", ['optimizer.split={"*qkv": [q, k, v]}']))


@pytest.mark.parametrize("blocks", ["[q, z]", "[1, 3]", "[true]", "[]"])
def test_a_recipe_refuses_unknown_blocks(blocks):
    with pytest.raises(UserError, match=r"optimizer.split.\*qkv_proj.*: found .*; write ") as error:
        load("quickstart/sft", [f'optimizer.split={{"*qkv_proj": {blocks}}}'])
    assert len(error.value.problems) == 1
