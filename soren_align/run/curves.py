"""The curves of a training: losses and margins along the steps, from metrics.jsonl; in
a terminal and as pictures.

A file of any length is read once, line by line, in bounded memory: a curve has at most 2 MAX_POINTS
points, each the mean of equally many logged values; of a long file only every k-th log is taken.
The lowest held-out loss is found exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import printable
from ..core.figures import FONT, Colors, compact, line_style, style_axes, write_pictures
from .folder import parse_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS, HELD_OUT = "loss", "eval_loss"
MARGIN, HELD_OUT_MARGIN = "rewards/margins", "eval_rewards/margins"
KEYS = (LOSS, HELD_OUT, MARGIN, HELD_OUT_MARGIN)
SCORED = b'"benchmark_step"'
MAX_POINTS = 600
"""Points of a curve: a figure is 800 pixels wide, a terminal 160 dots."""
MAX_MARKERS = 60
"""Markers of a drawn line: of more evaluations the line alone is drawn."""
SAMPLED_FROM = 16 << 20
"""Bytes of a file of which every line is read. Of one k times as long, about every k-th line, and
all evaluations."""
MAX_LINE = 1 << 20
"""Bytes of a line that is read: those that runs write have a thousand."""
MAX_LABEL = 60
"""Characters of a line of a legend."""
LABEL_HEIGHT = 0.19
"""Inches of a line of a legend above the axes."""
LOG_SCALE_FROM = 10
"""The factor between the largest and the smallest value from which an axis is logarithmic."""
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of braille's dots in a character, by row and column; U+2800 has none."""
Point = tuple[float, float]
"""Step and value."""


@dataclass
class Curve:
    """Means of logged values along the steps: `points`, at most 2 MAX_POINTS."""

    points: list[Point] = field(default_factory=list)
    values_per_point: int = 1
    _steps: float = 0.0
    _sum: float = 0.0
    _count: int = 0

    def add(self, step: float, value: float) -> None:
        """Add a logged value; halve the points where there are too many."""
        self._steps, self._sum, self._count = self._steps + step, self._sum + value, self._count + 1
        # Means, not every k-th value: a training loss is noisy, and single values would show its
        # noise.
        if self._count < self.values_per_point:
            return
        self.points.append((self._steps / self._count, self._sum / self._count))
        self._steps, self._sum, self._count = 0.0, 0.0, 0
        if len(self.points) == 2 * MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairs]
            self.values_per_point *= 2


@dataclass
class Curves:
    """The curves of one run, by key of metrics.jsonl; those without a value are left out.

    last_step: of any line. best: step and value of the lowest held-out loss; last: of the last one.
    benchmarks: scores of checkpoints by column, of `run.benchmark`.
    """

    by_key: dict[str, Curve] = field(default_factory=dict)
    benchmarks: dict[str, list[Point]] = field(default_factory=dict)
    last_step: float = 0.0
    best: Point | None = None
    last: Point | None = None

    def __getitem__(self, key: str) -> list[Point]:
        return self.by_key[key].points if key in self.by_key else []

    def describe(self) -> list[str]:
        """Return sentences about the held-out loss: where it was lowest, if it has risen since."""
        if not (self.best and self.last) or self.last[1] <= 1.01 * self.best[1]:
            return []
        (step, best), (last_step, last) = self.best, self.last
        return [
            f"the held-out loss was lowest at step {step:g} ({best:.4g}), and was {last:.4g} at"
            f" step {last_step:g}"
        ]


def read_curves(file: Path) -> Curves:
    """Return the curves in a metrics.jsonl; of a missing file none.
    Damaged lines and values are left out.
    """
    curves = Curves()
    if not file.is_file():
        return curves
    # Of a long file every k-th log, but all evaluations: they are few, and the lowest is named.
    every = 1 + file.stat().st_size // SAMPLED_FROM
    with file.open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, MAX_LINE), b"")):
            # Evaluations are few, and the lowest held-out loss is to be exact: their lines are
            # always read.
            if number % every and b'"eval_' not in line and SCORED not in line:
                continue
            if (record := parse_metrics(line)) is None:
                continue
            try:
                step = float(record["step"])
                values = {key: float(record[key]) for key in KEYS if record.get(key) is not None}
                for key, score in record.items():
                    if key.startswith("benchmark/"):
                        point = float(record["benchmark_step"]), float(score)
                        curves.benchmarks.setdefault(key.removeprefix("benchmark/"), []).append(
                            point
                        )
            except (ValueError, TypeError, OverflowError, KeyError):
                continue
            curves.last_step = max(curves.last_step, step)
            for key, value in values.items():
                if math.isfinite(value):
                    curves.by_key.setdefault(key, Curve()).add(step, value)
            if math.isfinite(loss := values.get(HELD_OUT, math.nan)):
                curves.last = step, loss
                if curves.best is None or loss < curves.best[1]:
                    curves.best = step, loss
    return curves


def is_logarithmic(values: Sequence[float]) -> bool:
    """Whether values are shown best on a logarithmic axis."""
    return bool(values) and 0 < LOG_SCALE_FROM * min(values) < max(values)


def braille(
    line: Sequence[Point],
    width: int,
    height: int,
    marks: Sequence[Point] = (),
    best: Point | None = None,
) -> list[str]:
    """Return a chart of `height` lines for a terminal: `line` in dots, `marks` as o, the best one
    of them as *.

    The largest and the smallest value, and the steps at both ends, stand beside and below it;
    `width` includes them.
    """
    points = [*line, *marks, *([best] if best else [])]  # beside means, the lowest alone
    values = [value for _, value in points]
    scale = math.log10 if is_logarithmic(values) else float
    low, high = min(map(scale, values)), max(map(scale, values))
    labels = [f"{value:.3g}" for value in (max(values), min(values))]
    margin = max(map(len, labels)) + 1
    columns = max(width - margin - 1, 8)
    first, last = min(step for step, _ in points), max(step for step, _ in points)

    # One scale for dots and marks: braille characters have two by four dots, marks take a whole
    # one.
    def place(step: float, value: float, across: int, down: int) -> tuple[int, int]:
        x = (step - first) / (last - first) if last > first else 0.0
        y = (high - scale(value)) / (high - low) if high > low else 0.5
        return round(x * (across - 1)), round(y * (down - 1))

    cells = [[0x2800] * columns for _ in range(height)]
    dots = [place(*point, 2 * columns, 4 * height) for point in line]
    for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False):
        for k in range(num := max(abs(x1 - x0), abs(y1 - y0), 1) + 1):
            x, y = round(x0 + (x1 - x0) * k / (num - 1)), round(y0 + (y1 - y0) * k / (num - 1))
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    for mark in (*marks, *([best] if best else [])):
        x, y = place(*mark, columns, height)
        cells[y][x] = ord("*" if mark is best else "o")
    rows = ["".join(map(chr, row)).replace("\u2800", " ").rstrip() for row in cells]
    sides = [labels[0], *[""] * (height - 2), labels[1]] if height > 1 else [labels[1]]
    ends = f"{first:g}".ljust(columns - len(f"{last:g}")) + f"{last:g}"
    chart = [f"{side:>{margin - 1}} {row}".rstrip() for side, row in zip(sides, rows, strict=True)]
    return [*chart, " " * margin + ends]


def draw_curves(runs: Sequence[tuple[str, Curves]], path: Path) -> Path:
    """Write a PNG of the losses of runs, and of the margins of preference pairs where there are
    some.

    Beside it NAME-dark.png, for a dark page, whose path is returned. One run: training loss as a
    line, held-out losses with marks, the lowest of them named. Several: a colour each, training
    dotted, held-out solid. The same numbers give the same bytes.
    """
    return write_pictures(path, lambda colors: _figure(runs, colors))


def _figure(runs: Sequence[tuple[str, Curves]], colors: Colors) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    is_alone = len(runs) == 1
    # A panel for each quantity that a run has; runs share panels, so that they are compared by eye.
    panels = [
        ("loss", LOSS, HELD_OUT),
        ("reward margin of preference pairs", MARGIN, HELD_OUT_MARGIN),
    ]
    panels = [
        panel for panel in panels if any(curves[key] for _, curves in runs for key in panel[1:])
    ]
    scored = any(curves.benchmarks for _, curves in runs)
    num_panels = len(panels) + scored
    figure = Figure(
        figsize=(6.0, 0.2 + 2.3 * num_panels), dpi=200, layout="constrained", facecolor=colors.paper
    )
    all_axes = figure.subplots(num_panels, squeeze=False)[:, 0]
    if scored:
        _draw_benchmarks(all_axes[-1], runs, colors)
    for axes, (title, *keys) in zip(all_axes, panels, strict=False):
        values = []
        for number, (name, curves) in enumerate(runs):
            training, held_out = (curves[key] for key in keys)
            values += [value for _, value in (*training, *held_out)]
            color = line_style(number, colors)["color"]
            first, second = (colors.muted, colors.lines[1]) if is_alone else (color, color)
            # Of several runs, the held-out line has the run's name, and the training line is
            # dotted.
            names = ["training", "held-out"] if is_alone else [None, printable(name)]
            if not is_alone and not held_out:
                names[0] = f"{printable(name)}, training"
            line = "-" if is_alone or not held_out else ":"
            if training:
                x, y = zip(*training, strict=True)
                axes.plot(x, y, line, linewidth=1.0, color=first, label=names[0])
            if held_out:
                x, y = zip(*held_out, strict=True)
                mark = "o" if len(held_out) < MAX_MARKERS else ""
                axes.plot(x, y, "-", marker=mark, markersize=4, color=second, label=names[1])
            if is_alone and keys[1] == HELD_OUT and curves.best:
                step, value = curves.best
                label = f"lowest held-out: {value:.4g}, step {step:g}"
                color = colors.lines[2]
                axes.plot([step], [value], "*", markersize=13, zorder=5, color=color, label=label)
        # A loss that falls by a factor of ten hides its end on a linear axis.
        if keys[0] == LOSS and is_logarithmic(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            title += ", logarithmic"
        style_axes(axes, title, "step", colors)
        axes.xaxis.set_major_formatter(compact)
        if is_alone:  # each panel has its own lines
            axes.legend(frameon=False, fontsize=FONT - 1, labelcolor=colors.ink)
    if not is_alone:
        _legend(figure, colors)
    return figure


def _draw_benchmarks(axes: Any, runs: Sequence[tuple[str, Curves]], colors: Colors) -> None:
    """Draw the scores of checkpoints: of one run a colour for each benchmark, of several a colour
    for each run.
    """
    is_alone = len(runs) == 1
    for number, (name, curves) in enumerate(runs):
        for i, (column, points) in enumerate(curves.benchmarks.items()):
            style = line_style(i if is_alone else number, colors)
            label = printable(column if is_alone else f"{name}, {column}")
            x, y = zip(*sorted(points), strict=True)
            axes.plot(x, y, "-", marker="o", markersize=4, color=style["color"], label=label)
    style_axes(axes, "benchmarks of checkpoints, percent", "step", colors)
    axes.xaxis.set_major_formatter(compact)
    if is_alone:
        axes.legend(frameon=False, fontsize=FONT - 1, labelcolor=colors.ink)


def _legend(figure: "Figure", colors: Colors) -> None:
    """Draw one legend of all runs above the panels, for which the figure becomes higher."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    labels = [name if len(name) <= MAX_LABEL else f"…{name[1 - MAX_LABEL :]}" for name in handles]
    longest = max(map(len, labels), default=0)
    columns = max(1, min(4, MAX_LABEL // (longest + 6)))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + LABEL_HEIGHT * math.ceil(len(labels) / columns))
    figure.legend(
        [*handles.values()],
        labels,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=FONT - 1,
        labelcolor=colors.ink,
    )
