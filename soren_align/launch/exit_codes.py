"""Exit codes: 0 success, 1 failure, 2 an error that the user can fix, 130 stopped by a signal."""

import os
import traceback
from contextlib import suppress

from rich.text import Text

from ..core.errors import LostRankError, UserError, known_failure, printable
from ..core.signals import interrupt_no_more
from ..core.text import stderr_console


def report(error: BaseException, *, resumable: bool = True) -> int:
    """Print why a command ended and return its exit code.

    A rank that our torchrun started records the message for it, so that it is printed once. Raises
    the error again if it is a defect in a single process: Python prints the traceback. resumable:
    whether a rerun continues.
    """
    interrupt_no_more()  # torchrun and srun send SIGTERM to all ranks when one has ended
    error = known_failure(error) or error
    # A lost rank is nothing that the user could fix: its code is that of a defect.
    if isinstance(error, UserError):
        code, message = 1 if isinstance(error, LostRankError) else 2, str(error)
    elif isinstance(error, KeyboardInterrupt):
        code, message = 130, "stopped; rerun the same command to resume" if resumable else "stopped"
    # Under a launcher each rank's output is mixed with the others': a defect is printed with its
    # rank, below.
    elif {"WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"} & os.environ.keys():
        code, message = 1, "".join(traceback.format_exception(error))
    else:
        raise error
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from . import torchrun

        torchrun.record_error(error)
        if torchrun.STARTED_HERE in os.environ:
            return code
    rank = int(os.environ.get("RANK", "0"))
    message = f"rank {rank}: {message}" if rank else message
    prefix = [("error: ", "bold red")] if code == 2 else []
    with suppress(OSError):  # the terminal was closed
        stderr_console().print(Text.assemble(*prefix, printable(message)), soft_wrap=True)
    return code
