"""Recipes of llama-c4, qwen3-0.6b and paper-figures on a small model and C4 resume to the bits of an undisturbed run.

One for each optimizer, map and reading: the others of a family differ from these in sizes, rates and steps alone
(tests/planning/test_c4_plans.py and test_qwen3_plans.py).
"""

import pytest
from tests.support.c4_replica import replica
from tests.support.tiny_run import TinyRun, same, spectra, stop_after

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.rest]
NUM_MATRICES = {
    "llama-c4/60m-soren": 2 * 7 + 2, "llama-c4/135m-muon": 2 * 7 + 2, "llama-c4/350m-released-soren": 2 * 7 + 2,
    "qwen3-0.6b/scratch-htmuon": 2 * 7 + 1, "qwen3-0.6b/pretrained-released-exact": 2 * 7 + 1,
    "qwen3-0.6b/pretrained-adamw": 0, "paper-figures/spectra": 12 * 7 + 2, "paper-figures/log-centered": 12 * 7 + 2,
}  # fmt: skip


@pytest.mark.parametrize("name", NUM_MATRICES)
def test_a_killed_replica_resumes_to_the_bits_of_an_undisturbed_one(name, tmp_path):
    overrides = replica(name, tmp_path / "replica")
    whole = TinyRun(tmp_path / "whole", name, *overrides)
    whole.train()
    stop_after(lambda: TinyRun(tmp_path / "run", name, *overrides), 5)
    resumed = TinyRun(tmp_path / "run", name, *overrides)
    resumed.train()

    record = resumed.folder.read()
    assert (record["status"], record["resumed_from_steps"], record["training"]["steps"]) == ("trained", [4], 6)
    assert record["data"]["train"] == whole.folder.read()["data"]["train"]
    assert same(whole.weights(), resumed.weights())
    assert record["optimizer"]["num_matrices"] == NUM_MATRICES[name]
    if name.startswith("paper-figures/"):
        layers = {"spectra": 2, "log-centered": 1}[name.split("/")[1]]
        assert len(spectra(resumed.folder)) == len(spectra(whole.folder)) == 3 * 7 * layers * 2  # steps, matrices, of
