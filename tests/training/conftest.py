import pytest
from tests.support.tiny_run import TinyRun, same, stop_after
from tests.support.trainer_parity import ranks_do


@pytest.fixture
def tiny_run(tmp_path):
    def make(task="sft", *overrides, name="run"):
        return TinyRun(tmp_path / name, task, *overrides)

    return make


@pytest.fixture
def resumed(tiny_run):
    """resumed(step, task, *overrides): an uninterrupted run, and one that was killed after `step` and resumed.

    They have the same weights. `step` is one after a checkpoint.
    """

    def make(step, *keys):
        whole = tiny_run(*keys, name="whole")
        assert whole.train()
        stop_after(lambda: tiny_run(*keys), step)
        run = tiny_run(*keys)
        assert run.train()
        assert run.folder.read()["resumed_from_steps"] == [step - 1]
        assert same(whole.weights(), run.weights())
        return whole, run

    return make


@pytest.fixture(scope="module")
def two_ranks(request, rank_pools, tmp_path_factory):
    """The folder in which two ranks have done the job of trainer_jobs.py that the module names, and its results."""
    folder = tmp_path_factory.mktemp(request.module.JOB)
    return folder, ranks_do(rank_pools(2), request.module.JOB, folder)
