"""Start each run of a study in its own process.

Without a GPU, the process is a fork of a server that has loaded the libraries once
(launch/preloaded.py): loading them takes 20 seconds of a CPU, which is most of a tiny run's time. A
fork of a process that has used a GPU cannot use this GPU, so with GPUs every run is a new
interpreter.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from ..core.errors import ResumableError, known_failure
from ..core.figures import NO_PICTURES
from ..core.signals import raising_interrupts
from ..recipe import Recipe, load_text, to_yaml
from ..run.folder import STOPPED, RunFolder
from ..run.lock import LockedError
from ..run.provenance import software
from .runs import has_ended

SERVER_LOST = 255
"""What multiprocessing reports of a run whose fork server was killed: its own code is then
unknown."""
RESUMABLE = 71
"""Exit code of a run that the machine stopped: a full disk, missing memory, a lost rank. It resumes
later."""
LOCKED = 75
"""Exit code of a run that another command holds, or has ended in the meantime."""


def start_server(*, on_gpus: bool) -> BaseContext:
    """Return where processes of runs are created.
    Comes after `set_environment`: the server takes the environment.
    """
    if on_gpus:
        return multiprocessing.get_context("spawn")
    # Of a run that was killed, Python's tracker of semaphores would print a warning on the
    # terminal.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["soren_align.launch.preloaded"])
    return context


def start_run(
    context: BaseContext, recipe: Recipe, log: Path, processes: int, gpus: list[str]
) -> BaseProcess:
    """Train and evaluate a recipe in a new process, whose output is appended to `log`.
    gpus: those it may use.
    """
    environment = {NO_PICTURES: "1"} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    log.parent.mkdir(parents=True, exist_ok=True)
    process = context.Process(target=_run, args=(to_yaml(recipe), str(log), processes, environment))  # pyright: ignore[reportAttributeAccessIssue]
    process.start()
    return process


def _run(recipe_text: str, log: str, processes: int, environment: dict[str, str]) -> None:
    """Train in this process, and end it with the exit code of `train_run`."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)  # Ctrl-C reaches the command alone, which stops its runs
    os.environ.update(environment)
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:  # no room, or no permission
        sys.exit(RESUMABLE)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def stop_with_parent() -> None:
        """Stop with a checkpoint when the command has ended, also by SIGKILL."""
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_with_parent, daemon=True).start()
    code = train_run(load_text(recipe_text), processes)
    # what a full disk does not take must not change the exit code
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.exit(code)


def train_run(recipe: Recipe, processes: int = 1) -> int:
    """Train and evaluate a run of a study; write into run.json and print why it failed.

    Returns the exit code: 0; 1 if it diverged or has a defect; 2 if it was refused; 130, RESUMABLE
    or LOCKED.
    """
    from ..launch.commands import train

    folder = RunFolder(recipe.run.output_dir)
    try:
        # The lock is the claim: only who holds it trains this run.
        folder.lock(create=True)
        record = folder.read()
        # Another command may have ended the run between our look and our lock.
        if record and has_ended(record):
            return LOCKED
        with raising_interrupts():
            code = train(recipe, processes if processes > 1 else None)
        record = folder.read() or {}
        if code == 130:
            folder.update(last_error=STOPPED)
        elif code and record.get("resumable"):  # of ranks, whose error the launcher has recorded
            return RESUMABLE
        elif code and record and record["status"] != "diverged":
            folder.update(defect=software() if code == 1 else None)
        return code
    except LockedError:
        return LOCKED
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        problem = known_failure(error, folder.path)
        folder.record_failure(problem or error)
        with contextlib.suppress(OSError):
            if problem:
                print(problem, file=sys.stderr)  # noqa: T201
            else:
                traceback.print_exc()
        return RESUMABLE if isinstance(problem, ResumableError) else 2 if problem else 1
