"""The page of a report: one file, without scripts, network or fonts, light and dark, on paper and on a phone."""

from functools import singledispatch
from html import escape
from pathlib import Path

from ...core.errors import printable
from .model import Alert, Block, Code, Item, Items, Page, Panels, Paragraph, Section, Table

STYLE = Path(__file__).with_name("report.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SIGNS = {"better": "▲", "worse": "▼", "open": "○", "caution": "!", "problem": "✕"}


def page_html(page: Page) -> str:
    """Return the page as HTML; every text of a run or a recipe is escaped."""
    contents = "".join(f'<a href="#part{i}">{_text(each.title)}</a>' for i, each in enumerate(page.sections))
    sections = "".join(_section(i, section) for i, section in enumerate(page.sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{_text(page.title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n<header><h1>{_text(page.title)}</h1><p>{_text(page.subtitle)}</p></header>\n"
        f"<nav>{contents}</nav>\n<main>\n{sections}</main>\n</body>\n</html>\n"
    )


def _section(number: int, section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    return f'<section id="part{number}">\n<h2>{_text(section.title)}</h2>\n{blocks}\n</section>\n'


def _text(text: str) -> str:
    return escape(printable(text))


@singledispatch
def _block(block: Block) -> str:
    raise TypeError(f"{type(block).__name__} has no form in HTML")


@_block.register
def _(block: Paragraph) -> str:
    return f"<p{f' class={block.kind}' if block.kind else ''}>{_text(block.text)}</p>"


@_block.register
def _(block: Items) -> str:
    title = f"<h3>{_text(block.title)}</h3>" if block.title else ""
    return f'{title}<ul class="items">{"".join(map(_item, block.items))}</ul>'


def _item(item: Item) -> str:
    sign = f'<span class="sign" aria-hidden="true">{SIGNS[item.kind]}</span>' if item.kind else ""
    return f'<li class="{escape(item.kind)}">{sign}<strong>{_text(item.lead)}</strong>{_text(item.text)}</li>'


@_block.register
def _(block: Alert) -> str:
    items = "".join(f"<li>{_text(item)}</li>" for item in block.items)
    return f'<div class="alert" role="alert"><h3>{_text(block.title)}</h3><ul>{items}</ul></div>'


@_block.register
def _(block: Table) -> str:
    head = "".join(f'<th scope="col"{_side(block, i)}>{_text(cell)}</th>' for i, cell in enumerate(block.head))
    rows = []
    for number, row in enumerate(block.rows):
        cells = "".join(f"<td{_side(block, i)}>{_text(cell)}</td>" for i, cell in enumerate(row))
        rows.append(f"<tr{' class=first' if number in block.strong else ''}>{cells}</tr>")
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="{"wide long" if block.long else "wide"}" tabindex="0">{body}</div>'


def _side(block: Table, column: int) -> str:
    if block.last_text and column == len(block.head) - 1:
        return " class=text"
    return " class=number" if column >= block.num_text else ""


@_block.register
def _(block: Panels) -> str:
    keys = "".join(f"<li>{key.svg}{_text(key.name)}</li>" for key in block.legend)
    legend = f'<ul class="legend">{keys}</ul>' if keys else ""
    panels = "".join(f'<div class="panel">{panel.svg}</div>' for panel in block.panels)
    across = 2 if len(block.panels) in (2, 4) else 3
    caption = f"<figcaption>{_text(block.caption)}</figcaption>"
    return f'<figure>{legend}<div class="panels across{across}">{panels}</div>{caption}</figure>'


@_block.register
def _(block: Code) -> str:
    text = f'<pre tabindex="0"><code>{_text(block.text)}</code></pre>'
    return f"<details><summary>{_text(block.folded)}</summary>{text}</details>" if block.folded else text
