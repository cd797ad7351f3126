"""The figures whose marks are single results: differences with their intervals, and the trials of the search."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from .report_blocks import Panel, Panels, Paragraph
from .report_curves import best_of, columns_of, focus
from .report_svg import FONT, GRID, INCHES, INK, MUTED, PAPER, as_svg, look, new_panel, set_scale, short
from .report_text import (
    count,
    finished,
    in_order,
    is_selected,
    listed,
    measure_name,
    measures_of,
    metric_name,
    metric_text,
    reference_name,
    setting,
    size,
)
from .study import Candidate, Difference, Run, Study

MAX_KEYS = 6
"""Searched keys that have a figure."""


def differences_figure(study: Study, reference: str, name: str) -> Panels:
    """Return a panel per measure: the differences to one reference, over those too small to be seen."""
    panels = []
    for i, measure in enumerate(measures_of(study)):
        differences = [d for d in in_order(study, [reference]) if d.measure == measure]
        if differences:
            panels.append(_differences_panel(study, differences, f"{name}{i}"))
    caption = (
        f"Differences to {reference_name(reference)} with their 95% intervals; to the right is better. Grey:"
        " differences too small for this study to see. Filled dots: better or worse; hollow: not distinguishable."
    )
    return Panels(panels, caption)


def _differences_panel(study: Study, differences: Sequence[Difference], name: str) -> Panel:
    about, unit = measure_name(study, differences[0].measure), differences[0].unit
    reference = reference_name(differences[0].reference)
    height = 0.72 + 0.26 * len(differences)
    label = "percent points better" if unit == "percent" else "better by"
    figure, axes = new_panel(about, label, (INCHES[0], height))
    for y, d in enumerate(differences):
        axes.plot([-d.detectable, d.detectable], [y, y], color=GRID, linewidth=12, solid_capstyle="butt", zorder=1)
        axes.plot([d.low, d.high], [y, y], color=INK, linewidth=1.4, zorder=3)
        face = PAPER if d.answer == "not distinguishable" else INK
        axes.plot(d.value, y, marker="o", markersize=6, color=INK, markerfacecolor=face, zorder=4)
    axes.axvline(0, color=MUTED, linewidth=1, zorder=2)
    axes.set_yticks(range(len(differences)), [short(d.candidate, 18) for d in differences], parse_math=False)
    axes.set_ylim(len(differences) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=5)
    words = [f"{d.candidate} {size(d.value, unit)} [{size(d.low, unit)}, {size(d.high, unit)}]" for d in differences]
    alt = f"Differences on {about} to {reference}: {'; '.join(words)}."
    return Panel(as_svg(figure, name, alt), alt)


def sensitivity_figures(study: Study) -> list[Panels | Paragraph]:
    """Return a figure per searched key: a panel per candidate, the metric of every trial against the key's value."""
    trials = [run for candidate in study.candidates for run in candidate.trials]
    keys = _free_keys(trials)
    limits = focus([run.metric for run in finished(trials) if run.metric is not None], study.higher_is_better)
    if not keys or limits is None:
        sentence = "No figure of the search: fewer than two trials finished, or nothing was searched."
        return [Paragraph(sentence, kind="muted")]
    caption = (
        f"{metric_name(study).capitalize()} of every trial against its setting. Ring: the selected trial. Dashed: the"
        " best trial of all candidates. Above the panel: x diverged, + failed, - pruned. Triangles: worse than the axis"
        " shows."
    )
    figures: list[Panels | Paragraph] = []
    for i, key in enumerate(keys[:MAX_KEYS]):
        panels = [
            _sensitivity_panel(study, candidate, key, look(j), limits, f"l{i}x{j}")
            for j, candidate in enumerate(study.candidates)
            if any(key in run.parameters for run in candidate.trials)
        ]
        figures.append(Panels(panels, f"The same against {key}." if i else caption))
    if left := keys[MAX_KEYS:]:
        figures.append(Paragraph(f"Not shown: {listed(left)}; trials.csv has all values.", kind="muted"))
    return figures


def _free_keys(trials: Sequence[Run]) -> list[str]:
    """Return the searched keys, without those that always have another key's value, or one value for each candidate."""
    columns: dict[str, tuple[Any, ...]] = {}
    for key in dict.fromkeys(key for run in trials for key in run.parameters):
        column = tuple(run.parameters.get(key) for run in trials)
        values = {(run.candidate, value) for run, value in zip(trials, column, strict=True)}
        if column not in columns.values() and len(values) > len({run.candidate for run in trials}):
            columns[key] = column
    return [*columns]


def _sensitivity_panel(
    study: Study, candidate: Candidate, key: str, style: dict, limits: tuple[float, float], name: str
) -> Panel:
    figure, axes = new_panel(f"{candidate.name}: {metric_name(study)}", key, pad=18)
    everywhere = [run for each in study.candidates for run in each.trials]
    place = set_scale(axes, [run.parameters[key] for run in everywhere if key in run.parameters])
    own = [run for run in candidate.trials if key in run.parameters]
    results = sorted((place(run.parameters[key]), run.metric) for run in finished(own) if run.metric is not None)
    inside = [(x, y) for x, y in results if limits[0] <= y <= limits[1]]
    beyond = [x for x, y in results if not limits[0] <= y <= limits[1]]
    alone = len(_free_keys(own)) == 1  # else a line would join settings that differ in other keys
    axes.plot(*columns_of(inside), **{**style, "linestyle": "-" if alone else ""}, linewidth=1, markersize=5)
    worst, marker = (limits[0], "v") if study.higher_is_better else (limits[1], "^")
    triangles = {"linestyle": "", "marker": marker, "markersize": 7, "color": style["color"], "clip_on": False}
    axes.plot(beyond, [worst] * len(beyond), **triangles)
    best = best_of(study, [run.metric for run in finished(everywhere) if run.metric is not None])
    axes.axhline(best, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))  # pyright: ignore[reportArgumentType]
    chosen = [run for run in finished(own) if is_selected(candidate, run)]
    if chosen:
        value = chosen[0].parameters[key]
        metric = fmean(run.metric for run in chosen if run.metric is not None)
        _mark_selected(axes, (place(value), metric), setting(value), above=study.higher_is_better)
    lost = _mark_lost(axes, [(run.status, place(run.parameters[key])) for run in own])
    room = 0.1 * (limits[1] - limits[0])  # for the selected value, on the side of the best trials
    axes.set_ylim(*((limits[0], limits[1] + room) if study.higher_is_better else (limits[0] - room, limits[1])))
    words = [count(len(results), "finished trial")]
    words += [f"best {metric_text(best_of(study, [y for _, y in results]))}"] if results else []
    words += [f"selected {setting(chosen[0].parameters[key])}"] if chosen else []
    alt = f"{metric_name(study)} of {candidate.name} against {key}: {', '.join([*words, *lost])}."
    return Panel(as_svg(figure, name, alt), alt)


def _mark_selected(axes: Axes, place: tuple[float, float], label: str, *, above: bool) -> None:
    axes.plot(*place, marker="o", markersize=12, markerfacecolor="none", color=INK, markeredgewidth=1.4)
    text = {"xytext": (0, 10 if above else -17), "textcoords": "offset points", "ha": "center", "fontsize": FONT}
    text["bbox"] = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}  # a line behind the number is interrupted
    axes.annotate(short(label, 14), place, color=INK, parse_math=False, **text)  # pyright: ignore[reportArgumentType]


def _mark_lost(axes: Axes, places: Sequence[tuple[str, float]]) -> list[str]:
    """Mark the trials without a result above the panel, and return their numbers."""
    words = []
    for status, marker in (("diverged", "x"), ("failed", "+"), ("pruned", "_")):
        xs = [x for each, x in places if each == status]
        style = {"marker": marker, "markersize": 7, "color": INK, "markeredgewidth": 1.6, "linestyle": ""}
        axes.plot(xs, [1.06] * len(xs), transform=axes.get_xaxis_transform(), clip_on=False, **style)
        words += [f"{len(xs)} {status}"] if xs else []
    return words
