"""Small pictures by matplotlib as <svg> elements of a page: the page sets fonts and colours, light or dark.

Lines differ in colour, dashes and marker, so that they can be read in black and white. Text stays text, without a font.
The same data give the same bytes.
"""

import re
from collections.abc import Callable, Sequence
from io import StringIO
from math import log10
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ...core.errors import printable

INCHES = (4.5, 3.0)
"""Of a panel: 324 units wide, so that its letters of 10 units have 11 pixels on a phone 390 pixels wide."""
FONT = 10
INK, MUTED, GRID, PAPER = "#010101", "#010102", "#010103", "#010104"
"""Colours that the page's style sheet replaces (report.css), as it does those of NUM_COLORS candidates."""
NUM_COLORS = 7
_ROLES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
_ROLES |= {f"#0102{i:02x}": f"c{i}" for i in range(NUM_COLORS)}
_DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.5)), (0, (6, 2, 1.2, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)), (0, (2, 2)))
_MARKERS = "osD^vP*Xph<>"
_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"


def look(number: int) -> dict[str, Any]:
    """Return colour, dashes and marker of candidate `number`, as matplotlib's keywords; 84 differ."""
    color = f"#0102{number % NUM_COLORS:02x}"
    return {"color": color, "linestyle": _DASHES[number % len(_DASHES)], "marker": _MARKERS[number % len(_MARKERS)]}


def new_panel(title: str, x_label: str, inches: tuple[float, float] = INCHES, pad: float = 5) -> tuple[Figure, Axes]:
    """Return an empty panel. The quantity on its y axis stands above it, where a page is read first."""
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    font = {"fontsize": FONT, "color": INK, "parse_math": False}
    axes.set_title(short(title, 52), loc="left", fontweight="bold", pad=pad, **font)
    axes.set_xlabel(short(x_label, 52), **font)
    axes.tick_params(labelsize=FONT - 0.5, labelcolor=INK, color=MUTED, length=3)
    axes.patch.set_visible(False)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(MUTED)
    return figure, axes


def set_scale(axes: Axes, values: Sequence[Any]) -> Callable[[Any], float]:
    """Prepare the x axis for the values of a searched key; returns their places on it.

    Numbers that span a factor of 3 have a logarithmic scale, labelled as a recipe writes them. Words have equal
    distances.
    """
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        words = sorted({str(value) for value in values})
        axes.set_xticks(range(len(words)), [short(word, 14) for word in words], parse_math=False)
        axes.set_xlim(-0.5, len(words) - 0.5)
        return lambda value: words.index(str(value))
    low, high = min(values), max(values)
    if not 0 < 3 * low <= high:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        return float
    axes.set_xscale("log")
    decades = log10(high / low)
    subs = (1.0,) if decades > 2.5 else (1.0, 3.0) if decades > 1.2 else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    room = (high / low) ** 0.1
    axes.set_xlim(low / room, high * room)
    return float


def swatch(number: int, name: str) -> str:
    """Return a picture of a candidate's line and marker for a legend."""
    figure = Figure(figsize=(0.55, 0.2))
    FigureCanvasSVG(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(-1, 1))
    axes.plot([0, 0.5, 1], [0, 0, 0], **look(number), markevery=[1], markersize=6, linewidth=1.6)
    return as_svg(figure, name)


def as_svg(figure: Figure, name: str, alt: str = "") -> str:
    """Return the figure as an <svg> element.

    name: a letter and digits, unlike those of the page's other pictures: the prefix of all ids. alt: for readers that
    see no picture; without it the picture is an ornament.
    """
    text = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", transparent=True)
    root = ElementTree.fromstring(text.getvalue())
    for parent in [*root.iter()]:
        for child in [*parent]:
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    _set_ids(root, name)
    for element in root.iter():
        _simplify(element)
    box = root.get("viewBox", "")
    root.attrib.clear()
    label = {"role": "img", "aria-label": printable(alt)} if alt else {"aria-hidden": "true"}
    root.attrib |= {"viewBox": box, **label}
    return re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode"))


def _set_ids(root: ElementTree.Element, name: str) -> None:
    """Number the ids that are referred to, and remove the others; shared shapes are linked without xlink."""
    references = re.compile(r"#([\w-]+)")
    used: dict[str, str] = {}
    for element in root.iter():
        if link := element.attrib.pop(_LINK, None):
            element.set("href", link)
        for key in ("href", "clip-path"):
            if (value := element.get(key)) and (target := references.search(value)):
                new = used.setdefault(target[1], f"{name}-{len(used)}")
                element.set(key, value.replace(target[0], f"#{new}"))
    for element in root.iter():
        old = element.attrib.pop("id", None)
        if old in used:
            element.set("id", used[old])


def _simplify(element: ElementTree.Element) -> None:
    """Leave colours and fonts to the style sheet, and numbers two decimals: a third of the bytes."""
    element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    for key in {"d", "x", "y", "transform"} & element.attrib.keys():
        element.set(key, re.sub(r"(\.\d\d)\d+", r"\1", element.attrib[key]).replace("  ", " ").strip())
    if style := element.get("style"):
        style = re.sub(r"#01[0-9a-f]{4}", lambda match: f"var(--{_ROLES[match[0]]})", style)
        style = re.sub(r"font: (?:(bold|\d{3}) )?([\d.]+)px [^;]*", _size, style)
        element.set("style", style)


def _size(match: re.Match) -> str:
    weight = f"; font-weight: {match[1]}" if match[1] else ""
    return f"font-size: {match[2]}px{weight}"


def short(text: str, most: int) -> str:
    """Return at most this many characters of a text, on one line, for a place without room for more."""
    text = " ".join(printable(text).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"
