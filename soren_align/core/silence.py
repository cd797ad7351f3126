"""Keep the libraries' logs, warnings, progress bars and prints off the terminal.

The one place that does so. Each function is a context manager that restores the settings. A library
that is not imported yet is not imported here: call it after the import.
"""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator

LIBRARIES = ("accelerate", "bitsandbytes", "datasets", "huggingface_hub", "lm_eval", "transformers")


@contextlib.contextmanager
def log_level(level: int, *names: str) -> Iterator[None]:
    """Set the level of the loggers with these names."""
    # setLevel clears the caches of all loggers: within a loop over questions it cost 1 ms each
    # (notes/log.md).
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in levels.items():
            logger.setLevel(before)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence progress bars, warnings and all logs below errors; prints stay."""
    switches = []  # of the libraries that show bars
    # Only of libraries that are imported already: to import one for its switch would take seconds.
    hub = sys.modules.get("huggingface_hub")
    for library in (sys.modules.get("datasets"), hub and hub.utils):
        if library and not library.are_progress_bars_disabled():
            switches.append((library.disable_progress_bars, library.enable_progress_bars))
    if transformers := sys.modules.get("transformers"):  # its switch turns the hub's as well
        log = transformers.utils.logging
        switches += [
            (log.disable_progress_bar, log.enable_progress_bar)
        ] * log.is_progress_bar_enabled()
    with warnings.catch_warnings(), log_level(logging.ERROR, *LIBRARIES):
        warnings.simplefilter("ignore")
        for disable, _ in switches:
            disable()
        try:
            yield
        finally:
            for _, enable in switches:
                enable()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Silence everything, prints included.
    A console that holds its stream (terminal.stderr_console) still prints.
    """
    with (
        log_level(logging.CRITICAL, *LIBRARIES),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
