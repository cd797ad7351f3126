"""What is DeepSpeed's alone: what it cannot place, and bfloat16."""

import pytest
import torch
from tests.support import toy_jobs as jobs
from tests.support.toy import Run


@pytest.mark.parametrize(("stage", "config", "fault", "message"), [
    (2, {"zero_optimization": {"round_robin_gradients": True}}, None, "round_robin_gradients is not supported"),
    (2, {}, "another optimizer", "DeepSpeed would use SGD instead of the optimizer"),
    (2, {}, "a number changed", "matrices per rank in an unexpected place"),
    (3, {}, "a number changed", "matrices per rank in an unexpected place"),
])  # fmt: skip
def test_what_cannot_be_placed_is_refused_on_every_rank(ranks, stage, config, fault, message):
    for rank, answer in enumerate(ranks.run(jobs.refused_deepspeed, stage, config, fault)):
        assert message in answer
        if fault == "a number changed":
            assert ("none on this rank" in answer) == (rank != 1)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("bucket_mb", [0.05, 512])
def test_the_exchange_takes_no_more_memory_than_it_says(ranks, stage, bucket_mb):
    for measured, said in ranks.run(jobs.measured_exchange, stage, Run(bucket_mb=bucket_mb)):
        largest = 131 * 48 * 4
        assert said <= 3 * max(bucket_mb * 2**20, largest)
        # Beside the rounds' buffers: a matrix, put together to be mapped, and the average of a piece on its way there.
        assert said <= measured <= said + 2 * largest


def test_bfloat16_models_have_the_losses_of_each_other_and_float32_momentum(ranks):
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    # stage 1 with these is DeepSpeed's BF16_Optimizer, which steps all groups in one call
    found = {stage: ranks.run(jobs.deepspeed, stage, Run(dtype=torch.bfloat16), config) for stage in (1, 2, 3)}
    # as a trainer logs them: averaged over the ranks and the micro-batches of a step
    losses = {stage: torch.tensor([result.losses for result in results]).mean(dim=0).view(-1, 2).mean(dim=1)
              for stage, results in found.items()}  # fmt: skip
    print({stage: float((losses[stage] - losses[2]).abs().max()) for stage in (1, 3)})
    assert torch.allclose(losses[3], losses[2], atol=1e-3, rtol=0)
    assert torch.allclose(losses[1], losses[2], atol=1e-3, rtol=0)
    assert {dtype for results in found.values() for r in results for dtype in r.momentum_dtypes} == {torch.float32}


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_the_shipped_configs_average_bfloat16_gradients_in_float32(ranks, name):
    """A map lifts what rounding leaves in small singular values; the more ranks, the more sums in bfloat16 leave."""
    for counts in ranks.run(jobs.gradient_dtypes, name):
        assert set(counts) == {torch.float32}
        assert counts[torch.float32] > 50_000, "all gradients of the toy"
