"""A report as plain data, and its two forms: one page of HTML, and the same as Markdown.

All strings are plain text of unknown origin; neither form takes them as code. The page is one file without scripts,
network or fonts, light and dark, on paper and on a phone. Its template, page.html, escapes every text.
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


class LongTable(Table):
    """A table in a box that scrolls."""


class TextTable(Table):
    """A table of texts, which wrap."""


@dataclass(frozen=True)
class Picture:
    """A picture for a light and for a dark page, as `data:` addresses, and its content in one sentence."""

    light: str
    dark: str
    alt: str


@dataclass(frozen=True)
class Figure:
    """Small pictures beside each other, on a phone below each other, and the picture of each name in a legend."""

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


def page_html(title: str, subtitle: str, sections: Sections) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=FileSystemLoader(STYLE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    )
    environment.filters["form"] = lambda block: type(block).__name__
    style = STYLE.read_text(encoding="utf-8")
    return environment.get_template("page.html").render(title=title, subtitle=subtitle, sections=sections, style=style)


def page_markdown(title: str, subtitle: str, sections: Sections) -> str:
    """Return the page as Markdown, with the content of each picture as a text."""
    parts = [f"# {markdown_line(title)}", markdown_line(subtitle)]
    for heading, blocks in sections.items():
        parts.append(f"## {markdown_line(heading)}")
        for block in blocks:
            if isinstance(block, Table):
                text = block.markdown()
            elif isinstance(block, Code):
                folded = f"{markdown_line(block.folded)}:\n\n" if block.folded else ""
                text = folded + fenced(printable(block.text))
            elif isinstance(block, Paragraph):
                text = markdown_line(block.text)
            elif isinstance(block, Figure):
                pictures = [f"- {markdown_line(picture.alt)}" for picture in block.panels]
                text = "\n".join([f"Figure in report.html. {markdown_line(block.caption)}", "", *pictures])
            elif isinstance(block, Alert):
                items = [f"> - {markdown_line(item)}" for item in block.items]
                text = "\n".join([f"> **{markdown_line(block.title)}**", ">", *items])
            else:
                leads = [f"**{markdown_line(item.lead)}**" if item.lead else "" for item in block.items]
                items = [f"- {lead}{markdown_line(item.text)}" for lead, item in zip(leads, block.items, strict=True)]
                text = "\n".join([f"### {markdown_line(block.title)}\n"] * bool(block.title) + items)
            parts.append(text)
    return "\n\n".join(parts) + "\n"
