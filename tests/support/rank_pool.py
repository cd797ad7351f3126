"""Ranks that are started once and run many jobs: starting one takes seconds, a job a fraction of one.

A job is a function of a module that the ranks can import, called as job(group, *arguments) on every rank.
"""

import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import traceback
from contextlib import suppress
from unittest.mock import patch

JOB_SECONDS = 240  # after which a job counts as hung
STOP_SECONDS = 5
MAX_STARTS = 4  # of one pool: a rank that hangs or dies fails its test, not those after it, unless it does so in each
# Modules that the jobs import, 15 s of one core: once for all ranks. DeepSpeed looks for its optimizer Muon in
# initialize(), and that imports a compiler.
PRELOADED = [*("torch", "torch._dynamo", "torch.distributed.fsdp", "deepspeed.runtime.zero.muon.muon_optimizer"),
             *("trl", "peft", "soren_align.training.run")]  # fmt: skip
ENVIRONMENT = {
    **{"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "TORCH_COMPILE_DISABLE": "1"},
    "PYTHONWARNINGS": "ignore::FutureWarning",  # torch about DeepSpeed, a line per rank and collective
}


class RankPool:
    """`num_ranks` processes with gloo between them. They are started again after one hung or died."""

    def __init__(self, num_ranks, folder):
        self.num_ranks, self.folder, self.processes, self.num_starts = num_ranks, folder, [], 0

    def start(self):
        assert self.num_starts < MAX_STARTS, f"the {self.num_ranks} ranks hung or died {MAX_STARTS} times"
        self.num_starts += 1
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with patch.dict(os.environ, ENVIRONMENT):  # which the ranks inherit from the server
            multiprocessing.forkserver.ensure_running()
        store = self.folder / f"store{self.num_ranks}-{self.num_starts}"
        pairs = [context.Pipe() for _ in range(self.num_ranks)]
        self.pipes = [here for here, _ in pairs]
        self.processes = [
            context.Process(target=serve, args=(rank, self.num_ranks, str(store), there), daemon=True)
            for rank, (_, there) in enumerate(pairs)
        ]
        for process, (_, there) in zip(self.processes, pairs, strict=True):
            process.start()
            there.close()  # that a rank's death is seen as the end of its pipe

    def run(self, job, *arguments, seconds=JOB_SECONDS):
        """The results of the job, one per rank. AssertionError with tracebacks if a rank raised, died or took too long.

        A rank that died has left the stacks of its threads on stderr.
        """
        if not self.processes:
            self.start()
        answers = []
        try:
            for pipe in self.pipes:
                pipe.send((job, arguments))
            for rank, pipe in enumerate(self.pipes):
                assert pipe.poll(seconds), f"rank {rank} of {self.num_ranks} hangs in {job.__name__}{arguments}"
                answers.append(pickle.loads(pipe.recv_bytes()))  # from our own ranks
        except (AssertionError, EOFError, BrokenPipeError) as error:
            codes = self.stop()  # an answer that comes late would be taken for the next job's
            if isinstance(error, AssertionError):
                raise
            raise AssertionError(f"a rank died in {job.__name__}{arguments} or after its last job: {codes}") from None
        failures = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(answers) if failure]
        assert not failures, "\n".join(failures)
        return [result for result, _ in answers]

    def stop(self):
        """End the processes by a message, so that coverage.py saves its data; by SIGKILL if one hangs. Their codes."""
        for pipe in self.pipes:
            with suppress(OSError):  # the rank has died
                pipe.send((None, ()))
        for process in self.processes:
            process.join(STOP_SECONDS)
            process.kill()
            process.join()
        codes = [process.exitcode for process in self.processes]
        self.processes = []
        return codes


def serve(rank, num_ranks, store, pipe):
    """Run the jobs that come through the pipe, one after another, each in a fresh environment."""
    os.environ.update(ENVIRONMENT)  # should the server have been started by others
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")  # read by libraries; the group has its own store
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    gc.freeze()  # DeepSpeed collects garbage in initialize(): half a second with all that is imported
    environment, linear = dict(os.environ), torch.nn.functional.linear
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=datetime.timedelta(seconds=60)
    )
    while True:
        job, arguments = pipe.recv()
        if job is None:
            return
        # As bytes: a pipe would send tensors through shared memory, each with a file descriptor to fetch.
        try:
            answer = pickle.dumps((job(dist.group.WORLD, *arguments), None))
        except Exception:
            answer = pickle.dumps((None, traceback.format_exc()))
        pipe.send_bytes(answer)
        destroy_engines()
        torch.nn.functional.linear = linear  # ZeRO 3 puts its own in its place, for all models to come
        os.environ.clear()
        os.environ.update(environment)
        forget_accelerate()


def destroy_engines():
    """Free the buffers of the job's DeepSpeed engines, which hooks keep alive even after destroy().

    Each has 2 GB of address space for its bucket, and the kernel starts no process from one with a mapping larger than
    the machine's memory.
    """
    from deepspeed import DeepSpeedEngine

    for engine in [thing for thing in gc.get_objects() if issubclass(type(thing), DeepSpeedEngine)]:
        if vars(engine):
            engine.destroy()
            if engine.optimizer is not None:  # a reference model has none
                vars(engine.optimizer).clear()
            vars(engine).clear()
    gc.collect()


def forget_accelerate():
    """Let accelerate and transformers look anew at the environment and at the arguments of the next Trainer."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
