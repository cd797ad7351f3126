"""The processes of one run, and the few things that they say to each other outside of the training itself.

A run of one process is a group of one: every question is answered without torch.distributed. All of these are
collective: every rank must ask, in the same order.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among `num_ranks`. `launched`: by a launcher, which alone can have ZeRO or FSDP2 in it."""

    rank: int = 0
    num_ranks: int = 1
    launched: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and speaks."""
        return self.rank == 0

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank; the same answer everywhere."""
        return bool(self._reduced([int(here)], dist.ReduceOp.MAX)[0])

    def sums(self, here: Sequence[float]) -> list[float]:
        """The sums over all ranks, number by number."""
        return self._reduced(here, dist.ReduceOp.SUM)

    def least_and_most(self, here: float) -> tuple[float, float]:
        """Of the values of all ranks."""
        minus_least, most = self._reduced([-here, here], dist.ReduceOp.MAX)
        return -minus_least, most

    def _reduced(self, here: Sequence[float], operation: Any) -> list[float]:
        if self.num_ranks == 1:
            return [float(number) for number in here]
        # By gloo where there is one: asking the GPU would wait for its queue at every step.
        device = "cpu" if "gloo" in str(dist.get_backend_config()) else torch.accelerator.current_accelerator()
        numbers = torch.tensor(here, dtype=torch.float64, device=device)
        dist.all_reduce(numbers, operation)
        return numbers.tolist()

    def wait(self) -> None:
        """Go on when every rank has come here."""
        self.any(False)

    def of_first(self, value: T) -> T:
        """The first rank's value, on every rank."""
        if self.num_ranks == 1:
            return value
        told: list[T] = [value]
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
        return told[0]

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """The block on the first rank, then on the others: they find what the first one left in caches and files."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def leave(self) -> None:
        """End the group when all have come here."""
        if dist.is_initialized():
            self.wait()
            dist.destroy_process_group()


def join(timeout_seconds: float) -> Ranks:
    """This process's place in the run that a launcher's environment speaks of (RANK, WORLD_SIZE, MASTER_ADDR...).

    Collectives between GPUs go by NCCL, those between CPUs by gloo; ACCELERATE_USE_CPU leaves the GPUs alone.
    timeout_seconds: after so long in one collective, a rank gives up. UserError for more ranks than GPUs.
    """
    if "RANK" not in os.environ:
        return Ranks()
    on_gpus = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() not in ("true", "1")
    if on_gpus:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if here > torch.cuda.device_count():
            raise UserError(
                f"{here} processes on this machine and {torch.cuda.device_count()} visible GPUs; start at most one "
                "process per GPU"
            )
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    return present()


def present() -> Ranks:
    """This process's place in the process group that somebody has made; alone, if nobody has."""
    return Ranks(dist.get_rank(), dist.get_world_size(), launched=True) if dist.is_initialized() else Ranks()
