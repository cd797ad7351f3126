"""A report as plain data, and its two forms: one page of HTML, and the same as Markdown.

All strings are plain text of unknown origin; neither form takes them as code. The page is one file
without scripts, network or fonts, light and dark, on paper and on a phone. The templates page.html
and page.md escape every text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...core.errors import printable
from ...core.text import Table, fenced, markdown_line

STYLE = Path(__file__).with_name("report.css")


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
    """better, worse, open (not distinguishable), caution or problem: the colour and the sign before
    it."""


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


class LongTable(Table):
    """A table in a box that scrolls."""


class TextTable(Table):
    """A table of texts, which wrap."""


@dataclass(frozen=True)
class Picture:
    """A picture for a light and for a dark page, as `data:` addresses, and its content in one
    sentence.
    """

    light: str
    dark: str
    alt: str


@dataclass(frozen=True)
class Figure:
    """Small pictures beside each other, on a phone below each other, and the picture of each name
    in a legend.
    """

    panels: list[Picture]
    caption: str
    legend: list[Picture] = field(default_factory=list)


@dataclass(frozen=True)
class Code:
    """Preformatted text; folded: its title, if it is closed until the reader opens it."""

    text: str
    folded: str = ""


Block = Paragraph | Items | Alert | Table | Figure | Code
Sections = Mapping[str, Sequence[Block]]
"""The blocks under each heading."""


def render(form: Literal["html", "md"], title: str, subtitle: str, sections: Sections) -> str:
    """Return the page as HTML, or as Markdown, with the content of each picture as a text."""
    environment = Environment(
        loader=FileSystemLoader(STYLE.parent),
        autoescape=form == "html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    )
    environment.filters |= {
        "form": lambda block: type(block).__name__,
        "line": markdown_line,
        "fenced": fenced,
    }
    page, style = environment.get_template(f"page.{form}"), STYLE.read_text(encoding="utf-8")
    return page.render(title=title, subtitle=subtitle, sections=sections, style=style)
