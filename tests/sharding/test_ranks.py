"""Ranks wait for the first one as long as it lives, and a rank that is lost is a sentence on the others."""

import contextlib
import multiprocessing
import os
import signal
import time

import pytest
import torch
from soren_align.core.errors import LostRankError, UserError, as_user_error, machine_failure
from soren_align.sharding import ranks
from tests.support.forks import free_port
from tests.support.rank_pool import ENVIRONMENT, PRELOADED

TIMEOUT_SECONDS = 2.0  # of a collective
SECONDS = 40  # within which all ranks must have ended, on a busy machine


def longer(group):
    """The first rank works longer than a collective may take."""
    with group.main_process_first():
        if group.is_first:
            time.sleep(2 * TIMEOUT_SECONDS)
    group.barrier()


def killed(group):
    with group.main_process_first():
        os.kill(os.getpid(), signal.SIGKILL)


def refused(group):
    with group.main_process_first():
        raise UserError("write this")


def defective(group):
    with group.main_process_first():
        raise TypeError("a defect")


def silent(group):
    group.barrier()
    if not group.is_first:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.barrier()


LOSING = (killed, silent)
"""Jobs of which one rank sends nothing."""


def alone(group):
    """Never called: the other rank does not start."""


def work(job, rank, port, pipe):
    os.environ |= ENVIRONMENT | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    ranks.SILENCE_SECONDS, ranks.BEAT_SECONDS = 3.0, 0.5
    torch.set_num_threads(1)
    error = None
    try:
        # The ranks may start far apart on a busy machine.
        ranks.init_process_group(TIMEOUT_SECONDS if job is alone else SECONDS)
        group = ranks.current_ranks()
        torch.distributed.barrier()  # on a busy machine one rank would be lost before the other has connected
        torch.distributed.distributed_c10d._set_pg_timeout(ranks.timedelta(seconds=TIMEOUT_SECONDS))
        job(group)
    except BaseException as raised:
        raised = machine_failure(raised) or raised
        error = f"{type(raised).__name__}: {raised}"
    pipe.send(error)


@pytest.fixture
def run():
    """run(job, number) returns what each of the ranks raised; "lost" if it sent nothing."""
    processes = []

    def start(job, number=2):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = free_port()
        pipes = [context.Pipe() for _ in range(number)]
        for rank, (_, there) in enumerate(pipes):
            processes.append(context.Process(target=work, args=(job, rank, port, there), daemon=True))
            processes[-1].start()
            there.close()
        end, raised = time.monotonic() + 2 * SECONDS, ["lost"] * number
        while time.monotonic() < end and raised.count("lost") > (job in LOSING):
            for rank, (here, _) in enumerate(pipes):
                with contextlib.suppress(EOFError):
                    raised[rank] = here.recv() if raised[rank] == "lost" and here.poll(0.05) else raised[rank]
        return raised

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.process
@pytest.mark.parametrize(("job", "first", "other"), [
    (longer, None, None),
    (killed, "lost", "LostRankError: another rank failed ("),
    (refused, "UserError: write this", "UserError: write this"),
    (defective, "TypeError: a defect", "LostRankError: rank 0 failed (TypeError: a defect); read the output of rank 0"),
    (silent, "SilentRankError: another rank did not answer for 2 s. Rerun", "lost"),
])  # fmt: skip
def test_what_happens_to_one_rank_is_a_sentence_on_the_other(run, job, first, other):
    raised = run(job)
    for text, expected in zip(raised, (first, other), strict=True):
        assert text == expected or (expected is not None and text.startswith(expected)), raised


@pytest.mark.process
def test_ranks_that_cannot_connect_name_the_network_interface(run):
    (text,) = run(alone, 1)
    assert text.startswith("LostRankError: the 2 processes cannot connect through MASTER_ADDR=127.0.0.1, MASTER_PORT=")
    assert "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface that connects" in text


@pytest.mark.parametrize("error", [
    torch.distributed.DistStoreError("wait timeout after 20000ms, keys: /default_pg/0"),
    torch.distributed.DistNetworkError("failed to recv, got 0 bytes"),
    RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation. GLHF!"),
    RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Read error [::1]:2: Connection reset by peer"),
    RuntimeError("NCCL communicator was aborted on rank 1"),
])  # fmt: skip
def test_a_lost_rank_is_not_an_error_of_the_recipe(error):
    def convert(raised):
        with as_user_error("trainer", ValueError, RuntimeError):
            raise raised

    with pytest.raises(LostRankError, match=r"did not answer for 20 s|another rank failed"):
        convert(error)
    with pytest.raises(UserError, match=r"^trainer: a shape is wrong$"):
        convert(RuntimeError("a shape is wrong"))
