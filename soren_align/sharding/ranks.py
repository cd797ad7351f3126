"""The processes of one run, and their few collectives outside of the training itself.

A run of one process needs no torch.distributed. All methods of `Ranks` are collective: every rank
must call them, in the same order. accelerate's PartialState is not used: with GPUs it makes a group
of NCCL alone, and these collectives would wait for the GPU's queue at every step.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..core.errors import (
    LostRankError,
    ResumableError,
    UserError,
    first_sentence,
    machine_failure,
    silent_rank,
)

T = TypeVar("T")

BEAT_SECONDS = 5.0
"""The seconds between two signs of life of the first rank while the others wait for it in
`Ranks.main_process_first`."""
SILENCE_SECONDS = 60.0
"""The first rank counts as lost after so long without a sign of life. One that ends is noticed at
once."""
_ON_ALL = {
    kind.__name__: kind for kind in (LostRankError, ResumableError, UserError, KeyboardInterrupt)
}
"""Errors of the first rank that the others raise too."""
_numbers = count()
"""Numbers of the blocks of `main_process_first`, the same on all ranks."""


@dataclass(frozen=True)
class Ranks:
    """This process among `num_ranks`.
    launched: by a launcher, without which there is no ZeRO or FSDP2. group: of the collectives;
    None: the default one.
    """

    rank: int = 0
    num_ranks: int = 1
    launched: bool = False
    group: Any = None

    def with_own_group(self, timeout_seconds: float) -> "Ranks":
        """The same ranks with a group by gloo of their own, for another thread. Collective."""
        timeout = timedelta(seconds=timeout_seconds)
        return replace(self, group=dist.new_group(backend="gloo", timeout=timeout))

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.rank == 0

    def any(self, condition: bool) -> bool:
        """Whether the condition is true on any rank."""
        return bool(self._all_reduce([int(condition)], dist.ReduceOp.MAX)[0])

    def sums(self, values: Sequence[float]) -> list[float]:
        """The elementwise sums of `values` over all ranks."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def _all_reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.num_ranks == 1:
            return [float(value) for value in values]
        # By gloo where there is one: a copy from the GPU would wait for its queue at every step.
        device = (
            "cpu"
            if "gloo" in str(dist.get_backend_config(self.group))
            else torch.accelerator.current_accelerator()
        )
        numbers = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(numbers, operation, self.group)
        return numbers.tolist()

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.any(False)

    def broadcast(self, value: T) -> T:
        """The first rank's value, on every rank; any object that can be pickled."""
        if self.num_ranks == 1:
            return value
        # On the CPU: pickled objects go by gloo, without a wait for the GPU's queue.
        values: list[T] = [value]
        dist.broadcast_object_list(values, 0, self.group, torch.device("cpu"))
        return values[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank; any objects that can be
        pickled.
        """
        values: list[Any] = [value] * self.num_ranks
        if self.num_ranks > 1:
            dist.all_gather_object(values, value, self.group)
        return values

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """If the block raises a UserError or OSError on any rank, raise it on all, so that none
        waits for the others.

        The block contains no collective.
        """
        error: UserError | OSError | None = None
        try:
            yield
        except (UserError, OSError) as own:
            error = own
        # Every rank gathers, with an error or without: a rank that raised alone would leave the
        # others waiting.
        errors = self.gather(error)
        if problem := error or next(filter(None, errors), None):
            raise problem

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on the first rank, then on the others, which use the caches and files of
        the first.

        The others wait as long as the first rank lives: tokenizing a large dataset takes longer
        than the timeout of a collective. An error of the first rank is raised on all: a UserError
        as it is, a defect as LostRankError.
        """
        if self.num_ranks == 1:
            yield
            return
        # The store, and no collective: a collective has a timeout, and tokenizing may take hours.
        store, key = (
            dist.distributed_c10d._get_default_store(),
            f"soren_align/first/{next(_numbers)}",
        )
        if not self.is_first:
            _wait_for_first(store, key)
            yield
            return
        # Signs of life from a thread: the block may be busy for hours in one call.
        ended = Event()
        Thread(target=_send_beats, args=(store, key, ended), daemon=True).start()
        try:
            yield
        except BaseException as error:
            problem = machine_failure(error) or error
            kind = next(
                (name for name, kind in _ON_ALL.items() if isinstance(problem, kind)),
                type(error).__name__,
            )
            store.set(key, json.dumps([kind, str(problem)]))
            end = time.monotonic() + BEAT_SECONDS  # the store may end with this process
            while store.add(f"{key}/read", 0) < self.num_ranks - 1 and time.monotonic() < end:
                time.sleep(0.05)
            raise
        else:
            store.set(key, json.dumps(None))
        finally:
            ended.set()

    def destroy(self) -> None:
        """Destroy the process group when all ranks have called this."""
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()


def init_process_group(timeout_seconds: float) -> None:
    """Initialize the default process group by the launcher's environment (RANK, WORLD_SIZE,
    MASTER_ADDR...).

    Without that environment there is none, and the run has one process. Collectives of CUDA tensors
    use NCCL, those of CPU tensors gloo; with ACCELERATE_USE_CPU no GPU is used. timeout_seconds: of
    one collective. Raises UserError if there are more processes than GPUs.
    """
    if "RANK" not in os.environ:
        return
    on_gpus = torch.cuda.is_available() and os.environ.get(
        "ACCELERATE_USE_CPU", "false"
    ).lower() not in ("true", "1")
    if on_gpus:
        torch.cuda.set_device(choose_gpu(torch.cuda.device_count()))
    # Both: flags and objects go by gloo, so that they need not wait for the GPU's queue.
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        _in_thread(lambda: dist.init_process_group(backend, timeout=timeout)).result()
    except RuntimeError as error:
        env = os.environ
        raise LostRankError(
            f"the {env.get('WORLD_SIZE')} processes cannot connect through "
            f"MASTER_ADDR={env.get('MASTER_ADDR')}, MASTER_PORT={env.get('MASTER_PORT')} "
            f"({first_sentence(error)}). On several machines, set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the network interface that connects the machines (`ip -br "
            "address` lists the interfaces), then rerun the same command"
        ) from error


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """The future result of a function that waits in C++, where a signal would be handled only after
    the wait.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=call, daemon=True).start()
    return future


def choose_gpu(num_gpus: int) -> int:
    """The number of this rank's GPU among the visible ones, which is LOCAL_RANK from then on.

    It is 0 if the launcher has made one GPU visible to each process, as srun does with
    --gpus-per-task: accelerate and DeepSpeed choose by LOCAL_RANK too. Raises UserError if there
    are more processes than GPUs.
    """
    # srun and torchrun differ in what a process sees: all GPUs of the machine and a LOCAL_RANK, or
    # one GPU, which is then number 0 for each of them.
    local_rank, num_local = (
        int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if num_gpus == 1 and num_local <= 1:
        local_rank = 0
        os.environ["LOCAL_RANK"] = "0"
    num_local = max(num_local, local_rank + 1)
    if num_local > num_gpus:
        raise UserError(
            f"this machine has {num_local} processes, but only {num_gpus} visible GPUs; start at "
            "most one process per GPU"
        )
    return local_rank


def current_ranks() -> Ranks:
    """The ranks of the default process group; one process if there is none."""
    return (
        Ranks(dist.get_rank(), dist.get_world_size(), launched=True)
        if dist.is_initialized()
        else Ranks()
    )


def _send_beats(store: dist.Store, key: str, ended: Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        try:
            store.add(f"{key}/beats", 1)
        except RuntimeError:  # the store has ended, with its process
            return


def _wait_for_first(store: dist.Store, key: str) -> None:
    """Wait until the first rank has left its block.
    Raises its error, and LostRankError if it has ended.
    """
    # Polled in a thread of its own: a store in a stopped process never answers, and a signal must
    # still reach this one.
    seen = [time.monotonic()]

    def poll() -> list[str] | None:
        # Soon at first, for a block that reads a cache in milliseconds; later twice a second, for
        # one that tokenizes for an hour.
        beats, pause = 0, 0.01
        while not store.check([key]):  # store.wait prints a warning when its time is over
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
            if (now := store.add(f"{key}/beats", 0)) != beats:
                beats, seen[0] = now, time.monotonic()
        problem = json.loads(store.get(key))
        if problem is not None:
            store.add(f"{key}/read", 1)
        return problem

    first = _in_thread(poll)
    while not wait([first], timeout=0.5).done:
        # A store in a stopped process never answers.
        if time.monotonic() - seen[0] > SILENCE_SECONDS:
            raise silent_rank("rank 0", SILENCE_SECONDS)
    problem = first.result()
    if problem is None:
        return
    kind, message = problem
    if kind in _ON_ALL:
        raise _ON_ALL[kind](message)
    raise LostRankError(f"rank 0 failed ({kind}: {message}); read the output of rank 0")
