"""Limits for chat templates: rendering in a child process with limited time and memory.

A template is a program of another author. Jinja's sandbox keeps it from files and the network, but not from nested
loops or gigabytes of text, and neither can be interrupted in the process that renders.
"""

import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import UserError

CPU_SECONDS = 2
WALL_SECONDS = 30
"""On a busy machine; templates do not wait for anything."""
MAX_MEMORY = 1 << 29
"""Bytes in addition to those in use."""
MAX_CHARACTERS = 10_000_000
NO_OPTIONS: Mapping[str, Any] = {}
_TOO_LARGE = 3  # an exit code


def check_rendering_cost(
    tokenizer: PreTrainedTokenizerBase, name: str, turns: list[dict[str, Any]], options: Mapping[str, Any] = NO_OPTIONS
) -> None:
    """Raise UserError if rendering the conversation takes more than 2 seconds, 512 MB or 10 M characters.

    Also if no process can be started. A template that fails passes: the next rendering reports its error.
    name: the tokenizer's, for the message. options: keywords of apply_chat_template.
    """
    with warnings.catch_warnings():
        # Python 3.12 warns of locks that another thread holds; the child uses none.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            child = os.fork()
        except OSError as error:  # too many processes, or a mapping larger than the machine's memory
            raise UserError(
                f"{name}: the chat template is tried in a second process, and none can be started: {error.strerror}"
            ) from None
    if child == 0:
        _render_and_exit(tokenizer, turns, options)
    code = _exit_code(child)
    if code == _TOO_LARGE:
        raise UserError(f"{name}: the chat template renders more than {MAX_CHARACTERS:,} characters of one example")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        raise UserError(
            f"{name}: the chat template takes more than {CPU_SECONDS} seconds for one example; it may have nested loops"
        )


class _Timeout(BaseException):
    """Not an Exception, so that `except Exception` does not catch it."""


@contextmanager
def cpu_time_limit(cpu_seconds: float, subject: str) -> Iterator[None]:
    """Raise UserError, starting with `subject`, in Python code that takes more of this process's CPU time.

    Has no effect outside of the main thread. A single operation implemented in C is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise _Timeout

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
        yield
    except _Timeout:
        raise UserError(f"{subject} takes more than {cpu_seconds:g} seconds; it may have nested loops") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def template_errors(subject: str) -> Iterator[None]:
    """Turn any exception of a template into a UserError of one line that starts with `subject`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        line = f" (line {error.lineno} of the template)" if hasattr(error, "lineno") else ""  # pyright: ignore
        raise UserError(f"{subject}: {reason}{line}") from None


def _render_and_exit(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]], options: Mapping[str, Any]
) -> None:
    """In the child process, which never returns, prints nothing and runs no exit handlers."""
    code = 0
    try:
        _set_limits()
        for prompts in (False, True):
            how: Any = {"tokenize": False, "add_generation_prompt": prompts, **options}
            text = tokenizer.apply_chat_template(turns, **how)
            if len(str(text)) > MAX_CHARACTERS:
                code = _TOO_LARGE
    except MemoryError:
        code = _TOO_LARGE
    except BaseException:
        pass
    finally:
        os._exit(code)


def _set_limits() -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    with suppress(OSError, ValueError):  # without /proc only time is limited
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_MEMORY, in_use + MAX_MEMORY))


def _exit_code(child: int) -> int:
    """The child's exit code; kills it after WALL_SECONDS."""
    deadline = time.monotonic() + WALL_SECONDS
    while (result := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            result = os.waitpid(child, 0)
            break
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(result[1])
