"""The terminal: rich's console, for text of unknown origin."""

import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from .errors import printable


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


def print_labelled(console: Console, label: str, text: str) -> None:
    """Print a label in the first 10 columns and the text wrapped to the right of it."""
    lines = textwrap.wrap(text, console.width - 10, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        console.print(f"{'' if number else label:<10}{line}", markup=False, highlight=False, soft_wrap=True)


def stderr_console(*, quiet: bool = False) -> Terminal:
    """Return a console on the current standard error; it also prints within silence.silence()."""
    return Terminal(file=sys.stderr, quiet=quiet)


def loading(console: Console, text: str) -> Status:
    """Return a spinner with this text; without a terminal, as in a cluster's logs, print the text as a line."""
    if not console.is_terminal:
        word, _, rest = text.partition(" ")
        console.print(f"{word.lower():<9} {rest}", highlight=False)
    return console.status(text)
