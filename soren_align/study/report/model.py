"""A report as plain data: sections of texts, tables and figures, from which the page and its Markdown twin are made.

All strings are plain text of unknown origin, except `Panel.svg` and `Key.svg`, which report_svg.py makes.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Paragraph:
    """A text; lead: the verdict; muted: an explanation under a table or a figure."""

    text: str
    kind: Literal["", "lead", "muted"] = ""


@dataclass(frozen=True)
class Item:
    """A point of a list: some words in bold, then the sentence's end."""

    lead: str
    text: str = ""
    kind: str = ""
    """better, worse, open (not distinguishable), caution or problem: the colour and the sign before it."""


@dataclass(frozen=True)
class Items:
    """A list."""

    items: list[Item]
    title: str = ""


@dataclass(frozen=True)
class Alert:
    """A red box, for faults that forbid a verdict."""

    title: str
    items: list[str]


@dataclass(frozen=True)
class Table:
    """Rows of texts; a cell may have several lines."""

    head: list[str]
    rows: list[list[str]]
    num_text: int = 1
    """Columns of text on the left; the others are numbers, right-aligned."""
    last_text: bool = False
    """Whether the last column is text too."""
    strong: frozenset[int] = frozenset()
    """Rows with a line above: the first of each group."""
    long: bool = False
    """Shown in a box that scrolls."""


@dataclass(frozen=True)
class Key:
    """An entry of a figure's legend."""

    svg: str
    name: str


@dataclass(frozen=True)
class Panel:
    """A picture as an <svg> element, and its content in one sentence."""

    svg: str
    alt: str


@dataclass(frozen=True)
class Panels:
    """A figure: small pictures beside each other, on a phone below each other."""

    panels: list[Panel]
    caption: str
    legend: list[Key] = field(default_factory=list)


@dataclass(frozen=True)
class Code:
    """Preformatted text; folded: closed until the reader opens it."""

    text: str
    folded: str = ""
    """The title of what is folded; empty: shown."""


Block = Paragraph | Items | Alert | Table | Panels | Code


@dataclass(frozen=True)
class Section:
    """A heading with its blocks."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    subtitle: str
    sections: list[Section]
