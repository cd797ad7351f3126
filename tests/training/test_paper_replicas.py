"""Each recipe of llama-c4, qwen3-0.6b and paper-figures on a small model and C4: killed by SIGKILL, then resumed."""

import multiprocessing
import os
import signal

import pytest
from soren_align.core import shipped
from tests.support.c4_replica import replica
from tests.support.rank_pool import PRELOADED
from tests.support.tiny_run import TinyRun, after_step, same, spectra

pytestmark = [pytest.mark.process, pytest.mark.rest]
FAMILIES = ("llama-c4/", "qwen3-0.6b/", "paper-figures/")
NAMES = [name for name in shipped.recipes() if name.startswith(FAMILIES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("replicas")


def train_and_die(path, name, overrides):
    """Train in a process of its own, which SIGKILL ends after step 5 of 6, one after a checkpoint."""
    with after_step(5, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        TinyRun(path, name, *overrides).train()


@pytest.fixture(scope="module")
def context():
    """Processes are forked from one that has imported torch and the training."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(PRELOADED)
    return forked


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_replica_resumes_to_the_bits_of_an_undisturbed_one(name, folder, context, tmp_path):
    overrides = replica(name, folder)
    whole = TinyRun(tmp_path / "whole", name, *overrides)
    whole.train()

    process = context.Process(target=train_and_die, args=(tmp_path / "run", name, overrides))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    resumed = TinyRun(tmp_path / "run", name, *overrides)
    assert resumed.folder.read()["status"] == "training"
    resumed.train()

    record = resumed.folder.read()
    assert (record["status"], record["resumed_from_steps"], record["training"]["steps"]) == ("trained", [4], 6)
    assert record["data"]["train"] == whole.folder.read()["data"]["train"]
    assert same(whole.weights(), resumed.weights())
    num_matrices = {"llama-c4": 2 * 7 + 2, "qwen3-0.6b": 2 * 7 + 1, "paper-figures": 12 * 7 + 2}[name.split("/")[0]]
    assert record["optimizer"]["num_matrices"] == (0 if name.endswith("adamw") else num_matrices)
    if name.startswith("paper-figures/"):
        layers = {"spectra": 2, "log-centered": 1}[name.split("/")[1]]
        assert len(spectra(resumed.folder)) == len(spectra(whole.folder)) == 3 * 7 * layers * 2  # steps, matrices, of
