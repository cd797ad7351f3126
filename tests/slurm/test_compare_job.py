"""configs/slurm/compare.sbatch on a real Slurm: an array job shares a study between two nodes, also after a requeue."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from soren_align.core.shipped import ROOT
from tests.slurm.cluster import NODES
from tests.soak import runs
from tests.support import command

pytestmark = pytest.mark.slurm

ARRAY_JOB = ROOT / "configs/slurm/compare.sbatch"
# What a user edits in the script. A node has one GPU, so that the two tasks run on different nodes.
TWO_TASKS = ("--array=1-2", "--gpus=1", "--cpus-per-task=1")
STUDY = runs.CONFIGS["compare"]


@pytest.fixture(scope="module")
def undisturbed(slurm, tmp_path_factory):
    """The study's result by one process, without Slurm."""
    folder = tmp_path_factory.mktemp("study") / "alone"
    runs.lay_out(folder, STUDY)
    environment = {**slurm.environment, **runs.environment(folder)}
    alone = command.run_process(*runs.arguments(STUDY), cwd=folder, env=environment, timeout=900)
    assert alone.returncode == 0, alone.stderr
    return runs.result(folder / "run", STUDY)


def requeue(slurm, task):
    slurm.call("scontrol", "requeue", task)


def stop(slurm, task):
    slurm.call("scancel", "--signal=TERM", task)


def kill(slurm, task):
    """Kill soren-align itself: scancel --signal=KILL would cancel the job."""
    array, _, number = task.partition("_")
    names = {f"SLURM_ARRAY_JOB_ID={array}".encode(), f"SLURM_ARRAY_TASK_ID={number}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            is_of_task = names <= {*(process / "environ").read_bytes().split(b"\0")}
            if is_of_task and b"soren_align\0compare\0" in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.parametrize(("disturb", "restarts", "state"), [
    (requeue, 1, "COMPLETED"),
    (stop, 1, "COMPLETED"),
    (kill, 0, "FAILED"),  # the other task ends the study
])  # fmt: skip
def test_two_nodes_end_a_study_as_one_process_does_though_one_task_is_disturbed(
    slurm, undisturbed, tmp_path, disturb, restarts, state
):
    folder = tmp_path / "array"
    runs.lay_out(folder, STUDY)
    array = slurm.submit(folder, *TWO_TASKS, ARRAY_JOB, *runs.arguments(STUDY)[1:])
    tasks = [f"{array}_1", f"{array}_2"]
    end = time.monotonic() + 600
    while len([*folder.glob("run/*/*/*/metrics.jsonl")]) < 2:  # each task trains
        assert time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.1)
    assert {slurm.job(task)["NodeList"] for task in tasks} == {*NODES}
    disturb(slurm, tasks[0])
    if restarts:
        assert slurm.wait_for_end(tasks[0])["JobState"] == "PENDING"
    log = folder / "log"
    assert slurm.wait_for_end(tasks[0], restarts=restarts)["JobState"] == state, log.read_text()
    assert slurm.wait_for_end(tasks[1])["JobState"] == "COMPLETED", log.read_text()
    assert slurm.job(tasks[0])["Restarts"] == str(restarts)
    assert runs.differences(undisturbed, runs.result(folder / "run", STUDY)) == []
