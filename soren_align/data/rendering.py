"""A chat template tried where it can do no harm: in a process of its own, with little time and memory.

A template is a stranger's program. Its sandbox keeps it from files and the network, not from loops within loops, or
from text of gigabytes, and neither can be interrupted in the process that renders.
"""

import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import UserError

CPU_SECONDS = 2
WALL_SECONDS = 30
"""On a machine that is busy; templates do not wait for anything."""
MEMORY = 1 << 29
"""Bytes beyond those that are in use."""
CHARACTERS = 10_000_000
_TOO_MUCH = 3  # an exit code


def refuse_endless(tokenizer: PreTrainedTokenizerBase, name: str, turns: list[dict[str, Any]]) -> None:
    """UserError if the chat template does not render the conversation within 2 seconds, 512 MB and 10 M characters.

    One that fails passes: whoever renders it in earnest gets its message. name: the tokenizer's, for the message.
    """
    with warnings.catch_warnings():
        # Python 3.12 warns of locks that another thread holds; the child renders and touches none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _render_and_exit(tokenizer, turns)
    code = _exit_code(child)
    if code == _TOO_MUCH:
        raise UserError(f"{name}: the chat template makes more than {CHARACTERS:,} characters of one row")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        raise UserError(
            f"{name}: the chat template takes more than {CPU_SECONDS} seconds for one row; it may have loops in loops"
        )


class _TooLong(BaseException):
    """Passes through what catches every Exception."""


@contextmanager
def at_most(cpu_seconds: float, what: str) -> Iterator[None]:
    """Stop loops of Python after so much of this process's CPU time, with a UserError that begins with `what`.

    In the main thread only; elsewhere nothing is limited. What one operation takes cannot be stopped.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
        yield
    except _TooLong:
        raise UserError(f"{what} takes more than {cpu_seconds:g} seconds; it may have loops in loops") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def the_templates(what: str) -> Iterator[None]:
    """Turn what a template raises, and it may raise anything, into a UserError of one line that begins with `what`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        line = f" (line {error.lineno} of the template)" if hasattr(error, "lineno") else ""  # pyright: ignore
        raise UserError(f"{what}: {said}{line}") from None


def _render_and_exit(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]]) -> None:
    """In the child, which never returns, prints nothing and runs nobody's exit handlers."""
    code = 0
    try:
        _limit()
        for prompts in (False, True):
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompts)
            if len(str(text)) > CHARACTERS:
                code = _TOO_MUCH
    except MemoryError:
        code = _TOO_MUCH
    except BaseException:
        pass
    finally:
        os._exit(code)


def _limit() -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    with suppress(OSError, ValueError):  # where there is no /proc, time alone is limited
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, in_use + MEMORY))


def _exit_code(child: int) -> int:
    """The child's exit code, once it has ended or been killed for being late."""
    until = time.monotonic() + WALL_SECONDS
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])
