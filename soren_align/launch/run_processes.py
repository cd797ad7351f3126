"""Runs in processes of their own: without a GPU forked from a server that has loaded the libraries once.

A fork of a process that has used a GPU cannot use it: with GPUs, every run is a new interpreter. The libraries take 20
seconds of a CPU to load, which is most of a tiny run's time.
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

from ..compare.trials import has_ended
from ..errors import DivergedError, UserError, from_os_error
from ..lock import LockedError
from ..recipe import Recipe, load_text, to_yaml
from ..run_folder import STOPPED, RunFolder
from ..signals import raising_interrupts

LOCKED = 75
"""Exit code of a run that another command holds, or has ended in the meantime."""
_LOADED = "soren_align.launch.loaded_libraries"


def start_server(*, on_gpus: bool) -> BaseContext:
    """Return where processes of runs are created. Comes after `set_environment`: the server takes the environment."""
    if on_gpus:
        return multiprocessing.get_context("spawn")
    # Of a run that was killed, Python's tracker of semaphores would print a warning on the terminal.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["soren_align.trainers", _LOADED])  # in this order: bitsandbytes warns when imported
    return context


def start_run(context: BaseContext, recipe: Recipe, log: Path, processes: int, gpus: list[str]) -> BaseProcess:
    """Train and evaluate a recipe in a new process, whose output is appended to `log`. gpus: those it may use."""
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    log.parent.mkdir(parents=True, exist_ok=True)
    process = context.Process(target=_run, args=(to_yaml(recipe), str(log), processes, environment))  # pyright: ignore[reportAttributeAccessIssue]
    process.start()
    return process


def _run(recipe_text: str, log: str, processes: int, environment: dict[str, str]) -> None:
    """Train in this process, and end it with the exit code of the command."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)  # Ctrl-C reaches the command alone, which stops its runs
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    _stop_with_parent()
    from .commands import train

    recipe = load_text(recipe_text)
    folder = RunFolder(recipe.run.output_dir)
    try:
        folder.lock(create=True)
        record = folder.read()
        with raising_interrupts():
            code = LOCKED if record and has_ended(record) else train(recipe, processes if processes > 1 else None)
        if code == 130:
            _record(folder, STOPPED)
    except LockedError:
        code = LOCKED
    except KeyboardInterrupt:
        code = 130
    except (UserError, OSError) as error:
        problem = from_os_error(error) or error if isinstance(error, OSError) else error
        print(problem, file=sys.stderr)  # noqa: T201
        _record(folder, str(problem), diverged=isinstance(problem, DivergedError))
        code = 2
    except Exception as error:
        traceback.print_exc()
        _record(folder, (f"{type(error).__name__}: {error}".splitlines() or [""])[0])
        code = 1
    sys.exit(code)


def _record(folder: RunFolder, message: str, *, diverged: bool = False) -> None:
    """Write the error into run.json, if the run has begun."""
    with contextlib.suppress(OSError, UserError):
        if folder.read() is not None:
            folder.update(last_error=message, diverged=diverged)


def _stop_with_parent() -> None:
    """Send this process a SIGTERM when the command has ended, also by SIGKILL: it saves a checkpoint and stops."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
