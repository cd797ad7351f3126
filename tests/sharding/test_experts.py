"""Experts that transformers stores together take the steps of experts that are matrices of their own."""

import pytest
from tests.support.experts import (
    MIXTURES,
    OTHERS,
    RUNS,
    WAYS,
    assert_own_scales,
    assert_same_steps,
    assert_same_steps_on_ranks,
    continued,
    expected,
)


@pytest.mark.model
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, marks=[] if a in ("gpt_oss", "jetmoe") else [pytest.mark.slow]) for a in (*MIXTURES, *OTHERS)],
)
def test_experts_stored_together_take_the_steps_of_experts_apart(architecture):
    assert_same_steps(architecture)


@pytest.mark.model
@pytest.mark.parametrize(("adjust_lr_fn", "workspace_mb"), [("match_rms_measured", 0), ("match_rms_adamw", 16)])
def test_each_half_has_its_own_scale_in_a_batch_and_alone(adjust_lr_fn, workspace_mb):
    assert_own_scales(RUNS["gpt_oss"], adjust_lr_fn, workspace_mb)


SAMPLE = {("mixtral", "DDP"), ("gpt_oss", "ZeRO 2")}
OTHER_CASES = [("gpt_oss", way) for way in WAYS if way != "ZeRO 2"] + [
    ("qwen3_moe", "FSDP2"),
    ("deepseek_v3", "ZeRO 3"),
]
"""Every way with the experts that are stored transposed, every other mixture in one way."""
CASES = [*(pytest.param(*case, marks=[pytest.mark.sample]) for case in sorted(SAMPLE)), *OTHER_CASES]


@pytest.mark.rest
@pytest.mark.parametrize(("architecture", "way"), CASES)
def test_experts_on_two_ranks_take_the_steps_of_experts_apart(rank_pools, architecture, way):
    assert_same_steps_on_ranks(rank_pools(2), way, RUNS[architecture], *expected(architecture))


@pytest.mark.model
def test_a_checkpoint_of_experts_continues_bit_for_bit_and_only_if_they_are_stored_so():
    checkpoint, again = continued(RUNS["gpt_oss"])
    group = checkpoint["param_groups"][0]
    group["weight_layouts"] = dict.fromkeys(group["weight_layouts"], "linear")
    with pytest.raises(ValueError, match="group 0 weight_layouts"):
        again.load_state_dict(checkpoint)
