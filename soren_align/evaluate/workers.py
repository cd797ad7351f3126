"""Who holds the model and does the work: this process, or several, each with a copy on a GPU of its own."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size

from ..errors import UserError
from ..silence import silence
from .backends import Setup, answer, load

Work = tuple[str, str, list[tuple]]
"""(name, kind, requests)."""


class OutOfMemory(Exception):
    """A batch did not fit."""


class Here:
    """This process, which loads the model when there is something to ask."""

    def __init__(self, model: Any, tokenizer: Any, setup: Setup):
        self.what = model, tokenizer, setup
        self.lm: Any = None

    def work_on(self, work: list[Work]) -> Iterator[tuple[str, list[Any], int]]:
        """(name, answers, prompts cut) of each, as they come."""
        for name, kind, requests in work:
            self.lm = self.lm or _load(*self.what)
            yield name, *_guarded(answer, self.lm, kind, requests)

    def close(self) -> None:
        """Let the model go."""
        self.lm = None


class Several:
    """Processes that load the model each when they are first asked; the first free one gets the next work."""

    def __init__(self, number: int, model: Any, tokenizer: Any, setup: Setup):
        # Not fork: a forked CUDA does not work. Not spawn: each process would import torch and lm-eval anew, for 6 s.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([__name__])
        numbers = server.SimpleQueue()
        for each in range(number):
            numbers.put(each)
        threads = max(1, torch.get_num_threads() // number)
        self.pool = ProcessPoolExecutor(number, server, _begin, (numbers, threads, model, tokenizer, setup))

    def work_on(self, work: list[Work]) -> Iterator[tuple[str, list[Any], int]]:
        """(name, answers, prompts cut) of each, as they come."""
        waiting = {self.pool.submit(_answer, kind, requests): name for name, kind, requests in work}
        try:
            for future in as_completed(waiting):
                yield waiting[future], *future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that answered questions was killed (out of memory?); the same command goes on"
            ) from error
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Let the processes go."""
        self.pool.shutdown(cancel_futures=True)


def _load(model: Any, tokenizer: Any, setup: Setup) -> Any:
    try:
        return _guarded(load, model, tokenizer, setup)
    except OutOfMemory as error:  # no smaller batch would help
        raise UserError(f"{model}: the model itself does not fit the device's memory: {error}") from error


def _guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in silence; OutOfMemory where the device had too little."""
    try:
        with silence():
            return function(*arguments)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        lacked = str(error).splitlines()[0]
    # Outside of `except`: the error's traceback holds the batch and the model.
    raise OutOfMemory(lacked)


# What follows runs in the processes of Several.

_what: tuple[Any, Any, Setup]
_lm: Any = None


def _begin(numbers: Any, threads: int, model: Any, tokenizer: Any, setup: Setup) -> None:
    global _what
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    number = numbers.get()
    if setup.device.startswith("cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
    torch.set_num_threads(threads)
    _what = model, tokenizer, setup


def _leave_with_parent() -> None:
    """A parent that was killed cannot say goodbye, and an orphan would hold its GPU for ever."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


def _answer(kind: str, requests: list[tuple]) -> tuple[list[Any], int]:
    global _lm
    if _lm is None:
        _lm = _load(*_what)
    return _guarded(answer, _lm, kind, requests)
