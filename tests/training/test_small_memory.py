"""A momentum in bfloat16 and a quantized base in training runs: on one process, on two ranks, killed and resumed."""

import json
import shutil

import pytest
from soren_align.run.folder import read_metrics
from tests.support.tiny_run import TinyRun, same
from tests.support.trainer_jobs import NARROW, QUANTIZED
from tests.support.trainer_parity import furthest, ranks_do, weights


def losses(folder):
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


@pytest.fixture(scope="module")
def two_ranks(rank_pools, tmp_path_factory):
    """The folder of the runs alone, quantized-alone, by one process, and states-ddp, ..., quantized-ddp, by two."""
    folder = tmp_path_factory.mktemp("small-memory")
    TinyRun(folder / "alone", "sft", *NARROW).train()
    TinyRun(folder / "quantized-alone", "sft", *QUANTIZED).train()
    ranks_do(rank_pools(2), "small_memory", folder)
    return folder


@pytest.mark.parametrize("mode", ["ddp", "zero2"])
def test_two_ranks_with_a_bfloat16_momentum_are_close_to_one_process(two_ranks, mode):
    """Not to 2e-6, where a sum over ranks rounds otherwise, a number of the momentum may be the next bfloat16."""
    assert losses(two_ranks / f"states-{mode}") == pytest.approx(losses(two_ranks / "alone"), rel=2e-3)


def test_two_ranks_resume_a_bfloat16_momentum_bit_for_bit(two_ranks):
    assert same(weights(two_ranks / "states-zero2"), weights(two_ranks / "killed-zero2"))


def test_two_ranks_of_ddp_train_on_a_quantized_base_as_one_process(two_ranks):
    alone, on_ranks = (weights(two_ranks / f"quantized-{name}", "adapter_model") for name in ("alone", "ddp"))
    assert furthest(alone, on_ranks) <= 1e-5
    record = json.loads((two_ranks / "quantized-ddp/run.json").read_text())
    assert record["quantization"]["type"] == "nf4, double quantization"


@pytest.mark.rest
@pytest.mark.model
def test_a_run_with_a_bfloat16_momentum_learns_as_with_float32_and_resumes_bit_for_bit(tiny_run):
    more = ("trainer.max_steps=20", "trainer.warmup_steps=2", "trainer.save_steps=10")
    dtypes = ("float32", "bfloat16")
    exact, whole = (tiny_run("sft", *more, f"optimizer.momentum_dtype={d}", name=d) for d in dtypes)
    assert exact.train()
    assert whole.train()
    assert whole.losses() == pytest.approx(exact.losses(), rel=0.01)
    record = whole.folder.read()
    assert record["optimizer"]["groups"][0]["momentum_dtype"] == "bfloat16"
    killed = tiny_run("sft", *more, "optimizer.momentum_dtype=bfloat16", name="killed")
    shutil.copytree(whole.folder.path, killed.folder.path)
    killed.forget_the_end()
    assert killed.train()
    assert killed.folder.read()["resumed_from_steps"] == [10]
    assert same(whole.weights(), killed.weights())
