"""Print the annotated tree, and draw the picture of docs/architecture.md, docs/house.svg.

    python docs/make_architecture.py

The tree is a page of the site too. It has a line per file, from the first sentence of its
docstring, so that it cannot differ from the file. The picture has a box per room, in the layers of
tests/test_layers.py. tests/test_docs.py compares the picture with what is made here.
"""

import ast
import re
import textwrap
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "soren_align"
PICTURE = ROOT / "docs/house.svg"
INTRODUCTION = """# The files

This page lists the files of `soren_align/`, the rooms in the order of their layers ([Architecture](architecture.md)).
The line of a file is the first sentence of its docstring, or the beginning of this sentence. `python
docs/make_architecture.py` prints this page.
"""
WIDTH, NAMES = 120, 28

TO_THE_STEP = ["cli", "launch", "training", "optim", "spectral"]
"""The rooms from a command to the matrices of an optimizer step; with several ranks also
sharding."""
BOX_WIDTH, BOX_HEIGHT, GAP, MARGIN, LABEL = 272, 62, 14, 12, 40  # pixels
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #59636e }
  .name { font: 600 14px ui-monospace, monospace; fill: #1f2328 }
  .box { fill: #f6f8fa; stroke: #d1d9e0 }
  .way { stroke: #0969da; stroke-width: 2 }
  .arrow { fill: none; stroke: #0969da; stroke-width: 2; marker-end: url(#head) }
  .head { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 } .name { fill: #f0f6fc } .box { fill: #151b23; stroke: #3d444d }
    .way, .arrow { stroke: #4493f8 } .head { fill: #4493f8 }
  }
  @media (max-width: 600px) {
    text { visibility: hidden } .name { visibility: visible; font-size: 26px; transform: translateY(18px) }
  }
"""


def page() -> str:
    """The text of docs/files.md."""
    return f"{INTRODUCTION}\n{tree()}"


def tree() -> str:
    """The files of the package with a line each, the rooms in the order of the layers, as
    Markdown.
    """
    lines = ["```", _entry(PACKAGE / "__main__.py", "__main__.py")]
    for room in (room for layer in layers() for room in sorted(layer)):
        folder = PACKAGE / room
        if folder.is_dir():
            lines.append(_entry(folder / "__init__.py", f"{room}/"))
            for file in sorted(folder.rglob("*.py")):
                name = file.relative_to(folder).as_posix()
                if name != "__init__.py":
                    lines.append(_entry(file, f"  {name.removesuffix('__init__.py')}"))
        else:
            lines.append(_entry(PACKAGE / f"{room}.py", f"{room}.py"))
    return "\n".join([*lines, "```", ""])


def picture() -> str:
    """The rooms as an SVG: a row per layer, the way from a command to the step in the first column;
    light and dark.
    """
    rows, boxes, heights = layers(), [], {}
    for row, rooms in enumerate(rows):
        first = sorted(rooms & set(TO_THE_STEP))
        for column, room in enumerate([*(first or [None]), *sorted(rooms - set(first))]):
            if room is None:  # only the arrow
                continue
            x, y = MARGIN + column * (BOX_WIDTH + GAP), MARGIN + row * (BOX_HEIGHT + GAP)
            heights[room] = y
            file = (
                PACKAGE / room / "__init__.py"
                if (PACKAGE / room).is_dir()
                else PACKAGE / f"{room}.py"
            )
            boxes.append(
                f'<rect class="box{" way" * (room in TO_THE_STEP)}" x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" '
                f'height="{BOX_HEIGHT}" rx="6"/><text class="name" x="{x + 10:g}" y="{y + 20:g}">{room}</text>'
            )
            for number, line in enumerate(
                textwrap.wrap(_sentence(file), LABEL, max_lines=2, placeholder=" ...")
            ):
                boxes.append(
                    f'<text x="{x + 10:g}" y="{y + 37 + 15 * number:g}">{escape(line)}</text>'
                )
    arrows = [
        f'<path class="arrow" d="M{MARGIN + BOX_WIDTH / 2:g} {heights[upper] + BOX_HEIGHT} V{heights[lower] - 2}"/>'
        for upper, lower in pairwise(TO_THE_STEP)
    ]
    width, height = (
        2 * MARGIN + 3 * (BOX_WIDTH + GAP) - GAP,
        2 * MARGIN + len(rows) * (BOX_HEIGHT + GAP) - GAP,
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>The rooms of soren_align in layers; imports point downwards only</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
            'orient="auto"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
            *arrows,
            *boxes,
            "</svg>",
            "",
        ]
    )


def layers() -> list[set[str]]:
    """The rooms of soren_align, the uppermost layer first, as tests/test_layers.py has them."""
    module = ast.parse((ROOT / "tests/test_layers.py").read_text(encoding="utf-8"))
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return ast.literal_eval(node.value)
    raise ValueError("tests/test_layers.py: has no LAYERS")


def _entry(file: Path, name: str) -> str:
    """The file's line: its sentence without the last clauses, if it is longer than the line."""
    sentence, room = _sentence(file), WIDTH - NAMES
    while (
        len(sentence) > room
        and (cut := max(sentence.rfind(mark) for mark in (":", ";", ",", " - "))) > 0
    ):
        sentence = sentence[:cut]
    return f"{name.ljust(NAMES - 1)} {textwrap.shorten(sentence, room, placeholder=' ...')}"


def _sentence(file: Path) -> str:
    """The first sentence of a file's docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.?])\s", " ".join(docstring.split("\n\n")[0].split()))[0].rstrip(".:")


if __name__ == "__main__":
    print(page())
    PICTURE.write_text(picture(), encoding="utf-8")
