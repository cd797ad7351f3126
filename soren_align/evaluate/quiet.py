"""lm-eval, datasets and transformers at work, without a word on the terminal."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


class _Listener(logging.Handler):
    """Keeps what lm-eval warns of."""

    def __init__(self, messages: list[str]):
        super().__init__(logging.WARNING)
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """lm-eval's bars, prints and logs stay off the terminal; its warnings are handed back."""
    messages: list[str] = []
    log, listener = logging.getLogger("lm_eval"), _Listener(messages)
    others = [logging.getLogger(name) for name in ("transformers", "datasets", "huggingface_hub")]
    levels, propagate, handlers = [other.level for other in others], log.propagate, log.handlers
    log.propagate, log.handlers = False, [listener]
    for other in others:
        other.setLevel(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield messages
    finally:
        log.propagate, log.handlers = propagate, handlers
        for other, level in zip(others, levels, strict=True):
            other.setLevel(level)
