"""Start ranks on this machine with torchrun, and report one error for all of them.

torchrun starts the ranks, monitors them and stops all within 30 seconds when one fails. It would print a table of
failures; here the message of the rank that failed first is printed once, and its exit code is returned.
"""

import logging
import signal
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler

from ..silence import log_level

STARTED_HERE = "SOREN_ALIGN_LAUNCHER"
"""Environment variable of ranks that `start` started: they record their errors and do not print them."""


def start(num_ranks: int, arguments: list[str]) -> tuple[int, str | None]:
    """Run `num_ranks` workers with these arguments; return the exit code, and the message to print if it is not 0."""
    command = ["--standalone", f"--nproc-per-node={num_ranks}", "-m", "soren_align.launch.worker", *arguments]
    # Each of these loggers has a level of its own, and repeats the message.
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    try:
        with log_level(logging.CRITICAL, *names):
            torchrun.run(torchrun.parse_args(command))
    except ChildFailedError as error:
        return _first_failure(error.failures)
    except SignalException as error:
        return 130, f"{num_ranks} processes stopped by {error.sigval.name}; rerun the same command to resume"
    return 0, None


def record_error(error: BaseException) -> None:
    """Write the error of this rank into the file that torchrun reads."""
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)


def _first_failure(failures: dict[int, Any]) -> tuple[int, str]:
    """Return exit code and message of the rank that failed first."""
    rank = min(failures, key=lambda r: (_order(failures[r].exitcode), failures[r].timestamp, r))
    failure = failures[rank]
    written = failure.message if isinstance(failure.message, dict) else {}
    if failure.exitcode < 0:
        try:
            name = signal.Signals(-failure.exitcode).name
        except ValueError:
            name = f"signal {-failure.exitcode}"
        cause = " (out of memory, perhaps)" if -failure.exitcode == signal.SIGKILL else ""
        return 1, (
            f"rank {rank} was killed by {name}{cause}; the other ranks were stopped. Rerun the same command to resume "
            "from the last checkpoint"
        )
    if failure.exitcode in (2, 130):
        return failure.exitcode, written.get("message", "").removeprefix("UserError: ")
    trace = written.get("extraInfo", {}).get("py_callstack", "").rstrip()
    return 1, f"{trace}\nrank {rank} failed with exit code {failure.exitcode}; the other ranks were stopped".lstrip()


def _order(code: int) -> int:
    # A rank that lost its neighbour fails too, perhaps within the same second, and torchrun ends the others by SIGTERM.
    if code < 0:
        return 3 if -code == signal.SIGTERM else 0
    return 1 if code == 2 else 2
