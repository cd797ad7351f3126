"""The command `soren-align`, in this process or in one of its own."""

import contextlib
import io
import os
import subprocess
import sys
import time
from typing import NamedTuple
from unittest import mock

from soren_align.cli import app
from tests.support.forks import Fork


class Result(NamedTuple):
    """As a subprocess.CompletedProcess has them."""

    returncode: int
    stdout: str
    stderr: str


class Screen(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self):
        return True


def run(*arguments, cwd=None, env=None, is_terminal=False):
    """The Result of a command in this process. cwd: its folder. env: variables to set, or to unset where None.

    is_terminal: whether the two outputs are a terminal, or are piped into files.
    An exception that the command does not turn into a message is raised here. Not for commands that start ranks.
    """
    out, err = (Screen(), Screen()) if is_terminal else (io.StringIO(), io.StringIO())
    changes = {"COLUMNS": "80", **(env or {})}
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(os.environ, {name: text for name, text in changes.items() if text is not None})
        )
        for name in (name for name, text in changes.items() if text is None):
            os.environ.pop(name, None)
        if cwd is not None:
            stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        code = app.main([str(argument) for argument in arguments])
        return Result(code, out.getvalue(), err.getvalue())


def start(*arguments, is_fork=True, **settings):
    """A subprocess.Popen of the command; its standard error is a pipe of text. is_fork: as tests/support/forks.py."""
    arguments = [*map(str, arguments)]
    settings = {"stderr": subprocess.PIPE, "text": True, **settings}
    if is_fork:
        return Fork(arguments, **settings)
    return subprocess.Popen([sys.executable, "-m", "soren_align", *arguments], **settings)


def run_process(*arguments, timeout=300, **settings):
    """The Result of a command in a process of its own; settings: of `start`."""
    process = start(*arguments, stdout=subprocess.PIPE, **settings)
    try:
        outputs = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Result(process.returncode, *outputs)


def overrides(*settings):
    """`--set` before each of them."""
    return [part for setting in settings for part in ("--set", setting)]


def wait_for(condition, process, seconds=600):
    """Wait until a condition is true or the process has ended."""
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
