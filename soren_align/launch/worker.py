"""Run one rank, as torchrun starts it: python -m soren_align.launch.worker RUN_FOLDER --timeout
SECONDS.

RANK and WORLD_SIZE are in the environment. Without them, the run is finished in a single process:
after training on several ranks, the first one replaces itself by this for the evaluation.
"""

import os
import sys

from ..core import signals
from ..run.folder import RunFolder
from .commands import record_stop, train_here
from .exit_codes import report


def main(arguments: list[str]) -> int:
    """Train and evaluate; return the exit code."""
    path, option, timeout_seconds = arguments
    assert option == "--timeout"
    with signals.raising_interrupts():
        try:
            return train_here(RunFolder(path), float(timeout_seconds))
        except (Exception, KeyboardInterrupt) as error:
            # Under a launcher, the launcher records it.
            if isinstance(error, KeyboardInterrupt) and "RANK" not in os.environ:
                record_stop(RunFolder(path), requeue=True)
            return report(error)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code == 130:
        signals.end_with_code()
    sys.exit(code)
