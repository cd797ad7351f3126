"""Tables and numbers for a terminal, Markdown and HTML.

Texts of unknown origin (names, paths, reasons) are printed as they are: they make no markup, no
HTML, no links, and control no terminal.
"""

import errno
import math
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from .errors import printable

if TYPE_CHECKING:
    from rich.status import Status

LINE_SECONDS = 10.0
"""The seconds between two lines of progress where there is no terminal."""


@dataclass(frozen=True)
class Table:
    """Rows of texts, for a terminal or Markdown; a cell may have several lines.

    In HTML, the template of a study's report writes it.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    align: str = "l"
    """A letter per column, l for text or r for numbers; columns beyond these are numbers."""
    dim: frozenset[int] = frozenset()
    """Rows that a terminal prints dimly."""
    groups: frozenset[int] = frozenset()
    """Rows that begin a group: in HTML, with a line above."""
    marked: str = ""
    """The first characters of lines that a terminal prints in green."""
    signs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Ends of cells -> the colour in a terminal, and the class in HTML: {" ▲": ("green",
    "better")}."""

    @property
    def sides(self) -> str:
        """A letter per column, l or r."""
        return self.align.ljust(len(self.head), "r")

    def rich(self, **options: Any) -> RenderableType:
        """Return the table for a terminal, under an empty line and its title if it has one; texts
        wrap, numbers do not.

        options: of rich.table.Table.
        """
        from rich.table import Table as RichTable

        table = RichTable(**{"box": None, "pad_edge": False, "header_style": "bold", **options})
        height = max((name.count("\n") for name in self.head), default=0)
        for name, side in zip(self.head, self.sides, strict=True):
            # Headings of several lines end on the same line.
            heading = Text(printable("\n" * (height - name.count("\n")) + name))
            justify = "right" if side == "r" else "left"
            table.add_column(heading, justify=justify, no_wrap=side == "r", overflow="fold")
        for i, row in enumerate(self.rows):
            # Text objects, not strings: rich reads strings as markup, and a cell may be a
            # stranger's text.
            texts = [Text(printable(cell)) for cell in row]
            for text in texts if self.marked else ():
                text.highlight_regex(rf"(?m)^{re.escape(self.marked)}.*$", "green")
            for text in texts:
                text.stylize(
                    next(
                        (
                            color
                            for end, (color, _) in self.signs.items()
                            if text.plain.endswith(end)
                        ),
                        "",
                    )
                )
            table.add_row(*texts, style="dim" if i in self.dim else "")
        return (
            Group(Text(f"\n{printable(self.title)}", style="bold"), table) if self.title else table
        )

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown, under its title if it has one; without a newline
        at the end.

        The lines of a cell stay lines.
        """
        lines = []
        for row in (self.head, *self.rows):
            cells = (
                "<br>".join(map(markdown_line, cell.split("\n"))).replace("|", "\\|")
                for cell in row
            )
            lines.append(f"| {' | '.join(cells)} |")
        rule = "".join("---:|" if side == "r" else "---|" for side in self.sides)
        title = [f"**{markdown_line(self.title)}**", ""] if self.title else []
        return "\n".join([*title, lines[0], f"|{rule}", *lines[1:]])


def without_html(text: str) -> str:
    """Return a text as one line of Markdown that makes no HTML: no tags, no newlines, no control
    characters.
    """
    text = "".join(c if c.isprintable() else " " for c in text)
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def markdown_line(text: str) -> str:
    """Return a text as one line of Markdown that reads as it is: no HTML, links, pictures, code or
    emphasis.
    """
    return re.sub(r"(`|(?<=\S)\*|\*(?=\S)|\](?=[(\[:]))", r"\\\1", without_html(printable(text)))


def fenced(text: str, language: str = "") -> str:
    """Return a block of code in Markdown, with a fence longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    end = "" if text.endswith("\n") else "\n"
    return f"{fence}{language}\n{text}{end}{fence}"


def html_text(text: str) -> str:
    """Return a text for an element or a quoted attribute of HTML."""
    return escape(printable(text))


class Terminal(Console):
    """A console that prints texts as they are: no markup, control characters escaped, no blanks at
    the ends of lines.

    A path such as `[/red]` is not markup, and a name with an escape sequence does not control the
    terminal. Use rich.text.Text for colors.
    """

    def __init__(self, **settings: Any):
        super().__init__(**{"markup": False, "emoji": False, **settings})

    def render_str(self, text: str, **options: Any) -> Text:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Render a text; rich calls this for every text, also in tables."""
        return super().render_str(printable(text), **options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Return the text of segments without the blanks that rich pads tables with, for logs and
        copied lines; control characters of any text are escaped.
        """
        # Also of Text objects, which `render_str` never sees, such as a title of somebody's suite.
        # rich's own codes, for colors and the cursor, are made from styles and control segments.
        safe = (s if s.control else Segment(printable(s.text), s.style) for s in buffer)
        return re.sub(r" +(?=\n)", "", super()._render_buffer(safe))

    def _write_buffer(self) -> None:
        """Write. After the terminal was closed, or the reader of a pipe has ended, all output is
        dropped.
        """
        try:
            super()._write_buffer()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            # The descriptor is replaced, so that no later write to it fails.
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.file.fileno())
            del self._buffer[:]


def can_print(console: Console, text: str) -> bool:
    """Whether the console's encoding has these characters."""
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


LABEL_STYLES = {"notice": "yellow", "warning": "yellow", "diverged": "red", "next": "green"}
"""The styles of labels that are not only bold."""


def print_labelled(
    console: Console, label: str, *texts: str, wrap: bool = True, link: str = ""
) -> None:
    """Print a label in the first 10 columns, or as many as it needs, and the texts from column 10
    on, below each other.

    wrap: on a terminal, into lines of its width; False for what is copied: a path, a command. Where
    there is no terminal, as in a cluster's logs, one record is one line, unless COLUMNS is set.
    link: an address that the text opens, in terminals that can.
    """
    style = f"bold {LABEL_STYLES.get(label, '')}"
    width = console.width if console.is_terminal or "COLUMNS" in os.environ else sys.maxsize
    for text in texts:
        lines = [f"{label:<9} {printable(text)}"]
        if wrap:
            indents: dict[str, Any] = {
                "initial_indent": f"{label:<9} ",
                "subsequent_indent": " " * 10,
            }
            lines = textwrap.wrap(
                printable(text), width, **indents, break_long_words=False, break_on_hyphens=False
            )
        for line in lines:
            styled = Text(line)
            styled.stylize(style, 0, len(label))
            if link:
                styled.stylize(f"link {link}", 10)
            console.print(styled, soft_wrap=True)
            label = ""


def stderr_console(*, quiet: bool = False) -> Terminal:
    """Return a console on the current standard error; it also prints within silence.silence()."""
    return Terminal(file=sys.stderr, quiet=quiet)


def loading(console: Console, text: str) -> "Status":
    """Return a spinner with this text; without a terminal, as in a cluster's logs, print the text
    as a line.
    """
    # A log file has no line that changes: a spinner would be thousands of control characters.
    if not console.is_terminal:
        word, _, rest = text.partition(" ")
        console.print(f"{word.lower():<9} {rest}", highlight=False)
    return console.status(text)


@contextmanager
def working(console: Console, text: str) -> Iterator[Callable[[str], object]]:
    """Show `text` while the block runs; yields a function that replaces it.

    A spinner on a terminal; elsewhere a line every LINE_SECONDS with the seconds since the start,
    so that a log shows that a long phase still runs, and which one.
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


def counting(show: Callable[[str], object], activity: str) -> Callable[[int, int], None]:
    """Return a callback that shows the sum of the numbers of examples it gets, and their tokens in
    a second: a large dataset takes minutes.
    """
    total = num_tokens = 0
    start = time.monotonic()

    def on_examples(number: int, tokens: int) -> None:
        nonlocal total, num_tokens
        total, num_tokens = total + number, num_tokens + tokens
        speed = num_tokens / max(time.monotonic() - start, 1e-9)
        tokens_per_second = f", {speed:,.0f} tokens/s" * (num_tokens > 0)
        show(f"{activity}: {total:,} examples{tokens_per_second}")

    return on_examples


def number(value: float | None, form: str = ",") -> str:
    """Return a number in Python's format: `.2f`, `.0%`, `,`; a dash for None and for NaN and
    infinity.
    """
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def mean_std(values: Sequence[float], decimals: int) -> str:
    """Return the mean and, of several values, their standard deviation: 1.25 ± 0.03."""
    if not values:
        return "-"
    deviation = f" ± {stdev(values):.{decimals}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{decimals}f}{deviation}"


def p_value(p: float) -> str:
    """Return a p-value: p 0.012, p < 0.001."""
    return "p < 0.001" if p < 0.001 else f"p {p:.3f}"


def count(num: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: 1 trial, 6 trials, 1,000 matrices."""
    return f"{num:,} {noun if num == 1 else plural or f'{noun}s'}"


def join_words(words: Sequence[str], conjunction: str = "and") -> str:
    """Return words as a list in a sentence: a, b and c."""
    return f" {conjunction} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def dotted(key: Iterable[str | int]) -> str:
    """Return a key as it is written after --set: 'data.train.0.path'."""
    return ".".join(map(str, key))


def duration(seconds: float | None) -> str:
    """Return a time in its natural unit: 21.3 s, 4.5 min, 3.2 h."""
    if seconds is None:
        return "-"
    length, unit = (3600, "h") if seconds >= 7200 else (60, "min") if seconds >= 120 else (1, "s")
    return f"{seconds / length:.1f} {unit}"


def gibibytes(num_bytes: float | None) -> str:
    """Return an amount of memory as 1.25 GiB."""
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"


def estimated_time(hours: float) -> str:
    """Return an estimated time in two digits and its natural unit: 13 s, 4.5 min, 7.8 h, 1,200
    h.
    """
    length, unit = (1, "h") if hours >= 1.5 else (60, "min") if hours >= 1 / 40 else (3600, "s")
    number = hours * length
    return f"{number:,.0f} {unit}" if number >= 10 else f"{number:.2g} {unit}"


def with_prefix(number: float | None, unit: str) -> str:
    """Return a number with at least three digits and an SI prefix: 6.11 GB, 307 TFLOP; "unknown"
    for None.
    """
    if number is None:
        return "unknown"
    prefixes = {1e18: "E", 1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}
    scale = next((scale for scale in prefixes if number >= scale), 1e3)
    digits = 0 if number >= 100 * scale else 1 if number >= 10 * scale else 2
    return f"{number / scale:.{digits}f} {prefixes[scale]}{unit}"
