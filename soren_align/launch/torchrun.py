"""Start ranks on this machine with torchrun, and report one error for all of them.

torchrun starts the ranks, monitors them and stops all within 30 seconds when one fails. It would
print a table of failures; here the message of the rank that failed first is printed once, and its
exit code is returned.
"""

import json
import logging
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler

from ..core.errors import LostRankError, NoMemoryError, ResumableError, SilentRankError, UserError
from ..core.signals import killed_by
from ..core.silence import log_level

STARTED_HERE = "SOREN_ALIGN_LAUNCHER"
"""Environment variable of ranks that `start` started: they record their errors and do not print
them."""
SHUTDOWN_SECONDS = 270
"""Seconds in which ranks may write a checkpoint after a signal, unless
TORCH_ELASTIC_SHUTDOWN_TIMEOUT is
set: Slurm's scripts leave 300 (configs/slurm), torchrun alone 30, in which a 7B model's 73 GB are
not written."""
_LOST = (LostRankError.kind, SilentRankError.kind)


@dataclass(frozen=True)
class Failure:
    """Why ranks ended: the exit code, the message to print, whether the same command resumes the
    run later, and the kind of the error (`UserError.kind`).
    """

    code: int
    message: str
    is_resumable: bool = False
    kind: str = "defect"


def start(num_ranks: int, arguments: list[str]) -> Failure | None:
    """Run `num_ranks` workers with these arguments; return the first one's failure, None if all
    succeed.
    """
    command = ["--standalone", f"--nproc-per-node={num_ranks}"]
    # Not in torch 2.11, which waits 30 seconds.
    if "--shutdown-timeout" in torchrun.get_args_parser().format_help():
        seconds = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
        command += [f"--shutdown-timeout={seconds}"]
    command += ["-m", "soren_align.launch.worker", *arguments]
    # Under nohup, which ignores SIGHUP, torchrun would handle it all the same.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    # Each of these loggers has a level of its own, and repeats the message.
    names = [
        name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")
    ]
    try:
        with log_level(logging.CRITICAL, *names):
            torchrun.run(torchrun.parse_args(command))
        return None
    except SignalException as error:
        return Failure(
            130,
            f"{num_ranks} processes stopped by {error.sigval.name}; rerun the same command to"
            " resume",
        )
    except ChildFailedError as error:
        failures = error.failures
    # torchrun has the failures of all ranks. Report the one that is the cause: a rank that lost its
    # neighbour fails too, within the same second or half a minute later.
    silent = min(
        (f.timestamp for f in failures.values() if _record(f).get("kind") == SilentRankError.kind),
        default=None,
    )
    # A rank that did not answer does not end at torchrun's SIGTERM either: after 30 seconds it is
    # killed.
    ended = [rank for rank, f in failures.items() if f.exitcode < 0]
    ended_later = {
        rank for rank in ended if silent is not None and failures[rank].timestamp >= silent
    }
    # A rank that lost its neighbour fails too, perhaps within the same second, and torchrun ends
    # the others by SIGTERM.
    ranks = []
    for rank, f in failures.items():
        order = 1 if f.exitcode == 2 else 3 if _record(f).get("kind") in _LOST else 2
        if f.exitcode < 0:
            order = 4 if rank in ended_later or -f.exitcode == signal.SIGTERM else 0
        ranks.append((order, f.timestamp, rank))
    rank = min(ranks)[-1]
    failure = failures[rank]
    record = _record(failure)
    kind, message = record.get("kind", "defect"), record.get("message", "").partition(": ")[2]
    if failure.exitcode < 0:
        message = f"rank {rank} was {killed_by(-failure.exitcode)}; the other ranks were stopped. "
        return Failure(
            1,
            message + "Rerun the same command to resume from the last checkpoint",
            is_resumable=True,
            kind=NoMemoryError.kind if -failure.exitcode == signal.SIGKILL else "killed",
        )
    # The rank that waited did not know which one was silent: it is the one that ended later.
    if kind == SilentRankError.kind and len(ended_later) == 1:
        message = message.replace("another rank", f"rank {min(ended_later)}", 1)
    # A rank that has saved a checkpoint has printed that it stopped, and has written nothing.
    if failure.exitcode == 130:
        has_message = "message" in record
        return Failure(130, "stopped; rerun the same command to resume" if has_message else "")
    if failure.exitcode == 2 or kind in _LOST:
        return Failure(failure.exitcode, message, record.get("resumable", False), kind)
    trace = record.get("extraInfo", {}).get("py_callstack", "").rstrip()
    message = (
        f"{trace}\nrank {rank} failed with exit code {failure.exitcode}; the other ranks were"
        " stopped".lstrip()
    )
    return Failure(1, message)


def record_error(error: BaseException) -> None:
    """Write the error of this rank into the file that torchrun reads; with a traceback, if it is a
    defect.

    torchrun prints the traceback in place of the message, if there is one.
    """
    if isinstance(error, UserError) and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        message = {
            "message": f"{type(error).__name__}: {error}",
            "kind": error.kind,
            "resumable": isinstance(error, ResumableError),
            "extraInfo": {"timestamp": str(int(time()))},
        }
        with suppress(OSError):  # a full disk, which may be the error
            Path(file).write_text(json.dumps({"message": message}))
        return
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)


def _record(failure: Any) -> dict[str, Any]:
    """Return what the rank wrote about its error; empty if it wrote nothing."""
    return failure.message if isinstance(failure.message, dict) else {}
