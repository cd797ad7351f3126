"""The terminal: rich's console, for text of unknown origin."""

import errno
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from .errors import printable

LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


class Terminal(Console):
    """A console that prints texts as they are: no markup, control characters escaped, no blanks at the ends of lines.

    A path such as `[/red]` is not markup, and a name with an escape sequence does not control the terminal. Use
    rich.text.Text for colors.
    """

    def __init__(self, **settings: Any):
        super().__init__(**{"markup": False, "emoji": False, **settings})

    def render_str(self, text: str, **options: Any) -> Text:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Render a text; rich calls this for every text, also in tables."""
        return super().render_str(printable(text), **options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Return the text of segments without the blanks that rich pads tables with, for logs and copied lines."""
        return re.sub(r" +(?=\n)", "", super()._render_buffer(buffer))

    def _write_buffer(self) -> None:
        """Write. After the terminal was closed, or the reader of a pipe has ended, all output is dropped."""
        try:
            super()._write_buffer()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.file.fileno())
            del self._buffer[:]


def print_labelled(console: Console, label: str, text: str) -> None:
    """Print a label in the first 10 columns, or as many as it needs, and the text wrapped from column 10 on."""
    wrapper = textwrap.TextWrapper(
        console.width,
        initial_indent=f"{label:<9} ",
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in wrapper.wrap(text):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def stderr_console(*, quiet: bool = False) -> Terminal:
    """Return a console on the current standard error; it also prints within silence.silence()."""
    return Terminal(file=sys.stderr, quiet=quiet)


def loading(console: Console, text: str) -> Status:
    """Return a spinner with this text; without a terminal, as in a cluster's logs, print the text as a line."""
    if not console.is_terminal:
        word, _, rest = text.partition(" ")
        console.print(f"{word.lower():<9} {rest}", highlight=False)
    return console.status(text)


@contextmanager
def working(console: Console, text: str) -> Iterator[Callable[[str], object]]:
    """Show `text` while the block runs; yields a function that replaces it.

    A spinner on a terminal; elsewhere a line every LINE_SECONDS with the seconds since the start, so that a log shows
    that a long phase still runs, and which one.
    """
    if console.is_terminal:
        with console.status(text) as status:
            yield status.update
        return
    current, ended, start = [text], threading.Event(), time.monotonic()

    def print_lines() -> None:
        while not ended.wait(LINE_SECONDS):
            label, _, words = current[0].partition(" ")
            print_labelled(console, label.lower(), f"{words} ({time.monotonic() - start:.0f} s)")

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield lambda text: current.__setitem__(0, text)
    finally:
        ended.set()
        thread.join()


def counting(show: Callable[[str], object], activity: str) -> Callable[[int], None]:
    """Return a callback that shows the sum of the numbers of examples it gets: a large dataset takes minutes."""
    total = 0

    def on_examples(number: int) -> None:
        nonlocal total
        total += number
        show(f"{activity}: {total:,} examples")

    return on_examples


def short_hours(number: float) -> str:
    """Two digits: 0.23, 8.6, 1,200; "less than 0.01"."""
    if 0 < number < 0.01:
        return "less than 0.01"
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def with_prefix(number: float, unit: str) -> str:
    """At least three digits and an SI prefix: 6.11 GB, 307 TFLOP."""
    scale, prefix = next(
        ((10.0**e, p) for e, p in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M")) if number >= 10**e), (1e3, "k")
    )
    return f"{number / scale:.{0 if number >= 100 * scale else 1 if number >= 10 * scale else 2}f} {prefix}{unit}"
