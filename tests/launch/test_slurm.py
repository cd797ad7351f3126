"""The job script of one run, with stand-ins for Slurm's commands: a job that a signal stopped is queued again.

tests/slurm has the same and more on a real Slurm, where it is installed.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from soren_align.core import shipped
from soren_align.run.folder import RunFolder
from tests.support import command
from tests.support.forks import free_port
from tests.support.run_folders import finished_run

TRAIN_JOB = shipped.ROOT / "configs/slurm/train.sbatch"
# As srun --kill-on-bad-exit=1: when a task has failed, the others get SIGTERM; the code is the highest.
SRUN = """
import os, pathlib, subprocess, sys, time

def start(rank):
    env = {**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2"}
    return subprocess.Popen(sys.argv[2:], env=env)

assert sys.argv[1] == "--kill-on-bad-exit=1"
tasks = [start(rank) for rank in range(2)]
pathlib.Path("tasks").write_text(" ".join(str(task.pid) for task in tasks))
while (codes := [task.poll() for task in tasks]).count(None):
    if any(codes):
        for task in tasks:
            task.send_signal(15)
        time.sleep(0.2)
    time.sleep(0.005)
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SQUEUE = 'echo "${JOB_STATE:-RUNNING}"'
SCONTROL = """
if [ "$1 $2" = "show hostnames" ]; then echo 127.0.0.1
elif [ "$1 $2" = "show job" ]; then echo "PreemptTime=${PREEMPT_TIME:-None}"
else echo "$@" >> requeued; fi"""
PYTHON = f'exec "{sys.executable}"'


@pytest.fixture
def submit(tmp_path):
    """submit(program, *arguments) starts the script; `program` is soren-align or its stand-in."""
    jobs = []

    def start(soren_align, *arguments, **environment):
        (tmp_path / "bin").mkdir()
        (tmp_path / "srun.py").write_text(SRUN)
        programs = {"scontrol": SCONTROL, "squeue": SQUEUE, "soren-align": soren_align}
        programs |= {"srun": f'{PYTHON} {tmp_path}/srun.py "$@"'}
        for name, text in programs.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node", "SLURM_CPUS_PER_TASK": "2", **environment}
        env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "MASTER_PORT": str(free_port()), **slurm}
        job = subprocess.Popen(["bash", TRAIN_JOB, *map(str, arguments)], cwd=tmp_path, env=env, stderr=subprocess.PIPE,
                               text=True, start_new_session=True)  # fmt: skip
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


STOPPING = 'touch "$SOREN_ALIGN_STOPPED"'


@pytest.mark.process
@pytest.mark.parametrize(("program", "code", "is_requeued"), [
    ("exit 0", 0, False),
    ("exit 2", 2, False),
    # One task fails, and srun stops the other one.
    ("[ $SLURM_PROCID = 1 ] || exec sleep 30; kill -9 $$", 143, False),
    ("[ $SLURM_PROCID = 1 ] || exec sleep 30; exit 130", 143, False),
    (f"{STOPPING}; [ $SLURM_PROCID = 1 ] || exec sleep 30; exit 130", 143, True),
    (f"{STOPPING}; [ $SLURM_PROCID = 1 ] || exec sleep 30; kill -9 $$", 143, True),
])  # fmt: skip
def test_a_job_is_queued_again_after_a_stop_whatever_srun_returns(submit, tmp_path, program, code, is_requeued):
    # srun may stop one task of "exit 2" before it exits itself.
    assert submit(program).wait() in {code, 143 if code else 0}
    assert (tmp_path / "requeued").exists() == is_requeued
    assert not [*tmp_path.glob(".soren-align-stopped*")]


@pytest.mark.process
@pytest.mark.parametrize(("program", "is_requeued"), [("exit 0", False), ("exit 143", True)])
def test_a_job_that_is_preempted_before_its_first_step_is_queued_again(submit, tmp_path, program, is_requeued):
    submit(program, PREEMPT_TIME="2026-11-27T09:15:21").wait()
    assert (tmp_path / "requeued").exists() == is_requeued


@pytest.mark.process
def test_a_job_that_scancel_or_slurm_ended_is_not_queued_again(submit, tmp_path):
    assert submit(f"{STOPPING}; exit 130", JOB_STATE="COMPLETING").wait() in {130, 143}  # as above
    assert not (tmp_path / "requeued").exists()
    assert not [*tmp_path.glob(".soren-align-stopped*")]


@pytest.mark.process
def test_ranks_that_slurm_stops_leave_a_checkpoint_and_a_job_that_is_queued_again(submit, tmp_path):
    run = RunFolder(tmp_path / "run")
    changes = command.overrides(f"run.output_dir={run}", "trainer.max_steps=100000", "trainer.eval_strategy=no")
    job = submit(f'{PYTHON} -m soren_align "$@"', "sft", "quickstart/sft", "--no-eval", *changes)
    while not (run.metrics.is_file() and run.metrics.stat().st_size):
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.05)
    for process in (tmp_path / "tasks").read_text().split():
        os.kill(int(process), signal.SIGTERM)
    said = job.communicate(timeout=300)[1]
    assert job.returncode != 0
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert run.read()["last_error"] == "stopped by a signal"
    assert len(run.complete_checkpoints()) == 1
    assert "checkpoint saved; rerun the same command to resume" in said
    assert "Traceback" not in said


@pytest.mark.process
def test_a_refusal_by_the_first_rank_ends_all_ranks_without_the_launcher(tmp_path):
    run = finished_run(tmp_path / "run")
    arguments = ["sft", "quickstart/sft", "--no-eval", *command.overrides(f"run.output_dir={run}")]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    tasks = [
        command.start(*arguments, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    for task in tasks:
        said = task.communicate(timeout=300)[1]  # a rank that waits gives up after 1800
        assert task.returncode == 2, said
        assert "contains a finished run" in said
        assert "Traceback" not in said
    assert run.read()["last_error"] is None
