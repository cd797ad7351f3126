"""Keep the libraries' logs, warnings, progress bars and prints off the terminal.

The one place that does so. Each function is a context manager that restores the settings. A library that is not
imported yet is not imported here: call it after the import.
"""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator

LIBRARIES = ("accelerate", "bitsandbytes", "datasets", "huggingface_hub", "lm_eval", "transformers")
_KERNELS = "Failed to load CPU gemm_4bit_forward"


def silence_missing_kernels() -> None:
    """Drop bitsandbytes' warning about a package of optional kernels, which PEFT's import of it prints."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.addFilter(lambda record: not record.getMessage().startswith(_KERNELS))


@contextlib.contextmanager
def log_level(level: int, *names: str) -> Iterator[None]:
    """Set the level of the loggers with these names."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence progress bars, warnings and all logs below errors; prints stay."""
    bars = []  # of the libraries that have some: whether they are shown, and the two switches
    if datasets := sys.modules.get("datasets"):
        is_shown = not datasets.are_progress_bars_disabled()
        bars.append((is_shown, datasets.disable_progress_bars, datasets.enable_progress_bars))
    if transformers := sys.modules.get("transformers"):  # its switch turns the hub's as well
        log = transformers.utils.logging
        bars.append((log.is_progress_bar_enabled(), log.disable_progress_bar, log.enable_progress_bar))
    if hub := sys.modules.get("huggingface_hub"):
        utils = hub.utils
        bars.append((not utils.are_progress_bars_disabled(), utils.disable_progress_bars, utils.enable_progress_bars))
    switches = [(disable, enable) for is_shown, disable, enable in bars if is_shown]
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
    """Silence everything, prints included. A console that holds its stream (terminal.stderr_console) still prints."""
    with (
        log_level(logging.CRITICAL, *LIBRARIES),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
