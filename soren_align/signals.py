"""Signals that stop a command: Ctrl-C, SIGTERM, and SIGHUP, which a terminal sends when it is closed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

received: set[int] = set()
"""Those that came within `raising_interrupts`. Training looks here for one whose exception was lost: Python ignores an
exception in a finalizer or in a handler of os.fork."""


def stop_signals() -> list[int]:
    """Return the signals that stop a command. SIGHUP is not among them under nohup, which ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Within the block, each of them raises KeyboardInterrupt, as Ctrl-C does. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():  # Python handles signals there alone
        yield
        return
    before = {number: signal.getsignal(number) for number in stop_signals()}
    replaced = {n: h for n, h in before.items() if h in (signal.SIG_DFL, signal.default_int_handler)}
    for number in replaced:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        received.clear()
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    received.add(number)
    if number == signal.SIGHUP:  # a closed terminal sends a second one, which would interrupt the ending
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
