"""Let the code of lm-eval's tasks give the same questions and the same points each time."""

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import datasets
import numpy as np

from ...core.patches import patched
from .suites import Seeds


@contextlib.contextmanager
def documents(seeds: Seeds) -> Iterator[Callable[[], None]]:
    """A context in which the questions of a task depend on the seeds alone; yields a function that sets them.

    GPQA's code shuffles the choices with Python's generator. `datasets` would read the order of the first loading, by
    whichever program, from its cache. The generators' states are restored.
    """
    states, was_enabled = (random.getstate(), np.random.get_state()), datasets.is_caching_enabled()
    datasets.disable_caching()

    def seed() -> None:  # as simple_evaluate, before it loads tasks
        random.seed(seeds.random)
        np.random.seed(seeds.numpy)

    try:
        yield seed
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if was_enabled:
            datasets.enable_caching()


def processing_once(function: Any) -> Any:
    """Return a task's function; if it is its `process_docs`, it processes a dataset once.

    lm-eval calls it at each access to the questions, and would get another order of GPQA's choices each time.
    """
    processed: dict[str, Any] = {}

    @functools.wraps(function)
    def once(*arguments: Any, **options: Any) -> Any:
        if options or len(arguments) != 1 or not isinstance(arguments[0], datasets.Dataset):
            return function(*arguments, **options)
        key = arguments[0]._fingerprint
        if key not in processed:
            processed[key] = function(arguments[0])
        return processed[key]

    return once


@contextlib.contextmanager
def scoring(seeds: Seeds) -> Iterator[None]:
    """A context in which the points of a response do not depend on chance, and hardly on the machine's speed.

    For packages that a task's code has imported: IFEval's detects languages by a generator without a seed, and MATH's
    gives up after 1 or 5 seconds, within which the first call reads the grammar of LaTeX.
    """
    with contextlib.ExitStack() as stack:
        if languages := sys.modules.get("langdetect"):
            name = "langdetect.DetectorFactory.seed"
            stack.enter_context(patched(name, seeds.random, getattr(languages, "DetectorFactory", None)))
        if verifier := sys.modules.get("math_verify"):
            verifier.parse("$1$")
            import_module("sympy.parsing.latex").parse_latex("1")
        yield
