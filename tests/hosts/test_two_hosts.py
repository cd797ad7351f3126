"""`make test-hosts`: training on two hosts, started as docs/distributed.md shows, and what a lost host is then.

Every message is that of the host that is left, and a minute is the time from the fault to the end of its torchrun.
"""

import os
import re
import subprocess
import sys
import time

import pytest
from soren_align.core.shipped import ROOT
from soren_align.run.folder import RunFolder
from tests.hosts.two_hosts import ADDRESSES, TwoHosts, why_not
from tests.support import command
from tests.support.tiny_run import SHORT
from tests.support.trainer_jobs import GLOBAL, PARITY
from tests.support.trainer_parity import furthest, weights

pytestmark = pytest.mark.hosts

MODES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
STEPS = 6
SETTINGS = (
    *SHORT,
    *PARITY,
    *GLOBAL,
    f"trainer.max_steps={STEPS}",
    "trainer.save_strategy=steps",
    "trainer.ddp_timeout=40",
)
SECONDS = 600
"""For the start of a training and its few steps, on a busy machine."""
SLOW = "16mbit"
"""At which a step of every mode takes seconds, so that a fault comes between steps 3 and 6."""


@pytest.fixture(scope="module")
def allowed():
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def two_hosts(allowed):
    hosts = TwoHosts()
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def reference(allowed, tmp_path_factory):
    """The weights of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    done = command.run_process(*arguments(run, "ddp"), env=environment(), timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return weights(run)


def environment():
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} | own


def arguments(run, mode):
    sets = command.overrides(*SETTINGS, f"run.parallel={mode}", f"run.output_dir={run}")
    return ["sft", "quickstart/sft", "--no-eval", *sets]


def torchrun(mode, *options):
    """The command line of torchrun, up to the arguments of soren-align."""
    program = "tests.hosts.fsdp2" if mode == "fsdp2" else "soren_align"
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", program]


def start(two_hosts, run, mode):
    """Start one rank on each host; returns the two processes of torchrun."""
    started = []
    for number, host in enumerate(two_hosts.hosts):
        static = f"--nnodes=2 --node-rank={number} --nproc-per-node=1 --master-addr=host-a --master-port=29500".split()
        line = host.on(*torchrun(mode, *static), *arguments(run, mode))
        output = open(run.parent / f"{host.name}.txt", "w")  # noqa: SIM115
        started.append(subprocess.Popen(line, env=environment(), stdout=output, stderr=subprocess.STDOUT))
        output.close()
    return started


def output(run, name):
    return (run.parent / f"{name}.txt").read_text()


def steps(run):
    """The steps in metrics.jsonl."""
    file = RunFolder(run).metrics
    return [int(step) for step in re.findall(r'"step": (\d+)', file.read_text())] if file.is_file() else []


@pytest.mark.parametrize("mode", MODES)
def test_two_hosts_take_the_steps_of_one_process(two_hosts, reference, tmp_path, mode):
    run = tmp_path / "run"
    for process in start(two_hosts, run, mode):
        assert process.wait(SECONDS) == 0, output(run, "host-a") + output(run, "host-b")
    difference = furthest(reference, weights(run))
    print(f"{mode}: {difference:.1e}")
    assert difference <= 2e-6


def test_a_slow_cable_is_no_lost_host(two_hosts, reference, tmp_path):
    run = tmp_path / "run"
    two_hosts.slow_down("4mbit")
    begin = time.monotonic()
    for process in start(two_hosts, run, "ddp"):
        assert process.wait(SECONDS) == 0, output(run, "host-a") + output(run, "host-b")
    print(f"slow: {time.monotonic() - begin:.1f} s")
    assert furthest(reference, weights(run)) <= 2e-6


CUT = r"another rank did not answer for 40 s\. Rerun the same command to resume"
ENDED = r"another rank failed \(.+\)"


@pytest.mark.parametrize(("mode", "lost", "message"), [
    ("ddp", "host-a", ENDED),  # which has the store and writes the run folder
    ("fsdp2", "host-b", ENDED),
    ("zero2", None, CUT),
    ("zero3", None, CUT),
])  # fmt: skip
def test_a_lost_host_ends_the_others_and_one_host_resumes(two_hosts, reference, tmp_path, mode, lost, message):
    run = tmp_path / "run"
    two_hosts.slow_down(SLOW)
    processes = dict(zip(ADDRESSES, start(two_hosts, run, mode), strict=True))
    command.wait_for(lambda: 3 in steps(run), processes["host-b"], SECONDS)
    assert STEPS not in steps(run), "too fast for the fault"
    if lost is None:
        two_hosts.cut()
    else:
        two_hosts.hosts[["host-a", "host-b"].index(lost)].kill()
    fault = time.monotonic()
    for left in ("host-a", "host-b"):
        if left == lost:
            continue
        assert processes[left].wait(fault + 60 - time.monotonic()) == 1
        print(f"{mode}: {left} ended after {time.monotonic() - fault:.1f} s")
        text = output(run, left)
        assert re.search(message, text), text
        assert "Traceback" not in text.split("Root Cause")[-1]
    if lost != "host-a":  # rank 0 writes
        assert RunFolder(run).record()["last_error"] in output(run, "host-a")

    host, count = two_hosts.hosts[lost == "host-a"], 1
    if mode == "fsdp2":
        count = 2  # reshard does not support it
    else:
        host.run(f"{sys.executable} -m soren_align reshard {run}")
    line = host.on(*torchrun(mode, "--standalone", f"--nproc-per-node={count}"), *arguments(run, mode))
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert RunFolder(run).record()["resumed_from_steps"] in ([2], [4])
    difference = furthest(reference, weights(run))
    print(f"{mode}: resumed {difference:.1e}")
    assert difference <= 2e-6
