"""lm-eval, datasets and transformers at work, without a word on the terminal."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

LOUD = ("lm_eval", "transformers", "datasets", "huggingface_hub")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Their bars, prints, logs and warnings stay off the terminal. What matters is found out and said by ourselves."""
    logs = [logging.getLogger(name) for name in LOUD]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
