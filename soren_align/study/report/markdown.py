"""A report as Markdown: the sentences and tables of the page, and each figure's content as text."""

import re
from functools import singledispatch

from ...core.errors import printable
from ...evaluate.report.tables import in_cell, plain
from .model import Alert, Block, Code, Items, Page, Panels, Paragraph, Table


def page_markdown(page: Page) -> str:
    """Return the report as Markdown; texts of runs and recipes make no HTML, no links and no pictures."""
    parts = [f"# {_text(page.title)}", _text(page.subtitle)]
    for section in page.sections:
        parts += [f"## {_text(section.title)}", *map(_block, section.blocks)]
    return "\n\n".join(parts) + "\n"


def _text(text: str) -> str:
    return _without_links(plain(printable(text)))


def _cell(text: str) -> str:
    return "<br>".join(_without_links(in_cell(line)) for line in printable(text).split("\n"))


def _without_links(text: str) -> str:
    return re.sub(r"([`*]|\](?=[(\[:]))", r"\\\1", text)


@singledispatch
def _block(block: Block) -> str:
    raise TypeError(f"{type(block).__name__} has no form in Markdown")


@_block.register
def _(block: Paragraph) -> str:
    return _text(block.text)


@_block.register
def _(block: Items) -> str:
    items = "\n".join(f"- {f'**{_text(item.lead)}**' if item.lead else ''}{_text(item.text)}" for item in block.items)
    return f"### {_text(block.title)}\n\n{items}" if block.title else items


@_block.register
def _(block: Alert) -> str:
    return "\n".join([f"> **{_text(block.title)}**", ">", *(f"> - {_text(item)}" for item in block.items)])


@_block.register
def _(block: Table) -> str:
    num_left = len(block.head) - block.last_text
    rule = "".join("---:|" if block.num_text <= i < num_left else "---|" for i in range(len(block.head)))
    rows = [f"| {' | '.join(map(_cell, row))} |" for row in (block.head, *block.rows)]
    return "\n".join([rows[0], f"|{rule}", *rows[1:]])


@_block.register
def _(block: Panels) -> str:
    return "\n".join([_text(block.caption), "", *(f"- {_text(panel.alt)}" for panel in block.panels)])


@_block.register
def _(block: Code) -> str:
    text = printable(block.text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    title = f"{_text(block.folded)}:\n\n" if block.folded else ""
    return f"{title}{fence}\n{text}\n{fence}"
