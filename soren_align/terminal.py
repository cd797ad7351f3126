"""The terminal: rich's console, for text that strangers wrote."""

from typing import Any

from rich.console import Console
from rich.text import Text

from .errors import printable


class Terminal(Console):
    """A console that prints texts as they are: no markup, control characters escaped.

    A path such as `[/red]` is no mark-up, and a name with an escape sequence in it does not command the terminal. What
    is to be coloured is a rich.text.Text.
    """

    def __init__(self, **settings: Any):
        super().__init__(**{"markup": False, "emoji": False, **settings})

    def render_str(self, text: str, **how: Any) -> Text:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Every text passes here, also those in tables."""
        return super().render_str(printable(text), **how)
