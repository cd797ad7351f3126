"""Under DeepSpeed itself, N ranks take the steps of one."""

import jobs
import pytest
import torch
from test_parity import TOLERANCE, farthest, reference
from toy import Run

pytest.importorskip("deepspeed", reason="needs DeepSpeed, which soren-align does not require")

OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("stage", "config", "run"),
    [
        (1, {}, Run()),
        (2, {}, Run()),
        (3, {}, Run()),
        (3, {"zero_optimization": {"sub_group_size": 20000}}, Run()),
        (1, OFFLOAD, Run()),
        (2, OFFLOAD, Run()),
        (3, OFFLOAD, Run()),
        (2, {}, Run(frozen=("0.q", "1.up"))),
        (3, {}, Run(frozen=("0.q", "1.up"))),
        (2, {}, Run({"spectral_map": "sns", "adjust_lr_fn": "match_rms_adamw", "lr": 1e-2})),
        (3, {}, Run({"spectral_map": "sns", "adjust_lr_fn": "match_rms_adamw", "lr": 1e-2})),
    ],
    ids=str,
)
def test_n_ranks_take_the_steps_of_one(ranks, stage, config, run):
    expected, norms, num_maps = reference(run)
    assert min(norms) > 1.2 * run.clip
    results = ranks.run(jobs.deepspeed, stage, run, config)
    difference = max(farthest(result.weights, expected) for result in results)
    print(f"\nstage {stage}, {ranks.num_ranks} ranks, {config}: {difference:.1e}")
    assert difference <= TOLERANCE
    assert sum(result.num_maps for result in results) == num_maps
    assert all(result.state_numel == result.weights_numel for result in results)
    assert all(result.peak_bytes <= 3 * max(run.round_mb * 2**20, 131 * 48 * 4) for result in results)


def test_without_the_clip_they_do_not(ranks):
    result, *_ = ranks.run(jobs.deepspeed, 2, Run(clip=1e9), {})
    assert farthest(result.weights, reference(Run())[0]) > 1e-4


@pytest.mark.parametrize(
    ("stage", "config", "fault", "message"),
    [
        (2, {"zero_optimization": {"round_robin_gradients": True}}, None, "DeepSpeed's round_robin_gradients is on"),
        (2, {}, "another optimizer", "DeepSpeed would step SGD, not our optimizer"),
        (2, {}, "a number changed", "matrices per rank elsewhere than expected"),
        (3, {}, "a number changed", "matrices per rank elsewhere than expected"),
    ],
)
def test_what_cannot_be_placed_is_refused_on_every_rank(ranks, stage, config, fault, message):
    for rank, answer in enumerate(ranks.run(jobs.refused_deepspeed, stage, config, fault)):
        assert answer is not None
        assert message in answer
        if fault == "a number changed":
            assert ("none of them here" in answer) == (rank != 1)


def test_bfloat16_models_have_the_losses_of_each_other_and_float32_momentum(ranks):
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    # stage 1 with these is DeepSpeed's BF16_Optimizer, which steps all groups in one call
    found = {stage: ranks.run(jobs.deepspeed, stage, Run(dtype=torch.bfloat16), config) for stage in (1, 2, 3)}
    # as a trainer logs them: averaged over the ranks and the micro-batches of a step
    losses = {
        stage: torch.tensor([result.losses for result in results]).mean(dim=0).view(-1, 2).mean(dim=1)
        for stage, results in found.items()
    }
    print({stage: float((losses[stage] - losses[2]).abs().max()) for stage in (1, 3)})
    assert torch.allclose(losses[3], losses[2], atol=1e-3, rtol=0)
    assert torch.allclose(losses[1], losses[2], atol=1e-3, rtol=0)
    assert {dtype for results in found.values() for r in results for dtype in r.momentum_dtypes} == {torch.float32}
