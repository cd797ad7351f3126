"""torchrun on this machine, with one clear ending.

torchrun starts the ranks, watches them and stops all when one fails, within 30 seconds. What it prints then is a table
of its own; here the rank that failed first is named, once, in our words, and its exit code is ours.
"""

import logging
import signal
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler

OURS = "SOREN_ALIGN_LAUNCHER"
"""Set for ranks that `start` started: they leave their errors to it."""


def start(num_ranks: int, arguments: list[str]) -> tuple[int, str | None]:
    """The exit code of `num_ranks` workers with these arguments, and what to tell the user if it is not 0."""
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed"):  # each has a level of its own; they say the same in other words
            logging.getLogger(name).setLevel(logging.CRITICAL)
    command = ["--standalone", f"--nproc-per-node={num_ranks}", "-m", "soren_align.launch.worker", *arguments]
    try:
        torchrun.run(torchrun.parse_args(command))
    except ChildFailedError as error:
        return _verdict(error.failures)
    except SignalException as stopped:
        return 130, f"{num_ranks} processes stopped by {stopped.sigval.name}; the same command goes on where it can"
    return 0, None


def leave_word(error: BaseException) -> None:
    """Write down, for whoever started this rank, why it fails."""
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)


def _verdict(failures: dict[int, Any]) -> tuple[int, str]:
    """Exit code and message of the rank that failed first."""
    rank = min(failures, key=lambda r: (_order(failures[r].exitcode), failures[r].timestamp, r))
    failure = failures[rank]
    written = failure.message if isinstance(failure.message, dict) else {}
    if failure.exitcode < 0:
        try:
            name = signal.Signals(-failure.exitcode).name
        except ValueError:
            name = f"signal {-failure.exitcode}"
        said = f"rank {rank} was killed by {name}"
        if -failure.exitcode == signal.SIGKILL:
            said += " (out of memory, perhaps)"
        return 1, f"{said}; the other ranks were stopped. The same command goes on from the last checkpoint"
    if failure.exitcode in (2, 130):
        return failure.exitcode, written.get("message", "").removeprefix("UserError: ")
    trace = written.get("extraInfo", {}).get("py_callstack", "").rstrip()
    return 1, f"{trace}\nrank {rank} failed with exit code {failure.exitcode}; the other ranks were stopped".lstrip()


def _order(code: int) -> int:
    # A rank that lost its neighbour fails too, perhaps within the same second, and torchrun ends the rest by SIGTERM.
    if code < 0:
        return 3 if -code == signal.SIGTERM else 0
    return 1 if code == 2 else 2
