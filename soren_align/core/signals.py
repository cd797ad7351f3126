"""Signals that stop a command: Ctrl-C, SIGTERM and SIGHUP."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING_SECONDS = 10.0
"""The seconds after a signal in which another one does not interrupt the ending: a closed terminal
sends SIGHUP twice, and srun SIGTERM to all ranks when the first one has ended."""
received: dict[int, float] = {}
"""Signals that came within `raising_interrupts`, and when. Training looks here for one whose
exception was lost: Python ignores an exception in a finalizer or in a handler of os.fork."""
_is_deferred = _is_ending = False


def stop_signals() -> list[int]:
    """Return the signals that stop a command.
    SIGHUP is not among them under nohup, which ignores it.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Make each of them raise KeyboardInterrupt within the block, as Ctrl-C does.
    Only in the main thread.
    """
    global _is_ending
    _is_ending = False
    # Python handles signals there alone
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in stop_signals()}
    replaced = {
        n: h for n, h in before.items() if h in (signal.SIG_DFL, signal.default_int_handler)
    }
    for number in replaced:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        received.clear()
        for number, handler in replaced.items():
            signal.signal(number, handler)


def interrupt_no_more() -> None:
    """Until the end of `raising_interrupts`, signals raise nothing: the command ends already, and
    reports why.
    """
    global _is_ending
    _is_ending = True


@contextmanager
def deferred() -> Iterator[None]:
    """Hold back a first signal until the end of the block.
    For the import of torch: interrupted in C++, it aborts.
    """
    global _is_deferred
    _is_deferred, before = True, len(received)
    try:
        yield
    finally:
        _is_deferred = False
    if len(received) > before:
        raise KeyboardInterrupt


def killed_by(number: int) -> str:
    """Return the cause of a process's end by a signal: "killed by SIGKILL (out of memory,
    perhaps)".
    """
    name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
    return f"killed by {name}{' (out of memory, perhaps)' if number == signal.SIGKILL else ''}"


def end_with_parent() -> None:
    """Let this process, of a pool, end with its parent, also after SIGKILL, which lets a parent end
    none. Its parent alone handles Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def end_with_code() -> None:
    """Prepare the interpreter's end: its exit code is the command's, and no signal interrupts
    libraries' last acts.
    """
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    # CPython (3.11 to 3.14) otherwise ends by SIGINT if the KeyboardInterrupt, which is handled
    # now, has left an `exec` of a text: dataclasses are made so while libraries are imported.
    exec("")


def _interrupt(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    # A closed terminal sends SIGHUP twice: the second one must not interrupt the ending.
    is_repeated = any(now - then < ENDING_SECONDS for then in received.values())
    is_first = not received
    received[number] = now
    if not (_is_ending or (_is_deferred if is_first else is_repeated)):
        raise KeyboardInterrupt
