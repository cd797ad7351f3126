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


def run(*arguments, cwd=None, env=None, is_terminal=False, code=None):
    """The Result of a command in this process. cwd: its folder. env: variables to set, or to unset where None.

    code: the exit code that it must have; with 2 it must be a sentence without a traceback.
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
        returncode = app.main([str(argument) for argument in arguments])
    return _expected(Result(returncode, out.getvalue(), err.getvalue()), code)


def _expected(result, code):
    assert code in (None, result.returncode), result.stderr
    assert code != 2 or "Traceback" not in result.stderr, result.stderr
    return result


def start(*arguments, is_fork=True, **settings):
    """A subprocess.Popen of the command; its standard error is a pipe of text. is_fork: as tests/support/forks.py."""
    arguments = [*map(str, arguments)]
    settings = {"stderr": subprocess.PIPE, "text": True, **settings}
    if is_fork:
        return Fork(arguments, **settings)
    return subprocess.Popen([sys.executable, "-m", "soren_align", *arguments], **settings)


def run_process(*arguments, timeout=300, code=None, **settings):
    """The Result of a command in a process of its own; code: as of `run`; settings: of `start`."""
    process = start(*arguments, stdout=subprocess.PIPE, **settings)
    try:
        outputs = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return _expected(Result(process.returncode, *outputs), code)


def overrides(*settings):
    """`--set` before each of them."""
    return [part for setting in settings for part in ("--set", setting)]


def wait_for(condition, process, seconds=600):
    """Wait until a condition is true or the process has ended."""
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def imported(statements, names, cwd=None):
    """Which of these modules are imported when the statements have run in a fresh interpreter, whatever they print."""
    code = f"import sys\n{statements}\nprint(*sorted({{*{sorted(names)}}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()
