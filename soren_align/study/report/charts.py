"""Draw the figures of a report: small panels, for a light and for a dark page.

Each candidate has one colour, dash and marker in all figures, so that they can be read in black and
white. A figure without data is None, and the page leaves it out. The same data give the same bytes.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from math import isfinite, log10
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ...core.figures import DARK, LIGHT, Colors, compact, line_style, png, short, style_axes
from ...core.text import count, join_words
from ...run.metrics import METRICS
from ..study import Difference, Run, Study, finished
from .blocks import Figure, Picture
from .curves import (
    Curve,
    curve,
    expected_best,
    focus,
    mean_curve,
    shown_runs,
    start,
    thin,
    trial_metrics,
)
from .text import (
    in_order,
    measure_name,
    measures_of,
    metric_name,
    metric_text,
    reference_name,
    rules_of,
    setting,
    size,
)

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
MAX_BYTES = 1 << 26
"""Of a spectra.jsonl that is read; a larger one is left to `soren-align spectrum`."""
DISPLACEMENT, KL = (METRICS[key].label for key in ("relative_change", "kl_to_start"))
RETENTION = "rise of the retention loss"


def curves_figure(study: Study) -> Figure | None:
    """Return the metric along the runs against steps, tokens, seconds and displacement."""
    axes = {
        "step": "steps",
        "tokens": "tokens",
        "seconds": "seconds of training",
        "relative_change": DISPLACEMENT,
    }
    about = metric_name(study)
    panels = {label: _along(study, about, "metric", key, label) for key, label in axes.items()}
    cut = "below" if study.higher_is_better else "above"
    thin_lines = (
        ", with the single runs as thin lines" if len(study.candidates) <= MAX_WITH_RUNS else ""
    )
    caption = (
        f"The {about} during the final runs: the mean over the seeds{thin_lines}. The axis is cut off {cut}, so that "
        f"the ends of the curves are easy to distinguish. The curves average over batches. The {about} of the verdict "
        "averages over the tokens that count in the loss, so it differs from the end of the curve. Both use the same "
        "held-out examples."
    )
    return _figure(study, panels, caption)


def front_figure(study: Study) -> Figure | None:
    """Return gain against forgetting: along the runs, at the ends, and against displacement and
    KL.
    """
    about, begin = metric_name(study), start(study, "metric")
    wanted = ((study.file.get("verdict") or {}).get("retention") or {}).get("columns") or []
    base = study.base_scores or {}
    columns = [column for column in wanted if column in base]
    # the change of the retained columns' mean against the gain at the end of every run
    dots: dict[int, Curve] = {}
    for i, candidate in enumerate(study.candidates):
        for run in finished(candidate.verdict):
            changes = [
                run.scores[column] - base[column]
                for column in columns
                if column in (run.scores or {})
            ]  # pyright: ignore[reportOptionalSubscript]
            if changes and run.metric is not None and begin is not None:
                gain = run.metric - begin if study.higher_is_better else begin - run.metric
                dots.setdefault(i, []).append((gain, fmean(changes)))

    def draw(axes: Axes, colors: Colors) -> None:
        for i, points in dots.items():
            axes.plot(
                *zip(*points, strict=True),
                **{**line_style(i, colors), "linestyle": ""},
                markersize=7,
            )
        axes.axhline(0, color=colors.muted, linewidth=1)
        axes.locator_params(axis="x", nbins=5)

    words = [
        f"{study.candidates[i].name} {fmean(y for _, y in points):+.1f}"
        for i, points in dots.items()
    ]
    names = ", ".join(columns)
    alt = f"Mean change of {names} in points at the ends of the runs: {', '.join(words)}."
    retained = _panel(f"change of {names}, points", f"gain in {about}", alt, draw) if dots else None
    loss = "retention_loss"
    panels = {
        "retention loss against gain": _along(study, RETENTION, loss, "metric", f"gain in {about}"),
        "retained scores against gain": retained,
        "retention loss against displacement": _along(
            study, RETENTION, loss, "relative_change", DISPLACEMENT
        ),
        f"{about} against KL": _along(study, about, "metric", "kl_to_start", KL),
        "retention loss against KL": _along(study, RETENTION, loss, "kl_to_start", KL),
    }
    caption = (
        "The gain on the task against what the model forgot, along the runs. All runs begin at (0, 0), the "
        "starting checkpoint; large markers are the ends of the runs. The better optimizer is the one that "
        "forgets less at an equal gain, displacement or KL divergence."
    )
    return _figure(study, panels, caption)


def differences_figure(study: Study, reference: str) -> Figure:
    """Return a panel per measure: the differences to one reference, over those too small to be
    seen.

    Percent points beyond 100 are not drawn: no difference is so large.
    """
    panels, numbers = [], {candidate.name: i for i, candidate in enumerate(study.candidates)}
    for measure in measures_of(study):
        differences = [d for d in in_order(study, [reference]) if d.measure == measure]
        if not differences:
            continue
        about, unit = measure_name(study, measure), differences[0].unit
        most = 100.0 if unit == "percent" else float("inf")

        def draw(
            axes: Axes,
            colors: Colors,
            differences: Sequence[Difference] = differences,
            most: float = most,
        ) -> None:
            for y, d in enumerate(differences):
                grey = {
                    "color": colors.grid,
                    "linewidth": 12,
                    "solid_capstyle": "butt",
                    "zorder": 1,
                }
                seen, low, high = (
                    min(d.detectable or 0.0, most),
                    max(d.low, -most),
                    min(d.high, most),
                )
                axes.plot([-seen, seen], [y, y], **grey)
                style: dict[str, Any] = line_style(numbers[d.candidate], colors) | {
                    "linestyle": "-"
                }
                axes.plot([low, high], [y, y], color=style["color"], linewidth=1.6, zorder=3)
                face = colors.paper if d.answer == "not distinguishable" else style["color"]
                axes.plot(d.value, y, **style, markersize=7, markerfacecolor=face, zorder=4)
            low, high = axes.get_xlim()
            axes.set_xlim(max(low, -1.04 * most), min(high, 1.04 * most))
            axes.axvline(0, color=colors.muted, linewidth=1, zorder=2)
            axes.set_yticks(
                range(len(differences)),
                [short(d.candidate, 18) for d in differences],
                parse_math=False,
            )
            axes.set_ylim(len(differences) - 0.5, -0.5)
            axes.grid(visible=False, axis="y")
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
            axes.locator_params(axis="x", nbins=5)

        intervals = [f"[{size(d.low, unit)}, {size(d.high, unit)}]" for d in differences]
        words = [
            f"{d.candidate} {size(d.value, unit)} {ends}"
            for d, ends in zip(differences, intervals, strict=True)
        ]
        alt = f"{about}, differences to {reference_name(reference)} (positive: better): {'; '.join(words)}."
        label = "percent points better" if unit == "percent" else "better by"
        panels.append(
            _panel(about, label, alt, draw, inches=(INCHES[0], 0.72 + 0.26 * len(differences)))
        )
    rules = rules_of(study)
    power, answers = (
        rules.power,
        "better, worse or equivalent" if rules.equivalence else "better or worse",
    )
    caption = (
        f"Differences to {reference_name(reference)} with their 95% intervals; to the right is better. A grey"
        " bar marks differences that are too small to find reliably: fewer than"
        f" {power:.0%} of such studies would find a true difference within it. A filled"
        f" dot is {answers}; a hollow dot is not distinguishable."
    )
    return Figure(panels, caption)


def search_figure(study: Study) -> Figure | None:
    """Return the metric of every trial against each searched key, and the expected best of n
    trials.
    """
    trials = [run for candidate in study.candidates for run in candidate.trials]
    keys = _free_keys(trials)
    limits = focus(
        [run.metric for run in finished(trials) if run.metric is not None], study.higher_is_better
    )
    if limits is None:
        return None
    panels: dict[str, Picture | None] = {
        key: _sensitivity_panel(study, key, limits) for key in keys[:MAX_KEYS]
    }
    best = [
        expected_best(trial_metrics(study, each), study.higher_is_better)
        for each in study.candidates
    ]
    lines = {
        i: [[], [(float(k), value) for k, value in enumerate(values, 1)]]
        for i, values in enumerate(best)
    }
    tuning = "the expected best of n trials"
    panels[tuning] = _lines_panel(
        study, f"expected best {metric_name(study)}", "trials", lines, cut=True
    )
    caption = (
        "Every run of the search against its setting. A trial is one setting; with several seeds, its metric is "
        "the mean over its runs. A ring marks the selected trial. At the edge of the axis, triangles mark runs "
        "with a worse metric than the axis shows, x marks diverged runs and + failed runs. The expected best at n "
        "is the best metric among n of these trials, averaged over all choices of n trials. A trial without a result "
        "has the metric of the starting checkpoint here. Where lines cross, the better optimizer depends on the "
        "number of trials."
    )
    if left := keys[MAX_KEYS:]:
        caption += f" Not shown: {join_words(left)}; trials.csv has all values."
    return _figure(study, panels, caption)


def _free_keys(trials: Sequence[Run]) -> list[str]:
    """Return the searched keys, without those that always have another key's value, or one value
    for each candidate.
    """
    columns: dict[str, tuple[Any, ...]] = {}
    for key in dict.fromkeys(key for run in trials for key in run.parameters):
        column = tuple(run.parameters.get(key) for run in trials)
        values = {(run.candidate, value) for run, value in zip(trials, column, strict=True)}
        if column not in columns.values() and len(values) > len({run.candidate for run in trials}):
            columns[key] = column
    return [*columns]


def _sensitivity_panel(study: Study, key: str, limits: tuple[float, float]) -> Picture | None:
    """Return the metric of all candidates' trials against one searched key, in one panel, where
    they are compared.
    """
    trials = [
        [run for run in candidate.trials if key in run.parameters] for candidate in study.candidates
    ]
    everywhere = [run for own in trials for run in own]
    if not everywhere:
        return None
    best_of = max if study.higher_is_better else min
    worst, triangle = (limits[0], "v") if study.higher_is_better else (limits[1], "^")

    def draw(axes: Axes, colors: Colors) -> None:
        place = set_scale(axes, [run.parameters[key] for run in everywhere])
        for i, (candidate, own) in enumerate(zip(study.candidates, trials, strict=True)):
            results = sorted((place(run.parameters[key]), run.metric) for run in finished(own))
            inside = [(x, y) for x, y in results if y is not None and limits[0] <= y <= limits[1]]
            beyond = [x for x, y in results if y is not None and not limits[0] <= y <= limits[1]]
            style = line_style(i, colors)
            # Else a line would join settings that differ in other keys.
            line: dict[str, Any] = style if len(_free_keys(own)) == 1 else style | {"linestyle": ""}
            if inside:
                axes.plot(*zip(*inside, strict=True), **line, linewidth=1.2, markersize=5)
            lone: dict[str, Any] = {
                "linestyle": "",
                "color": style["color"],
                "markersize": 7,
                "clip_on": False,
            }
            axes.plot(beyond, [worst] * len(beyond), marker=triangle, **lone)
            chosen = [run for run in finished(own) if candidate.is_selected(run)]
            if chosen:
                at = (
                    place(chosen[0].parameters[key]),
                    fmean(run.metric for run in chosen if run.metric is not None),
                )
                axes.plot(
                    *at,
                    **{**lone, "markersize": 12},
                    marker="o",
                    markerfacecolor="none",
                    markeredgewidth=1.4,
                )
            for status, marker in (("diverged", "x"), ("failed", "+")):
                xs = [place(run.parameters[key]) for run in own if run.status == status]
                above: dict[str, Any] = {
                    "transform": axes.get_xaxis_transform(),
                    "markeredgewidth": 1.6,
                }
                axes.plot(
                    xs,
                    [1.05 + 0.05 * i / len(study.candidates)] * len(xs),
                    marker=marker,
                    **lone,
                    **above,
                )
        room = 0.06 * (limits[1] - limits[0])
        axes.set_ylim(limits[0] - room, limits[1] + room)

    words = []
    for candidate, own in zip(study.candidates, trials, strict=True):
        metrics = [run.metric for run in finished(own) if run.metric is not None]
        chosen = [run for run in finished(own) if candidate.is_selected(run)]
        parts = [count(len(metrics), "finished run")]
        parts += [f"best {metric_text(best_of(metrics))}"] if metrics else []
        parts += [f"selected {setting(chosen[0].parameters[key])}"] if chosen else []
        for status in ("diverged", "failed"):
            num = sum(run.status == status for run in own)
            parts += [f"{num} {status}"] if num else []
        words.append(f"{candidate.name} {', '.join(parts)}")
    return _panel(
        metric_name(study),
        key,
        f"{metric_name(study)} against {key}: {'; '.join(words)}.",
        draw,
        pad=18,
    )


def spectra_figure(study: Study, folder: Path) -> Figure | None:
    """Return the stable rank of the momenta over training, and the spectrum of one matrix at the
    last step.

    From the run folders of a study that recorded them (run.log_spectra).
    """
    ranks: dict[int, list[Curve]] = {}
    last: dict[int, list[Curve]] = {}
    for i, candidate in enumerate(study.candidates):
        spectra = next(
            (each for run in shown_runs(candidate) if (each := _read_spectra(folder, run))), {}
        )
        by_step: dict[int, list[float]] = {}
        for (step, _), values in spectra.items():
            by_step.setdefault(step, []).append(sum((value / values[0]) ** 2 for value in values))
        ranks[i] = [[(float(step), fmean(by_step[step])) for step in sorted(by_step)]]
        if spectra:
            step, name = max(spectra, key=lambda key: (key[0], len(spectra[key]), key[1]))
            values = spectra[step, name]
            last[i] = [
                thin(
                    [
                        (mode / len(values), value / values[0])
                        for mode, value in enumerate(values, 1)
                    ]
                )
            ]
    if not last:
        return None
    panels = {
        "stable rank": _lines_panel(study, "stable rank of the momentum", "steps", ranks),
        "spectrum": _lines_panel(study, "singular value / the largest", "share of the modes", last),
    }
    caption = (
        "Singular values s of the momenta, which are the input of the optimizers' maps. The first panel has the stable"
        " rank (the sum of s^2 divided by the largest s^2), as a mean over the recorded matrices. The second panel has"
        " the spectrum of the largest matrix at the last recorded step."
    )
    return _figure(study, {name: panel for name, panel in panels.items() if panel}, caption)


def _read_spectra(folder: Path, run: Run) -> dict[tuple[int, str], list[float]]:
    """Return the singular values of a run by step and matrix; nothing if there are none, or the
    file is damaged.
    """
    file = folder / run.folder / "spectra.jsonl"  # the folder of a damaged study may be no path
    try:
        if (
            not file.resolve().is_relative_to(folder.resolve())
            or not file.is_file()
            or file.stat().st_size > MAX_BYTES
        ):
            return {}
        lines = [
            json.loads(line)
            for line in file.read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        spectra = {
            (int(line["step"]), str(line["name"])): [float(s) for s in line["singular_values"]]
            for line in lines
            if "of" not in line  # of the gradient
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {
        key: values
        for key, values in spectra.items()
        if values and all(map(isfinite, values)) and values[0] > 0
    }


def _along(study: Study, title: str, y: str, x: str, label: str) -> Picture | None:
    """Return a quantity along the runs of all candidates, and their mean, against another.

    A retention loss is from the start's, and a metric on the x axis is the gain since the start.
    """
    zero = start(study, y) if y == "retention_loss" else 0.0
    begin = start(study, x) if x == "metric" else 0.0
    if zero is None or begin is None:
        return None
    sign = -1.0 if x == "metric" and not study.higher_is_better else 1.0
    lines: dict[int, list[Curve]] = {}
    for i, runs in enumerate(map(shown_runs, study.candidates)):
        curves = [thin(curve(run, x, y)) for run in runs] if len(runs) > 1 else []
        curves.append(thin(mean_curve(runs, x, y)))
        lines[i] = [[(sign * (a - begin), b - zero) for a, b in points] for points in curves]
    return _lines_panel(study, title, label, lines, cut=y == "metric")


def _lines_panel(
    study: Study, title: str, label: str, lines: dict[int, list[Curve]], *, cut: bool = False
) -> Picture | None:
    """Return a panel with thin lines for runs and a line with markers for their mean, each
    candidate's last curve.
    """
    lines = {i: curves for i, curves in lines.items() if curves and len(curves[-1]) > 1}
    if not lines:
        return None

    def draw(axes: Axes, colors: Colors) -> None:
        for i, (*runs, mean) in lines.items():
            style = line_style(i, colors)
            for points in runs if len(lines) <= MAX_WITH_RUNS else ():
                axes.plot(
                    *zip(*points, strict=True), color=style["color"], linewidth=0.6, alpha=0.55
                )
            every = max(1, len(mean) // 6)
            axes.plot(
                *zip(*mean, strict=True),
                **style,
                markevery=(i % every, every),
                markersize=4.5,
                linewidth=1.6,
            )
            axes.plot(*mean[-1], **style, markersize=7)
        if cut and (
            limits := focus(
                [y for curves in lines.values() for _, y in curves[-1]], study.higher_is_better
            )
        ):
            axes.set_ylim(*limits)
        axes.xaxis.set_major_formatter(compact)
        axes.locator_params(axis="x", nbins=5)

    last = {study.candidates[i].name: points[-1] for i, (*_, points) in lines.items()}
    ends = [f"{name} {y:.4g} at {x:.4g}" for name, (x, y) in last.items()]
    return _panel(title, label, f"{title} against {label}; at the end: {', '.join(ends)}.", draw)


def _figure(study: Study, panels: dict[str, Picture | None], caption: str) -> Figure | None:
    """Return the panels that there are, with a legend and the names of the others; None without
    any.
    """
    drawn = [panel for panel in panels.values() if panel is not None]
    if not drawn:
        return None
    if missing := [name for name, panel in panels.items() if panel is None]:
        caption += f" Not measured: {', '.join(missing)}."
    legend = []
    for i, candidate in enumerate(study.candidates):
        pictures = []
        for colors in (LIGHT, DARK):
            drawing = Drawing(figsize=(0.55, 0.2))
            axes = drawing.add_axes((0, 0, 1, 1))
            axes.set_axis_off()
            axes.set(xlim=(0, 1), ylim=(-1, 1))
            axes.plot(
                [0, 0.5, 1],
                [0, 0, 0],
                **line_style(i, colors),
                markevery=[1],
                markersize=6,
                linewidth=1.6,
            )
            pictures.append(_address(drawing, colors.paper))
        legend.append(Picture(pictures[0], pictures[1], candidate.name))
    return Figure(drawn, caption, legend)


def _panel(
    title: str,
    label: str,
    alt: str,
    fill: Callable[[Axes, Colors], None],
    *,
    inches: tuple[float, float] = INCHES,
    pad: float = 5,
) -> Picture:
    """Return a panel, which `fill` draws once for each page.

    The quantity on the y axis stands above it, where a page is read first; label: of the x axis.
    """

    def draw(colors: Colors) -> Drawing:
        drawing = Drawing(figsize=inches, layout="constrained")
        axes = drawing.subplots()
        style_axes(axes, title, label, colors, pad)
        fill(axes, colors)
        return drawing

    light, dark = draw(LIGHT), draw(DARK)
    address = _address(light, LIGHT.paper)
    dark.set_layout_engine("none")  # most of the time of a drawing, and the same for both
    dark.axes[0].set_position(light.axes[0].get_position())
    return Picture(address, _address(dark, DARK.paper), alt)


def _address(drawing: Drawing, background: str) -> str:
    """Return a drawing as a PNG picture in a `data:` address.

    A line drawing of few colours has a quarter of the bytes of an SVG picture, however many points
    its lines have.
    """
    drawing.set(dpi=DPI, facecolor=background)
    return f"data:image/png;base64,{b64encode(png(drawing)).decode()}"


def set_scale(axes: Axes, values: Sequence[Any]) -> Callable[[Any], float]:
    """Prepare the x axis for the values of a searched key; returns their places on it.

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
    decades = log10(high / low)
    subs = (1.0,) if decades > 2.5 else (1.0, 3.0) if decades > 1.2 else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    room = (high / low) ** 0.1
    axes.set_xlim(low / room, high * room)
    return float
