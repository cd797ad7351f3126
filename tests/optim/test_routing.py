"""Every trainable parameter goes to one rule, for a stated reason."""

import warnings

import pytest
import torch
from soren_align.optim import AdamW, HTMuon, Muon, Soren, build_optimizer, param_groups, route, routing_table
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.LayerNorm(4)


class Model(nn.Module):
    """As much of a language model as routing looks at."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.layers = nn.Embedding(10, 4), nn.ModuleList([Block(), Block()])
        self.project, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head


def rules(routes):
    return {r.name: (r.rule, r.reason) for r in routes}


def test_linear_layers_inside_the_blocks_are_spectral_and_the_rest_is_not():
    assert rules(route(Model())) == {
        "embed.weight": ("adamw", "input embedding"),
        **{
            f"layers.{i}.{name}": where
            for i in (0, 1)
            for name, where in {
                "up.weight": ("spectral", "linear layer"),
                "up.bias": ("adamw", "1-dimensional"),
                "down.weight": ("spectral", "linear layer"),
                "norm.weight": ("adamw", "1-dimensional"),
                "norm.bias": ("adamw", "1-dimensional"),
            }.items()
        },
        "project.weight": ("adamw", "outside the blocks"),
        "head.weight": ("adamw", "output embedding"),
    }


def test_tied_embeddings_are_one_parameter():
    routes = rules(route(Model(tied=True)))
    assert routes["embed.weight"] == ("adamw", "input embedding, tied to head.weight")
    assert "head.weight" not in routes


def test_a_linear_layer_that_shares_its_weight_with_an_embedding_is_an_embedding():
    model = nn.Module()
    model.words, model.out = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
    model.out.weight = model.words.weight
    assert rules(route(model)) == {"words.weight": ("adamw", "embedding, tied to out.weight")}


def test_a_plain_model_needs_no_blocks():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert [r.rule for r in route(net)] == ["spectral", "adamw", "spectral", "adamw"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.up = nn.MultiheadAttention(4, 2, bias=False), nn.Linear(4, 8, bias=False)


class Vision(nn.Module):
    """A class of one's own: blocks in a list, or in sequence, between two other linear layers."""

    def __init__(self, container):
        super().__init__()
        self.patch, self.head = nn.Linear(6, 4, bias=False), nn.Linear(4, 10, bias=False)
        blocks = [Attention(), Attention()]
        self.blocks = nn.ModuleList(blocks) if container == "list" else nn.Sequential(*blocks)


@pytest.mark.parametrize("container", ["list", "sequence"])
def test_in_a_class_of_ones_own_the_layers_around_its_blocks_go_to_adamw(container):
    net = Vision(container)
    routes = rules(route(net))
    assert {name for name, (rule, _) in routes.items() if rule == "adamw"} == {"patch.weight", "head.weight"}
    assert routes["head.weight"] == ("adamw", "outside the blocks")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        param_groups(net, aux_lr=0.1)


def test_without_blocks_a_warning_names_the_last_linear_layer():
    conv = nn.Sequential(nn.Conv2d(1, 1, 2), nn.Flatten(), nn.Linear(9, 10))
    said = (
        r"Sequential has no blocks .* last linear layer, 2\.weight \(10 x 9\), is the output layer.*aux=\['2\.weight'\]"
    )
    with pytest.warns(UserWarning, match=said):
        param_groups(conv, aux_lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        param_groups(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 2)), aux_lr=0.1, aux=["1.weight"])
        param_groups(Model(), aux_lr=0.1)


@pytest.mark.parametrize("name", ["soren", "muon"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_projections_that_torchs_attention_stacks_are_three_matrices(name, num_layers):
    """A step of in_proj_weight [3 d, d] is that of three matrices [d, d], alone and in a batch of layers."""
    layers = nn.ModuleList(nn.MultiheadAttention(8, 2, bias=False) for _ in range(num_layers))
    grad = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    grad[:8] *= 1e-2  # each has its own scale
    apart = []
    for layer in layers:
        layer.in_proj_weight.grad = grad
        apart += [nn.Parameter(part.clone()) for part in layer.in_proj_weight.detach().chunk(3)]
    for parameter, part in zip(apart, grad.chunk(3) * num_layers, strict=True):
        parameter.grad = part
    stacked = route(layers)[0]
    assert (stacked.rule, stacked.num_matrices, stacked.matrix_shapes) == ("spectral", 3, {(8, 8): 3})
    settings = {"name": name, "lr": 0.1, "adjust_lr_fn": "match_rms_measured", "aux_lr": 0.1}
    build_optimizer(layers, **settings).step()
    build_optimizer(nn.ParameterList(apart), **settings, matrices="all-2d").step()
    together = torch.cat([layer.in_proj_weight for layer in layers])
    # A batch rounds otherwise, and Muon iterates in bfloat16: 0.2 lr times 2^-8 per product.
    assert torch.allclose(together, torch.cat([*apart]), atol={"soren": 1e-5, "muon": 1e-3}[name])


def test_projections_of_other_widths_are_matrices_of_their_own():
    attention = nn.MultiheadAttention(8, 2, bias=False, kdim=4, vdim=6)
    assert {r.name for r in route(attention) if r.rule == "spectral"} == {
        "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight",
    }  # fmt: skip


def test_a_matrix_that_is_no_linear_layer_goes_to_adamw():
    net = nn.Sequential(nn.Linear(3, 4, bias=False))
    net.table = nn.Parameter(torch.zeros(3, 3))
    net.conv = nn.Conv2d(1, 1, 2, bias=False)
    reasons = {name: reason for name, (_, reason) in rules(route(net)).items()}
    assert reasons["table"] == "not the weight of a linear layer"
    assert reasons["conv.weight"] == "4-dimensional"


def test_frozen_parameters_are_nowhere():
    model = Model()
    model.layers[0].requires_grad_(False)
    assert not any(name.startswith("layers.0") for name in rules(route(model)))


def test_aux_globs_send_matrices_to_adamw():
    routes = rules(route(Model(), aux=["*.down.weight", "embed*"]))
    assert routes["layers.1.down.weight"] == ("adamw", "named by aux '*.down.weight'")
    assert routes["layers.1.up.weight"] == ("spectral", "linear layer")
    with pytest.raises(ValueError, match=r"aux: '\*.dwn.weight' matches no trainable parameter"):
        route(Model(), aux=["*.down.weight", "*.dwn.weight"])


def test_factors_of_adapters_that_are_not_pefts_are_refused():
    model = Model()
    model.layers[0].up.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
    with pytest.raises(ValueError, match=r"layers.0.up.lora_A.default.weight has the name of a LoRA factor, but"):
        route(model)


def test_an_emptied_parameter_is_routed_by_its_true_shape():
    net = nn.Sequential(nn.Linear(3, 4, bias=False))
    net[0].weight.data = torch.empty(0)
    net[0].weight.ds_shape = torch.Size([4, 3])
    (only,) = route(net)
    assert (only.rule, only.shape) == ("spectral", (4, 3))


@pytest.mark.parametrize("tied", [False, True])
def test_every_trainable_parameter_is_in_exactly_one_group(tied):
    model = Model(tied)
    groups = param_groups(model, lr=0.1, aux_lr=0.01, weight_decay=0.2)
    grouped = [p for group in groups for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(model.parameters())
    named = dict(model.named_parameters())
    for group in groups:
        assert all(named[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
    assert [(g["rule"], g["lr"], g["weight_decay"]) for g in groups] == [("spectral", 0.1, 0.2), ("adamw", 0.01, 0.0)]


def test_adamw_trains_a_model_without_matrices():
    norm = nn.LayerNorm(3)
    (group,) = build_optimizer(norm, name="adamw", lr=0.1).param_groups
    assert (group["rule"], group["params"]) == ("adamw", [norm.weight, norm.bias])
    with pytest.raises(ValueError, match=r"LayerNorm has no weight matrix for a spectral optimizer \(1-dimensional"):
        build_optimizer(norm, name="soren", lr=0.1)
    with pytest.raises(ValueError, match="Linear has no trainable parameter"):
        build_optimizer(nn.Linear(3, 3).requires_grad_(False), name="adamw", lr=0.1)


def test_the_routing_table_counts_what_there_is():
    assert routing_table(route(Model(tied=True))) == [
        {"rule": "spectral", "reason": "linear layer", "tensors": 4, "matrices": 4, "numel": 128},
        {"rule": "adamw", "reason": "input embedding, tied to head.weight", "tensors": 1, "matrices": 0, "numel": 40},
        {"rule": "adamw", "reason": "1-dimensional", "tensors": 6, "matrices": 0, "numel": 32},
        {"rule": "adamw", "reason": "outside the blocks", "tensors": 1, "matrices": 0, "numel": 16},
    ]


def test_the_factory_builds_what_is_named_with_its_own_settings():
    model, shared = Model(), {"lr": 0.1, "aux_lr": 0.01, "betas": (0.8, 0.9), "adjust_lr_fn": None}
    own = {"soren": {"map": {"name": "sns", "steps": 9}}, "muon": {"ns_steps": 6}, "htmuon": {"p": 0.5}, "adamw": {}}
    built = {name: build_optimizer(model, name=name, **shared, **settings) for name, settings in own.items()}
    assert [type(o) for o in built.values()] == [Soren, Muon, HTMuon, AdamW]
    first = {name: o.param_groups[0] for name, o in built.items()}
    assert first["soren"]["map"] == {"name": "sns", "steps": 9}
    assert first["muon"]["ns_steps"] == 6
    assert first["htmuon"]["p"] == 0.5
    assert [g["adjust_lr_fn"] for name, g in first.items() if name != "adamw"] == ["none", "original", "original"]
    assert (first["adamw"]["rule"], first["adamw"]["weight_decay"]) == ("adamw", 0.1)
    for optimizer in built.values():
        rest = optimizer.param_groups[1]
        assert (rest["rule"], rest["lr"], rest["weight_decay"], rest["betas"]) == ("adamw", 0.01, 0.0, (0.8, 0.9))


def test_the_other_parameters_have_the_learning_rate_of_the_matrices_unless_they_have_one_of_their_own():
    for name in ("soren", "muon", "htmuon", "adamw"):
        for aux_lr, expected in ((None, 0.1), (0.01, 0.01)):
            groups = build_optimizer(Model(), name=name, lr=0.1, aux_lr=aux_lr).param_groups
            assert [group["lr"] for group in groups] == [0.1, expected]
    message = r"aux_lr: is missing; write aux_lr or lr, .* of the other parameters \(embed.weight, ...\)"
    with pytest.raises(ValueError, match=message):
        param_groups(Model())
