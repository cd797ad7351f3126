"""Fused weights that `split` divides take the steps of projections that are parameters of their own."""

import functools
from dataclasses import replace

import pytest
import torch
from soren_align.optim import build_optimizer
from tests.support.architectures import config_of
from tests.support.experts import (
    FUSED,
    WAYS,
    assert_own_scales,
    assert_same_steps,
    assert_same_steps_on_ranks,
    continued,
    expected,
    reference,
)
from tests.support.parity_configurations import farthest
from tests.support.toy import MINIMAX, RATES, one_process
from torch import nn
from transformers import AutoModelForCausalLM

SPLIT = {"*qkv_proj": ["q", "k", "v"], "*gate_up_proj": ["gate", "up"]}


@pytest.mark.model
@pytest.mark.parametrize("name", FUSED)
def test_blocks_of_one_weight_take_the_steps_of_weights_apart(name):
    assert_same_steps(name)


@pytest.mark.model
def test_a_fused_weight_takes_other_steps_without_split():
    weights, _, _ = one_process(replace(FUSED["projections"], split={}))
    assert farthest(weights, expected("projections")[0]) > 1e-3


@pytest.mark.model
@pytest.mark.parametrize(("adjust_lr_fn", "workspace_mb"), [("match_rms_measured", 0), ("match_rms_adamw", 16)])
def test_each_block_has_the_scale_of_its_own_shape(adjust_lr_fn, workspace_mb):
    assert_own_scales(FUSED["rows"], adjust_lr_fn, workspace_mb)


def steps(model, tokens, split):
    """Three steps, with the config's own sizes of the projections."""
    settings = {"name": "soren", "map": MINIMAX, **RATES, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = build_optimizer(model, **settings, split=split)
    for batch in tokens:
        model(input_ids=batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.model
def test_phi_3_with_split_learns_as_llama_whose_projections_are_separate():
    torch.manual_seed(0)
    configs = (config_of(name, rms_norm_eps=1e-6) for name in ("phi3", "llama"))
    phi, llama = (AutoModelForCausalLM.from_config(config).train() for config in configs)
    parts = {"qkv_proj": (["q_proj", "k_proj", "v_proj"], [32, 16, 16])}
    parts["gate_up_proj"] = (["gate_proj", "up_proj"], [48, 48])

    def separate():
        weights = {}
        for name, weight in phi.state_dict().items():
            layer = name.split(".")[-2]
            names, sizes = parts.get(layer, ([layer], [weight.shape[0]]))
            weights |= {name.replace(layer, n): w for n, w in zip(names, weight.split(sizes), strict=True)}
        return weights

    llama.load_state_dict(separate())
    tokens = torch.randint(3, 99, (3, 2, 12))
    assert torch.allclose(phi(tokens[0]).logits, llama(tokens[0]).logits, atol=1e-6)
    steps(phi, tokens, SPLIT)
    steps(llama, tokens, None)
    assert farthest(separate(), llama.state_dict()) <= 1e-6


SAMPLE = {("rows", "ZeRO 2"), ("projections", "FSDP2")}
CASES = [pytest.param(name, way, marks=[pytest.mark.sample] if (name, way) in SAMPLE else [])
         for name in FUSED for way in WAYS]  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize(("name", "way"), CASES)
def test_blocks_on_two_ranks_take_the_steps_of_weights_apart(rank_pools, name, way):
    assert_same_steps_on_ranks(rank_pools(2), way, FUSED[name], *expected(name))


OF_ROWS = {"map": MINIMAX, "second_moment": "rows", "adjust_lr_fn": "match_rms_measured"}
ROWS = replace(FUSED["projections"], settings=OF_ROWS)
expected_of_rows = functools.cache(lambda: reference(ROWS))


@pytest.mark.rest
@pytest.mark.parametrize("way", WAYS)
def test_blocks_with_moments_of_their_rows_take_the_steps_of_weights_apart(rank_pools, way):
    """NorMuon's second moments, on three ranks, whose shards do not end where a block does."""
    assert_same_steps_on_ranks(rank_pools(3), way, ROWS, *expected_of_rows())


@pytest.mark.model
def test_moments_of_rows_change_the_steps_of_blocks():
    assert farthest(expected_of_rows()[0], expected("projections")[0]) > 1e-3


@pytest.mark.model
def test_a_checkpoint_names_the_blocks_and_continues_with_the_same_ones_alone():
    run = FUSED["projections"]
    checkpoint, _ = continued(run)
    with pytest.raises(ValueError, match=r"group 0 weight_layouts: \['blocks q:32 k:16 v:16', .*\] in the checkpoint"):
        replace(run, split={}).optimizer(run.model()).load_state_dict(checkpoint)
