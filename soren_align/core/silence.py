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
from typing import Any

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
def no_progress_bars() -> Iterator[None]:
    """Turn off the progress bars of datasets, huggingface_hub and transformers."""
    switches = [switch for switch in _progress_bars() if not switch[0]]
    for _, disable, _ in switches:
        disable()
    try:
        yield
    finally:
        for _, _, enable in switches:
            enable()


def _progress_bars() -> Iterator[tuple[bool, Any, Any]]:
    """Yield (whether the bars are off, disable, enable) for each imported library that has progress bars."""
    if datasets := sys.modules.get("datasets"):
        yield datasets.are_progress_bars_disabled(), datasets.disable_progress_bars, datasets.enable_progress_bars
    if transformers := sys.modules.get("transformers"):  # its switch turns the hub's as well
        log = transformers.utils.logging
        yield not log.is_progress_bar_enabled(), log.disable_progress_bar, log.enable_progress_bar
    if hub := sys.modules.get("huggingface_hub"):
        bars = hub.utils
        yield bars.are_progress_bars_disabled(), bars.disable_progress_bars, bars.enable_progress_bars


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence progress bars, warnings and all logs below errors; prints stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with log_level(logging.ERROR, *LIBRARIES), no_progress_bars():
            yield


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
