"""configs/slurm/compare.sbatch on a real Slurm: an array job shares a study between two nodes, also after a requeue."""

import time

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


def test_two_nodes_end_a_study_as_one_process_does_though_one_task_is_requeued(slurm, tmp_path):
    runs.lay_out(tmp_path / "alone", STUDY)
    environment = {**slurm.environment, **runs.environment(tmp_path / "alone")}
    alone = command.run_process(*runs.arguments(STUDY), cwd=tmp_path / "alone", env=environment, timeout=900)
    assert alone.returncode == 0, alone.stderr

    folder = tmp_path / "array"
    runs.lay_out(folder, STUDY)
    array = slurm.submit(folder, *TWO_TASKS, ARRAY_JOB, *runs.arguments(STUDY)[1:])
    tasks = [f"{array}_1", f"{array}_2"]
    end = time.monotonic() + 600
    while len([*folder.glob("run/*/*/*/metrics.jsonl")]) < 2:  # each task trains
        assert time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.1)
    assert {slurm.job(task)["NodeList"] for task in tasks} == {*NODES}
    slurm.call("scontrol", "requeue", tasks[0])
    assert slurm.wait_for_end(tasks[0])["JobState"] == "PENDING"
    slurm.start_soon(tasks[0])
    for task, restarts in zip(tasks, (1, 0), strict=True):
        assert slurm.wait_for_end(task, restarts=restarts)["JobState"] == "COMPLETED", (folder / "log").read_text()
    assert runs.differences(runs.result(tmp_path / "alone/run", STUDY), runs.result(folder / "run", STUDY)) == []
