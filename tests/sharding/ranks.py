"""Ranks that are started once and run many jobs: starting one takes seconds, a job a fraction of one.

A job is a function of a module that the ranks can import, called as job(group, *arguments) on every rank.
"""

import datetime
import multiprocessing
import os
import traceback

JOB_SECONDS = 240  # after which a job counts as hung


class Ranks:
    """`num_ranks` processes with gloo between them."""

    def __init__(self, num_ranks, folder):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "soren_align.sharding", "soren_align.optim"])
        self.num_ranks = num_ranks
        pairs = [context.Pipe() for _ in range(num_ranks)]
        self.pipes = [here for here, _ in pairs]
        self.processes = [
            context.Process(target=serve, args=(rank, num_ranks, str(folder / f"store{num_ranks}"), there), daemon=True)
            for rank, (_, there) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def run(self, job, *arguments):
        """What each rank's job returned. AssertionError with the ranks' tracebacks if one raised or hung."""
        assert all(process.is_alive() for process in self.processes), "the ranks were stopped after an earlier hang"
        for pipe in self.pipes:
            pipe.send((job, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(JOB_SECONDS):
                self.stop()  # an answer that comes late would be taken for the next job's
                raise AssertionError(f"rank {rank} of {self.num_ranks} hangs in {job.__name__}{arguments}")
            answers.append(pipe.recv())
        failures = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(answers) if failure]
        assert not failures, "\n".join(failures)
        return [result for result, _ in answers]

    def stop(self):
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def serve(rank, num_ranks, store, pipe):
    """The life of a rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=datetime.timedelta(seconds=60)
    )
    while True:
        job, arguments = pipe.recv()
        try:
            pipe.send((job(dist.group.WORLD, *arguments), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
