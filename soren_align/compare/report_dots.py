"""The figures whose marks are single results: differences with their intervals, and the trials of the search."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from .report_blocks import Panel, Panels, Paragraph
from .report_curves import columns_of, focus
from .report_svg import FONT, GRID, INCHES, INK, MUTED, PAPER, as_svg, look, new_panel, set_log, short
from .report_text import (
    BASE,
    count,
    finished,
    in_order,
    measure_name,
    measures_of,
    metric_name,
    metric_text,
    number,
    reference_name,
    reference_of,
    selected_trial,
    size,
)
from .study import Candidate, Run, Study

MAX_PANELS = 24


def differences_figure(study: Study) -> Panels | Paragraph:
    """Return a panel per measure: each comparison with its interval, over the differences too small to be seen."""
    panels = [_differences_panel(study, measure, f"d{i}") for i, measure in enumerate(measures_of(study)[:MAX_PANELS])]
    if not panels:
        return Paragraph("No figure of the differences: nothing was compared.", muted=True)
    caption = (
        "Differences with their 95% intervals; to the right is better. Filled: to the reference; hollow: to the starting"
        " checkpoint. Grey: differences that this study could not have seen. Intervals are not corrected for the number"
        " of comparisons, the answers are."
    )
    return Panels(panels, caption)


def _differences_panel(study: Study, measure: str, name: str) -> Panel:
    differences = [d for d in in_order(study, [reference_of(study) or "", BASE]) if d.measure == measure]
    unit = "percent points" if differences and differences[0].unit == "percent" else "loss"
    about = measure_name(study, measure)
    height = 0.75 + 0.24 * len(differences)
    figure, axes = new_panel(about, f"difference, {unit if unit != 'loss' else about}", (INCHES[0], height))
    for y, d in enumerate(differences):
        hollow = d.reference == BASE
        axes.plot([-d.detectable, d.detectable], [y, y], color=GRID, linewidth=11, solid_capstyle="butt", zorder=1)
        axes.plot([d.low, d.high], [y, y], color=INK, linewidth=1.4, zorder=3)
        dot = {"marker": "o", "markersize": 6, "color": INK, "zorder": 4}
        axes.plot(d.value, y, **dot, markerfacecolor=PAPER if hollow else INK)
    axes.axvline(0, color=MUTED, linewidth=1, zorder=2)
    labels = [f"{short(d.candidate, 14)} - {short(d.reference.replace(BASE, 'start'), 14)}" for d in differences]
    axes.set_yticks(range(len(differences)), labels, parse_math=False)
    axes.set_ylim(len(differences) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=5)
    words = "; ".join(
        f"{d.candidate} to {reference_name(d.reference)} {size(d.value, d.unit)} [{size(d.low, d.unit)},"
        f" {size(d.high, d.unit)}]"
        for d in differences
    )
    alt = f"Differences on {about}: {words}."
    return Panel(as_svg(figure, name, alt), alt)


def sensitivity_figure(study: Study) -> Panels | Paragraph:
    """Return a panel per searched key and candidate: the metric of every trial against the key's value."""
    trials = [run for candidate in study.candidates for run in candidate.trials]
    keys = _free_keys(trials)
    values = [run.metric for run in finished(trials) if run.metric is not None]
    limits = focus(values, study.higher_is_better)
    if not keys or limits is None:
        return Paragraph(
            "No figure of the search: fewer than two trials finished, or nothing was searched.", muted=True
        )
    pairs = [(key, number, candidate) for key in keys for number, candidate in enumerate(study.candidates)]
    panels = [
        _sensitivity_panel(study, candidate, key, look(number), limits, f"l{i}")
        for i, (key, number, candidate) in enumerate(pairs[:MAX_PANELS])
    ]
    caption = (
        f"{metric_name(study).capitalize()} of every trial against its setting. Ring: the selected trial. Dashed: the"
        " best trial of all candidates. Above the panel: x diverged, + failed, - pruned. Triangles: worse than the axis"
        " shows."
    )
    if len(pairs) > MAX_PANELS:
        caption += f" {count(len(pairs) - MAX_PANELS, 'panel')} left out; trials.csv has all values."
    return Panels(panels, caption)


def _free_keys(trials: Sequence[Run]) -> list[str]:
    """Return the searched keys, without those that always have another key's value, or one value for each candidate."""
    columns: dict[str, tuple[float | None, ...]] = {}
    for key in dict.fromkeys(key for run in trials for key in run.parameters):
        column = tuple(run.parameters.get(key) for run in trials)
        values = {(run.candidate, value) for run, value in zip(trials, column, strict=True)}
        if column not in columns.values() and len(values) > len({run.candidate for run in trials}):
            columns[key] = column
    return [*columns]


def _sensitivity_panel(
    study: Study, candidate: Candidate, key: str, style: dict, limits: tuple[float, float], name: str
) -> Panel:
    figure, axes = new_panel(f"{candidate.name}: {metric_name(study)}", key)
    everywhere = [run for each in study.candidates for run in each.trials]
    xs = [run.parameters[key] for run in everywhere if key in run.parameters]
    set_log(axes, min(xs), max(xs))
    own = [run for run in candidate.trials if key in run.parameters]
    results = sorted((run.parameters[key], run.metric) for run in finished(own) if run.metric is not None)
    worst = limits[0] if study.higher_is_better else limits[1]
    inside = [(x, y) for x, y in results if limits[0] <= y <= limits[1]]
    beyond = [x for x, y in results if not limits[0] <= y <= limits[1]]
    alone = len(_free_keys(own)) == 1  # else a line would join settings that differ in other keys
    axes.plot(*columns_of(inside), **{**style, "linestyle": "-" if alone else ""}, linewidth=1, markersize=5)
    marker = "v" if study.higher_is_better else "^"
    axes.plot(
        beyond, [worst] * len(beyond), linestyle="", marker=marker, markersize=7, color=style["color"], clip_on=False
    )
    best = (max if study.higher_is_better else min)(
        run.metric for run in finished(everywhere) if run.metric is not None
    )
    axes.axhline(best, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    _mark_selected(axes, candidate, key)
    num_lost = _mark_lost(axes, own, key)
    axes.set_ylim(*limits)
    room = (max(xs) / min(xs)) ** 0.05 if axes.get_xscale() == "log" else 0
    axes.set_xlim(*((min(xs) / room, max(xs) * room) if room else axes.get_xlim()))
    quality = (
        f"best {metric_text((max if study.higher_is_better else min)(y for _, y in results))}" if results else "none"
    )
    chosen = selected_trial(candidate)
    at = f", selected at {chosen.parameters[key]:.3g}" if chosen and key in chosen.parameters else ""
    alt = f"{metric_name(study)} of {candidate.name} against {key}: {count(len(results), 'finished trial')}, {quality}{at}; {num_lost} without a result."
    return Panel(as_svg(figure, name, alt), alt)


def _mark_selected(axes: Axes, candidate: Candidate, key: str) -> None:
    run = selected_trial(candidate)
    if run is None or number(run.metric) is None or key not in run.parameters:
        return
    x, y = run.parameters[key], run.metric
    axes.plot(x, y, marker="o", markersize=12, markerfacecolor="none", color=INK, markeredgewidth=1.4)
    text = {"xytext": (0, 11), "textcoords": "offset points", "ha": "center", "fontsize": FONT, "color": INK}
    axes.annotate(f"{x:.3g}", (x, y), **text)  # pyright: ignore[reportArgumentType]


def _mark_lost(axes: Axes, runs: Sequence[Run], key: str) -> int:
    """Mark the trials without a result above the panel, and return their number."""
    num = 0
    for status, marker in (("diverged", "x"), ("failed", "+"), ("pruned", "_")):
        xs = [run.parameters[key] for run in runs if run.status == status]
        place = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(
            xs, [1.035] * len(xs), linestyle="", marker=marker, markersize=7, color=INK, markeredgewidth=1.6, **place
        )
        num += len(xs)
    if num:
        axes.set_title(
            axes.get_title(loc="left"), loc="left", fontsize=FONT, fontweight="bold", pad=15, parse_math=False
        )
    return num
