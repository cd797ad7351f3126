"""8-bit states and a quantized base in training runs: on one process, on two ranks, killed and resumed."""

import json
import shutil

import pytest
from soren_align.run.folder import read_metrics
from tests.support.tiny_run import TinyRun, same
from tests.support.trainer_jobs import EIGHT_BITS, QUANTIZED
from tests.support.trainer_parity import furthest, ranks_do, weights


def losses(folder):
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


@pytest.fixture(scope="module")
def two_ranks(rank_pools, tmp_path_factory):
    """The folder of the runs alone, quantized-alone, by one process, and states-ddp, ..., quantized-ddp, by two."""
    folder = tmp_path_factory.mktemp("small-memory")
    TinyRun(folder / "alone", "sft", *EIGHT_BITS).train()
    TinyRun(folder / "quantized-alone", "sft", *QUANTIZED).train()
    ranks_do(rank_pools(2), "small_memory", folder)
    return folder


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2"])
def test_two_ranks_with_8_bit_states_are_close_to_one_process(two_ranks, mode):
    """Not to 2e-6, as with exact gradients: where a sum over ranks rounds otherwise, a number may get the next code."""
    assert losses(two_ranks / f"states-{mode}") == pytest.approx(losses(two_ranks / "alone"), rel=2e-3)


def test_two_ranks_resume_8_bit_states_bit_for_bit(two_ranks):
    assert same(weights(two_ranks / "states-zero2"), weights(two_ranks / "killed-zero2"))


def test_two_ranks_of_ddp_train_on_a_quantized_base_as_one_process(two_ranks):
    alone, on_ranks = (weights(two_ranks / f"quantized-{name}", "adapter_model") for name in ("alone", "ddp"))
    assert furthest(alone, on_ranks) <= 1e-5
    record = json.loads((two_ranks / "quantized-ddp/run.json").read_text())
    assert record["quantization"]["type"] == "nf4, double quantization"


@pytest.mark.rest
@pytest.mark.model
@pytest.mark.parametrize("name", ["soren", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_run_with_8_bit_states_learns_as_with_float32_and_resumes_bit_for_bit(tiny_run, name):
    more = (f"optimizer.name={name}", "trainer.max_steps=20", "trainer.warmup_steps=2", "trainer.save_steps=10")
    exact, whole = (tiny_run("sft", *more, f"optimizer.states={s}", name=str(s)) for s in ("null", "8bit"))
    assert exact.train()
    assert whole.train()
    assert whole.losses() == pytest.approx(exact.losses(), rel=0.01)
    record = whole.folder.read()
    assert record["optimizer"]["groups"][0]["states"] == "8bit"
    killed = tiny_run("sft", *more, "optimizer.states=8bit", name="killed")
    shutil.copytree(whole.folder.path, killed.folder.path)
    killed.forget_the_end()
    assert killed.train()
    assert killed.folder.read()["resumed_from_steps"] == [10]
    assert same(whole.weights(), killed.weights())
