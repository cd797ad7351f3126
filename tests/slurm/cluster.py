"""Slurm on this machine, in one folder: a controller and two node daemons, without root's files, accounting or cgroups.

`python -m tests.slurm.cluster COMMAND ...` runs a command, such as bash, in the environment of such a cluster.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("127.0.0.1", "127.0.0.2")
"""Names that resolve on any machine: the job script of one run sets MASTER_ADDR to the first."""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
REQUEUE_SECONDS = 10
"""A requeued job waits as long as a credential is valid (cred_expire), by default 120 s."""
# `low` is pre-empted without a warning, `grace` with SIGTERM a minute before.
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.sock,cred_expire={requeue_seconds}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,bf_interval=5
GresTypes=gpu
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
NodeName={nodes[0]} NodeHostname={host} NodeAddr={nodes[0]} Port={ports[1]} CPUs=16 Gres=gpu:1
NodeName={nodes[1]} NodeHostname={host} NodeAddr={nodes[1]} Port={ports[2]} CPUs=16 Gres=gpu:1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=grace Nodes=ALL PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """Return the programs of Slurm and munge that this machine does not have."""
    return [program for program in PROGRAMS if _path_of(program) is None]


def _path_of(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Cluster:
    """A running cluster. environment: of the commands that use it."""

    folder: Path
    environment: dict[str, str]

    def call(self, *command: object) -> str:
        """Return the output of a command, which must succeed."""
        words = [str(word) for word in command]
        process = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        assert process.returncode == 0, f"{words}: {process.stderr}"
        return process.stdout.strip()

    def submit(self, folder: Path, *command: object) -> str:
        """Return the number of a job that sbatch has queued: its options, the job script and the script's arguments.

        The job works in `folder`, where its log is `log`.
        """
        options = [f"--chdir={folder}", f"--output={folder}/log"]
        return self.call("sbatch", "--parsable", *options, *command)

    def job(self, number: str) -> dict[str, str]:
        """Return what scontrol shows of a job, by its names: JobState, Reason, Restarts, ExitCode ..."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, number: str, restarts: int = 0, seconds: float = 600) -> dict[str, str]:
        """Wait until a job has ended, or is pending after more than this number of restarts; return `job` then."""
        end = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in ENDED:
            if job["JobState"] == "PENDING" and int(job["Restarts"]) > restarts:
                break
            assert time.monotonic() < end, f"job {number} is {job['JobState']} ({job['Reason']})"
            time.sleep(0.2)
        return job


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster whose files are in `folder`. At the end its jobs are cancelled and its daemons stopped."""
    (folder / "state").mkdir()
    for node in NODES:
        (folder / f"spool-{node}").mkdir()
    (folder / "gpu").touch()  # a node needs a file for its GPU
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu\n")
    with ExitStack() as listeners:  # all three at once, so that they differ
        sockets = [listeners.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [listener.getsockname()[1] for listener in sockets]
    user, host = str(os.getuid()), socket.gethostname().partition(".")[0]
    names = {"folder": folder, "host": host, "user": user, "requeue_seconds": REQUEUE_SECONDS}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**names, ports=ports, nodes=NODES))
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    munge = {name: f"{folder}/munge.{name}" for name in ("sock", "pid", "log", "seed")}
    files = [f"--socket={munge['sock']}", f"--pid-file={munge['pid']}", f"--log-file={munge['log']}"]
    files += [f"--key-file={key}", f"--seed-file={munge['seed']}"]
    slurm = Cluster(folder, {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"})
    with ExitStack() as daemons:
        # --force: pytest's folder is closed to other users, who could not reach the socket.
        daemons.enter_context(_daemon(slurm, "munged", "--foreground", "--force", *files))
        _wait_for(slurm, lambda: Path(munge["sock"]).exists(), "munge's socket")
        daemons.enter_context(_daemon(slurm, "slurmctld", "-D"))
        for node in NODES:
            daemons.enter_context(_daemon(slurm, "slurmd", "-D", "-N", node))
        _wait_for(slurm, lambda: _states(slurm) == ["idle"] * len(NODES), "two idle nodes")
        try:
            yield slurm
        finally:
            subprocess.run(["scancel", f"--user={user}"], env=slurm.environment)
            _wait_for(slurm, lambda: not slurm.call("squeue", "--noheader"), "the end of the jobs")


@contextmanager
def _daemon(slurm: Cluster, program: str, *options: str) -> Iterator[None]:
    """Run a daemon in the foreground, with its output in the cluster's folder."""
    command = [str(_path_of(program)), *options]
    with (slurm.folder / f"{program}{options[-1] if '-N' in options else ''}.out").open("w") as output:
        process = subprocess.Popen(command, env=slurm.environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _states(slurm: Cluster) -> list[str]:
    """Return the states of the nodes; none before the controller answers."""
    command = ["sinfo", "--noheader", "--partition=low", "--Node", "--format=%t"]
    return subprocess.run(command, env=slurm.environment, capture_output=True, text=True).stdout.split()


def _wait_for(slurm: Cluster, condition, name: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        logs = "\n".join(f"{file.name}: {file.read_text()[-1000:]}" for file in slurm.folder.glob("*.out"))
        assert time.monotonic() < end, f"no {name} after {seconds:.0f} s\n{logs}"
        time.sleep(0.1)


if __name__ == "__main__":
    if missing := missing_programs():
        sys.exit(f"not installed: {', '.join(missing)}; on Debian: apt install slurmctld slurmd slurm-client munge")
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)) as slurm:
        sys.exit(subprocess.run(sys.argv[1:] or ["bash"], env=slurm.environment).returncode)
