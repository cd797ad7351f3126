"""Adapters on two ranks of DDP and of ZeRO 2 take the steps of one process; DPO resumes from what they saved."""

import pytest
from tests.support.tiny_run import TinyRun
from tests.support.trainer_jobs import ADAPTERS
from tests.support.trainer_parity import furthest, ranks_do, weights


@pytest.fixture(scope="module")
def runs(rank_pools, tmp_path_factory):
    """The folder of the runs alone-sft and alone-dpo, by one process, and of ddp-sft, zero2-dpo, ... by two ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    TinyRun(folder / "alone-sft", "sft-lora", *ADAPTERS).train()
    TinyRun(folder / "alone-dpo", "dpo-lora", *ADAPTERS, f"model.name_or_path={folder / 'alone-sft/model'}").train()
    ranks_do(rank_pools(2), "adapters", folder)
    return folder


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_two_ranks_take_the_steps_of_one_process(runs, parallel, task):
    alone, found = (weights(runs / f"{way}-{task}", "adapter_model") for way in ("alone", parallel))
    assert found.keys() == alone.keys()
    # float32 sums in another order, and A's first gradients are rounding itself: B is small
    assert furthest(found, alone) <= 1e-5
