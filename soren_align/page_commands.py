"""The command on pages: docs, which prints the README and the pages of docs/ as they are shipped."""

import re
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from . import shipped
from .errors import UserError, did_you_mean


def add_to(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(docs)


def _complete(incomplete: str) -> list[str]:
    return [name for name in shipped.pages() if name.startswith(incomplete)]


def docs(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="A page. Default: list them.", autocompletion=_complete)
    ] = None,
) -> None:
    """Print a page of the documentation, as Markdown if it is not printed on a terminal."""
    pages = shipped.pages()
    if topic is None:
        width = max(map(len, pages))
        for name, path in pages.items():
            typer.echo(f"{name:<{width}} " + textwrap.shorten(_subjects(path), 79 - width, placeholder=" ..."))
        return
    name = topic.lower().removeprefix("docs/").removesuffix(".md").removesuffix("/readme")
    name = name if name in pages else next((page for page in pages if page.endswith(f"/{name}")), name)
    if name not in pages:
        known = f"write one of {', '.join(pages)}"
        raise UserError(f"{topic}: no page of this name{did_you_mean(name, pages, known)}")
    text = pages[name].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(re.sub(r"<!--.*?-->\n", "", text), hyperlinks=False))


def _subjects(path: Path) -> str:
    """Return the page's title and headings, or its first line of text if it has no headings."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    title, *headings = re.findall(r"^##? (.*)$", text, re.MULTILINE)
    first = next((line for line in text.splitlines()[1:] if re.match(r"[\w`*]", line)), title)
    return "; ".join([title, *headings] if headings else [first]).replace("`", "")
