"""Draw the figures of a report: small panels, whose colours a dark page inverts.

Each candidate has one colour, dash and marker in all panels, so that they can be read in black and
white. A panel without data is None, and the page leaves it out. The same data give the same bytes.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ...core.figures import LIGHT, compact, line_numbers, line_style, png, short, style_axes
from ...run.metrics import METRICS
from ..study import Candidate, Difference, Study, finished, mean_metric
from . import curves, text
from .curves import Curve

INCHES = (4.5, 3.0)
"""Of a panel: 324 units wide, so that its letters of 10 units have 11 pixels on a phone 390 pixels
wide."""
DPI = 144
"""Twice the units: a panel 324 units wide has 648 pixels."""
MAX_WITH_RUNS = 6
"""Candidates whose runs are drawn beside their mean; of more, the thin lines would hide the
others."""
MAX_KEYS = 6
"""Searched keys that have a panel."""
DISPLACEMENT, KL = (METRICS[key].label for key in ("relative_change", "kl_to_start"))
RETENTION = "rise of the retention loss"


@dataclass(frozen=True)
class Picture:
    """A picture as a `data:` address; alt: what it shows. The tables have its numbers."""

    address: str
    alt: str


@dataclass(frozen=True)
class Figure:
    """Panels beside each other; missing: the names of those without data."""

    panels: list[Picture]
    missing: list[str]


def legend(study: Study) -> list[Picture]:
    """Return the line of each candidate, for the names above the panels."""
    lines = []
    for name, number in _numbers(study).items():
        drawing = Drawing(figsize=(0.55, 0.2))
        axes = drawing.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, 1), ylim=(-1, 1))
        style = line_style(number) | {"markevery": [1], "markersize": 6}
        axes.plot([0, 0.5, 1], [0, 0, 0], **style, linewidth=1.6)
        lines.append(Picture(_address(drawing), name))
    return lines


def _numbers(study: Study) -> dict[str, int]:
    return line_numbers(candidate.name for candidate in study.candidates)


def curves_figure(study: Study) -> Figure | None:
    """Return the metric along the final runs against steps, tokens, seconds and displacement."""
    axes = {
        "step": "steps",
        "tokens": "tokens",
        "seconds": "seconds of training",
        "relative_change": DISPLACEMENT,
    }
    name = text.metric_name(study)
    return _figure(
        {label: _along(study, name, "metric", key, label) for key, label in axes.items()}
    )


def front_figure(study: Study) -> Figure | None:
    """Return gain against forgetting along the runs, and both against displacement and KL."""
    name, loss = text.metric_name(study), "retention_loss"
    gain = f"gain in {name}"
    panels = {
        "retention loss against gain": _along(study, RETENTION, loss, "metric", gain),
        "retention loss against displacement": _along(
            study, RETENTION, loss, "relative_change", DISPLACEMENT
        ),
        f"{name} against KL": _along(study, name, "metric", "kl_to_start", KL),
        "retention loss against KL": _along(study, RETENTION, loss, "kl_to_start", KL),
    }
    return _figure(panels)


def differences_figure(study: Study, reference: str) -> Figure:
    """Return a panel per measure: the differences to one reference, over those too small to see."""
    by_measure: dict[str, list[Difference]] = {}
    for d in text.differences_to(study, reference):
        by_measure.setdefault(d.measure, []).append(d)
    return Figure([_differences_panel(study, each) for each in by_measure.values()], [])


def search_figure(study: Study) -> Figure | None:
    """Return the metric of every trial against each searched key."""
    trials = [run for candidate in study.candidates for run in candidate.trials]
    # One axis for all keys, so that panels can be compared.
    metrics = [run.metric for run in finished(trials) if run.metric is not None]
    limits = curves.focus(metrics, study.higher_is_better)
    if limits is None:
        return None
    keys = free_keys(*study.candidates)[:MAX_KEYS]
    return _figure({key: _search_panel(study, key, limits) for key in keys})


def free_keys(*candidates: Candidate) -> list[str]:
    """Return the searched keys, without those that always have another key's value."""
    keys = {
        key: None
        for candidate in candidates
        for run in candidate.trials
        for key in run.parameters
        if not isinstance(candidate.space.get(key), str)  # =optimizer.lr
    }
    return [*keys]


def _differences_panel(study: Study, differences: Sequence[Difference]) -> Picture:
    """Return the differences of all candidates to one reference on one measure.

    Percent points beyond 100 are not drawn: no difference is so large.
    """
    first = differences[0]
    numbers = _numbers(study)
    name, other = text.measure_name(study, first.measure), text.reference_name(first.reference)
    most = 100.0 if first.unit == "percent" else float("inf")

    def draw(axes: Axes) -> None:
        grey: dict[str, Any] = {"color": LIGHT.grid, "linewidth": 12, "solid_capstyle": "butt"}
        for y, d in enumerate(differences):
            # The range that the study cannot detect, the interval over it, then the difference.
            unseen = min(d.detectable or 0.0, most)
            axes.plot([-unseen, unseen], [y, y], **grey, zorder=1)
            style: dict[str, Any] = line_style(numbers[d.candidate]) | {"linestyle": "-"}
            ends = [max(d.low, -most), min(d.high, most)]
            axes.plot(ends, [y, y], color=style["color"], linewidth=1.6, zorder=3)
            face = LIGHT.paper if d.answer == "not distinguishable" else style["color"]
            axes.plot(d.value, y, **style, markersize=7, markerfacecolor=face, zorder=4)
        # An interval beyond 100 points would make the others too small to read.
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, -1.04 * most), min(high, 1.04 * most))
        axes.axvline(0, color=LIGHT.muted, linewidth=1, zorder=2)
        names = [short(d.candidate, 18) for d in differences]
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.locator_params(axis="x", nbins=5)

    label = "percent points better" if first.unit == "percent" else "better by"
    inches = (INCHES[0], 0.72 + 0.26 * len(differences))
    return _panel(f"{name}, differences to {other}", name, label, draw, inches=inches)


def _search_panel(study: Study, key: str, limits: tuple[float, float]) -> Picture | None:
    """Return the metric of all candidates' trials against one searched key."""
    name = text.metric_name(study)
    values = [
        run.parameters[key]
        for candidate in study.candidates
        for run in candidate.trials
        if key in run.parameters
    ]
    if not values:
        return None

    def draw(axes: Axes) -> None:
        place = set_scale(axes, values)
        low, high = limits
        numbers = _numbers(study)
        worst, triangle = (low, "v") if study.higher_is_better else (high, "^")
        for i, candidate in enumerate(study.candidates):
            trials = [run for run in candidate.trials if key in run.parameters]
            results = sorted(
                (place(run.parameters[key]), run.metric)
                for run in finished(trials)
                if run.metric is not None
            )
            inside = [(x, y) for x, y in results if low <= y <= high]
            style = line_style(numbers[candidate.name])
            mark: dict[str, Any] = {"linestyle": "", "color": style["color"], "clip_on": False}
            if (
                len(free_keys(candidate)) != 1
            ):  # a line would join settings that differ in other keys
                style["linestyle"] = ""
            axes.plot(*_columns(inside), **style, linewidth=1.2, markersize=5)
            # A trial that is too bad for the axis is shown at its edge: it was tried, and paid for.
            beyond = [x for x, y in results if not low <= y <= high]
            axes.plot(beyond, [worst] * len(beyond), **mark, marker=triangle, markersize=7)
            selected = [run for run in trials if candidate.is_selected(run)]
            if (metric := mean_metric(selected)) is not None:
                x = place(selected[0].parameters[key])
                mark |= {"markerfacecolor": "none", "markeredgewidth": 1.5}
                axes.plot(x, metric, **mark, marker="o", markersize=12)
            for status, marker in (("diverged", "x"), ("failed", "+")):
                lost = [place(run.parameters[key]) for run in trials if run.status == status]
                # Above the axis, each candidate a little higher, so that none hides another.
                height = [1.05 + 0.05 * i / len(study.candidates)] * len(lost)
                above = {"transform": axes.get_xaxis_transform(), "markersize": 7}
                axes.plot(lost, height, **mark, **above, marker=marker)
        room = 0.06 * (high - low)
        axes.set_ylim(low - room, high + room)

    return _panel(f"{name} against {key}", name, key, draw, pad=18)


def _along(study: Study, title: str, y: str, x: str, label: str) -> Picture | None:
    """Return a quantity along the runs of all candidates, and their mean, against another.

    A retention loss is from the start's, and a metric on the x axis is the gain since the start.
    """
    zero = curves.start(study, y) if y == "retention_loss" else 0.0
    begin = curves.start(study, x) if x == "metric" else 0.0
    if zero is None or begin is None:
        return None
    sign = -1.0 if x == "metric" and not study.higher_is_better else 1.0
    lines: dict[int, list[Curve]] = {}
    for i, runs in zip(
        _numbers(study).values(), map(curves.shown_runs, study.candidates), strict=True
    ):
        paths = [curves.curve(run, x, y) for run in runs] if len(runs) > 1 else []
        paths.append(curves.mean_curve(runs, x, y))
        lines[i] = [[(sign * (a - begin), b - zero) for a, b in path] for path in paths]
    return _lines_panel(study, title, label, lines, is_cut=y == "metric")


def _lines_panel(
    study: Study, title: str, label: str, lines: Mapping[int, list[Curve]], *, is_cut: bool
) -> Picture | None:
    """Return thin lines for runs, and one with markers for their mean, the last of each candidate.

    is_cut: the axis shows where the means differ.
    """
    lines = {i: paths for i, paths in lines.items() if paths and len(paths[-1]) > 1}
    if not lines:
        return None

    def draw(axes: Axes) -> None:
        for i, (*runs, mean) in lines.items():
            style = line_style(i)
            for path in runs if len(lines) <= MAX_WITH_RUNS else ():
                axes.plot(*_columns(path), color=style["color"], linewidth=0.6, alpha=0.55)
            # Six markers, at other places than those of the next line, which may lie upon it.
            every = max(1, len(mean) // 6)
            markers = {"markevery": (i % every, every), "markersize": 4.5}
            axes.plot(*_columns(mean), **style, **markers, linewidth=1.6)
            axes.plot(*mean[-1], **style, markersize=7)
        # By the means alone: one run with a jump would decide about the axis of all.
        values = [y for paths in lines.values() for _, y in paths[-1]]
        limits = curves.focus(values, study.higher_is_better) if is_cut else None
        if limits:
            axes.set_ylim(*limits)
        axes.xaxis.set_major_formatter(compact)
        axes.locator_params(axis="x", nbins=5)

    return _panel(f"{title} against {label}", title, label, draw)


def _figure(panels: Mapping[str, Picture | None]) -> Figure | None:
    """Return the panels that have data, by name; None without any."""
    drawn = [panel for panel in panels.values() if panel is not None]
    missing = [name for name, panel in panels.items() if panel is None]
    return Figure(drawn, missing) if drawn else None


def _panel(
    alt: str,
    title: str,
    label: str,
    fill: Callable[[Axes], None],
    *,
    inches: tuple[float, float] = INCHES,
    pad: float = 5,
) -> Picture:
    """Return a panel, on whose axes `fill` draws.

    The quantity on the y axis stands above it, where a page is read first; label: of the x axis.
    """
    # A figure of its own, without pyplot: it keeps every figure until it is closed.
    drawing = Drawing(figsize=inches, layout="constrained")
    axes = drawing.subplots()
    style_axes(axes, title, label, LIGHT, pad)
    fill(axes)
    return Picture(_address(drawing), alt)


def _columns(points: Curve) -> tuple[list[float], list[float]]:
    """Return the x and the y of points."""
    return [x for x, _ in points], [y for _, y in points]


def _address(drawing: Drawing) -> str:
    """Return a drawing as a PNG picture in a `data:` address.

    A line drawing of few colours has a quarter of the bytes of an SVG picture, however many points
    its lines have.
    """
    drawing.set(dpi=DPI, facecolor=LIGHT.paper)
    return f"data:image/png;base64,{b64encode(png(drawing)).decode()}"


def set_scale(axes: Axes, values: Sequence[Any]) -> Callable[[Any], float]:
    """Prepare the x axis for the values of a searched key; return the place of a value on it.

    Numbers that span a factor of 3 have a logarithmic scale, labelled as a recipe writes them.
    Words have equal distances.
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
    # matplotlib's own labels (10^-3) are none that a recipe has, and collide in a small panel.
    decades = log10(high / low)
    subs = (1.0,) if decades > 2.5 else (1.0, 3.0) if decades > 1.2 else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    room = (high / low) ** 0.1
    axes.set_xlim(low / room, high * room)
    return float
