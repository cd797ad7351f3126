"""configs/slurm/train.sbatch on a real Slurm: whatever takes the nodes away, the job resumes by itself."""

import json
import subprocess
import time

import pytest
from soren_align.core.shipped import ROOT
from soren_align.run.folder import RunFolder
from tests.soak import runs

pytestmark = pytest.mark.slurm

TRAIN_JOB, EVAL_JOB = ROOT / "configs/slurm/train.sbatch", ROOT / "configs/slurm/eval.sbatch"
# What a user edits in the script; sbatch takes it from the command line as well. The last one of an option counts.
ONE_GPU = ("--gpus-per-node=1", "--cpus-per-task=1")
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", *ONE_GPU)
LOADING = "loading   torch"
"""Begins the line that a training prints before it imports its libraries."""
# Checkpoints are saved when a signal stops the run, and at no other time.
STEPS = ("trainer.save_steps=1000000", "trainer.eval_strategy=no", *runs.TWO)


def config(num_steps, parallel="zero2", ranks=2):
    """A training."""
    return runs.Config("sft", (*STEPS, f"run.parallel={parallel}", f"trainer.max_steps={num_steps}"), ranks=ranks)


@pytest.fixture
def submit(slurm, tmp_path):
    """submit(config, *options, name) -> the number of the job, and its RunFolder in a folder of its own."""

    def start(config, *options, name="case"):
        if not (tmp_path / name).exists():
            runs.lay_out(tmp_path / name, config)
        number = slurm.submit(tmp_path / name, *TWO_NODES, *options, TRAIN_JOB, *runs.arguments(config))
        return number, RunFolder(tmp_path / name / "run")

    return start


def wait_for_steps(slurm, number, run):
    """Wait until a running job has taken three steps more than the run has now."""

    def lines():
        return len(run.metrics.read_text().splitlines()) if run.metrics.exists() else 0

    first, end = lines(), time.monotonic() + 600
    while lines() < first + 3:
        state = slurm.job(number)["JobState"]
        assert state in ("PENDING", "CONFIGURING", "RUNNING"), (run.path.parent / "log").read_text()
        assert time.monotonic() < end, f"job {number}, {state}, takes no step"
        time.sleep(0.1)


PREEMPTING = ("srun", "--partition=high", "--nodes=2", "--gpus-per-node=1", "true")


def preempt(slurm, number, run):
    slurm.call(*PREEMPTING)


def preempt_at_the_start(slurm, number, run):
    """Pre-empt a job that has been requeued, before its first step.

    Slurm takes up to half a minute to pre-empt, and the training may take less: the ranks are stopped until then.
    """
    log, lines, end = run.path.parent / "log", run.metrics.read_text(), time.monotonic() + 600
    starts = log.read_text().count(LOADING)
    while log.read_text().count(LOADING) == starts:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    slurm.call("scancel", "--signal=STOP", number)
    with subprocess.Popen(PREEMPTING, env=slurm.environment) as preempting:
        while slurm.job(number)["PreemptTime"] == "None" and preempting.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.1)
        slurm.call("scancel", "--signal=CONT", number)
    assert preempting.returncode == 0
    assert run.metrics.read_text() == lines, "it has taken a step"


def requeue(slurm, number, run):
    slurm.call("scontrol", "requeue", number)


def signal_the_script(slurm, number, run):
    slurm.call("scancel", "--batch", "--signal=TERM", number)


def signal_the_ranks(slurm, number, run):
    slurm.call("scancel", "--signal=TERM", number)


def lose_a_node(slurm, number, run):
    slurm.call("scontrol", "update", "NodeName=127.0.0.2", "State=DOWN", "Reason=test")
    slurm.call("scontrol", "update", "NodeName=127.0.0.2", "State=RESUME")


def reach_the_time_limit(slurm, number, run):
    """Shorten the limit, in place of waiting: Slurm sends the warning when it next compares the time, every 30 s."""
    job, end = slurm.job(number), time.monotonic() + 35
    slurm.call("scancel", "--signal=STOP", number)  # so that it takes no steps until then
    slurm.call("scontrol", "update", f"JobId={number}", "TimeLimit=10")
    while slurm.job(number)["JobState"] == "RUNNING" and time.monotonic() < end:
        time.sleep(0.2)
    if slurm.job(number)["JobState"] == "RUNNING":
        slurm.call("scancel", "--signal=CONT", number)
    slurm.wait_for_end(number, restarts=int(job["Restarts"]))
    slurm.call("scontrol", "update", f"JobId={number}", "TimeLimit=60")


@pytest.mark.parametrize(("parallel", "ranks", "partition", "disturbances"), [
    ("ddp", 1, "low", (preempt, requeue, reach_the_time_limit)),
    ("ddp", 2, "grace", (preempt, preempt_at_the_start, signal_the_script)),
    ("zero2", 2, "low", (preempt, signal_the_ranks, lose_a_node)),
])  # fmt: skip
def test_a_disturbed_job_ends_with_the_weights_of_an_undisturbed_one(
    slurm, submit, parallel, ranks, partition, disturbances
):
    training = config(100 * len(disturbances), parallel, ranks)
    options = (f"--nodes={ranks}", f"--partition={partition}", "--time=60", "--signal=TERM@600")
    number, undisturbed = submit(training, *options, name="undisturbed")
    assert slurm.wait_for_end(number)["JobState"] == "COMPLETED"
    number, run = submit(training, *options)
    log = run.path.parent / "log"
    for count, disturb in enumerate(disturbances):
        if disturb is not preempt_at_the_start:
            wait_for_steps(slurm, number, run)
        disturb(slurm, number, run)
        assert slurm.wait_for_end(number, restarts=count)["JobState"] == "PENDING", (disturb, log.read_text())
    job = slurm.wait_for_end(number, restarts=len(disturbances))
    assert job["JobState"] == "COMPLETED", log.read_text()
    assert job["Restarts"] == str(len(disturbances))
    assert runs.differences(*(runs.result(folder.path, training) for folder in (undisturbed, run))) == []
    assert len({*run.read()["resumed_from_steps"]}) == len({*disturbances} - {preempt_at_the_start})
    assert not [*run.path.parent.glob(".soren-align-stopped*")]
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("warning", ["TERM@600", "B:TERM@600", "B:USR1@600"])
def test_a_job_resumes_after_its_time_limit_but_not_after_scancel(slurm, submit, warning):
    number, run = submit(config(10**6), f"--signal={warning}", "--time=60")
    wait_for_steps(slurm, number, run)
    slurm.call("scontrol", "update", f"JobId={number}", "TimeLimit=10")  # Slurm compares the time every 30 s
    assert slurm.wait_for_end(number)["JobState"] == "PENDING"
    assert run.read()["last_error"] == "stopped by a signal"
    (checkpoint,) = run.complete_checkpoints()
    slurm.call("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    wait_for_steps(slurm, number, run)
    slurm.call("scancel", number)
    assert slurm.wait_for_end(number, restarts=1)["JobState"] == "CANCELLED"
    assert run.complete_checkpoints()[-1] != checkpoint
    assert run.read()["last_error"] == "stopped by a signal"
    assert not [*run.path.parent.glob(".soren-align-stopped*")]


def test_an_evaluation_of_its_own_follows_the_training_and_no_machine_waits(slurm, submit):
    trained, run = submit(config(8, parallel="ddp"))
    folder = run.path.parent
    follows = f"--dependency=afterok:{trained}"
    job = slurm.submit(folder, *ONE_GPU, follows, EVAL_JOB, "run", "--suite", "quickstart", "--limit", "4")
    assert slurm.job(job)["JobState"] == "PENDING"
    assert slurm.wait_for_end(trained)["JobState"] == "COMPLETED"
    assert not run.path.joinpath("eval").exists()
    assert slurm.wait_for_end(job)["JobState"] == "COMPLETED", (folder / "log").read_text()
    (results,) = run.path.glob("eval/*/results.json")
    assert len(json.loads(results.read_text())["rows"]) == 2  # the model and its start
