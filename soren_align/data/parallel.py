"""Work on many examples in several processes, with the result of one."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from ..core.errors import ResumableError
from ..core.signals import end_with_parent

MOST_PROCESSES = 16
"""Of a node, by default: the first rank writes what they make, at 20 times a process's speed."""
AHEAD = 2
"""Results for each process that wait for their turn: the memory is bounded."""
_work: Callable[[Any], Any]
Item = TypeVar("Item")
Result = TypeVar("Result")


def default_processes() -> int:
    """The cores of this process: the other ranks wait meanwhile, without using theirs."""
    if not hasattr(os, "sched_getaffinity"):  # macOS, whose libraries do not bear a fork
        return 1
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], num_processes: int
) -> Iterator[Result]:
    """Yield `work` of each item, in the order of the items, by forked processes, which read what
    `work` refers to without a copy.

    Raises what `work` raises, of the first item that fails; ResumableError if a process was killed.
    """
    if num_processes < 2:
        yield from map(work, items)
        return
    # A closure over a dataset and a tokenizer: inherited, since it cannot be pickled.
    global _work
    _work = work
    pool = ProcessPoolExecutor(num_processes, get_context("fork"), end_with_parent)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_call, item))
            if len(waiting) > AHEAD * num_processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ResumableError(
            "a process that prepares the examples was killed, perhaps because memory ran out; free"
            " memory or write a smaller trainer.dataset_num_proc, then rerun the same command"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _call(item: Any) -> Any:
    return _work(item)
