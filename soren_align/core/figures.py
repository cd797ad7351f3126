"""Colours, line styles and axes of all figures."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import printable
from .files import write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT = 10
"""Size of a figure's letters."""


@dataclass(frozen=True)
class Colors:
    """Colours of a page, as in report.css, and of its lines."""

    ink: str
    muted: str
    grid: str
    paper: str
    lines: tuple[str, ...]


# Okabe and Ito's colours, darkened until lines have a contrast of 3:1 on white; the reference is
# the first.
LIGHT = Colors(
    *("#1b1b1b", "#666666", "#e4e4e2", "#ffffff"),
    ("#1b1b1b", "#0072b2", "#c2500a", "#00845f", "#a8477f", "#9a6b00", "#2f86c4"),
)
DARK = Colors(
    *("#e8e6e1", "#a2a29d", "#33363b", "#16181b"),
    ("#e8e6e1", "#5fb4f0", "#ff9654", "#3fcf9f", "#e796c4", "#e8b93c", "#9ccdf2"),
)
NO_PICTURES = "SOREN_ALIGN_NO_PICTURES"
"""The environment variable with which a run draws none. `compare` sets it: 160 runs would draw 640,
1.4 CPU seconds a run."""
DASHES = (
    "-",
    (0, (5, 2)),
    (0, (1.2, 1.5)),
    (0, (6, 2, 1.2, 2)),
    (0, (9, 3)),
    (0, (3, 1, 1, 1, 1, 1)),
    (0, (2, 2)),
)
MARKERS = "osD^vP*Xph<>"


LINES = {"adamw": 0, "muon": 1, "htmuon": 2, "soren": 3}
"""The optimizers' own lines, in every picture."""


def line_numbers(names: Iterable[str]) -> dict[str, int]:
    """Return the number of each name's line: an optimizer's own, or the next free one."""
    names = [*names]
    taken = {LINES.get(name) for name in names}
    free = (number for number in count() if number not in taken)
    return {name: LINES[name] if name in LINES else next(free) for name in names}


def line_style(number: int, colors: Colors = LIGHT) -> dict[str, Any]:
    """Return colour, dashes and marker of candidate `number`, as matplotlib's keywords; 84
    differ.
    """
    color = colors.lines[number % len(colors.lines)]
    return {
        "color": color,
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
    }


def style_axes(axes: "Axes", title: str, label: str, colors: Colors, pad: float = 5) -> None:
    """Give axes a title at the left, the label of their x axis, a grid, and lines at the left and
    below.
    """
    font: dict[str, Any] = {"fontsize": FONT, "color": colors.ink, "parse_math": False}
    axes.set_title(short(title, 52), loc="left", fontweight="bold", pad=pad, **font)
    axes.set_xlabel(short(label, 52), **font)
    axes.tick_params(labelsize=FONT - 0.5, labelcolor=colors.ink, color=colors.muted, length=3)
    axes.patch.set_visible(False)
    axes.grid(color=colors.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colors.muted)


def write_pictures(path: Path, draw: Callable[[Colors], "Figure"]) -> Path:
    """Write a figure as a PNG, and beside it NAME-dark.png, for a dark page, whose path is
    returned.

    draw: returns the figure in such colours. The same figure gives the same bytes.
    """
    dark = path.with_stem(f"{path.stem}-dark")
    for file, colors in ((path, LIGHT), (dark, DARK)):
        write(file, png(draw(colors)))
    return dark


def png(figure: "Figure") -> bytes:
    """Return a figure as a PNG of 256 colours, a third of the size with all of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    # The canvas is drawn without pyplot, which keeps every figure that it has made.
    canvas, stream = FigureCanvasAgg(figure), BytesIO()
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()))
    image.convert("RGB").quantize(256).save(stream, format="PNG", optimize=True)
    return stream.getvalue()


def compact(value: float, _: object) -> str:
    """Return a tick label: 300,000 is 300k."""
    for unit, least, length in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if abs(value) >= least:
            return f"{value / length:g}{unit}"
    return f"{value:g}"


def short(text: str, most: int) -> str:
    """Return at most this many characters of a text, on one line, for a place without room for
    more.
    """
    text = " ".join(printable(text).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"
