"""The figures whose marks are lines along runs: curves, the front, the expected best of so many trials.

Each is a row of small panels. A figure without data is left out, with a sentence instead.
"""

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from ..study import Candidate, Difference, Run, Study
from .curves import (
    Curve,
    best_of,
    columns_of,
    curve,
    expected_best,
    focus,
    mean_curve,
    shown_runs,
    start,
    thin,
    trial_metrics,
)
from .model import Key, Panel, Panels, Paragraph
from .svg import FONT, GRID, INCHES, INK, MUTED, PAPER, as_svg, look, new_panel, set_scale, short, swatch
from .text import (
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

Figure = Panels | Paragraph
MAX_WITH_RUNS = 6
"""Candidates whose runs are drawn beside their mean; of more, the thin lines would hide the others."""
DISPLACEMENT = "displacement ||W - W0|| / ||W0||"
KL = "KL to the start, nats per token"
RETENTION = "rise of the retention loss"


def curves_figure(study: Study) -> Figure:
    """Return the metric along the runs against steps, tokens, seconds and displacement."""
    axes = {"step": "steps", "tokens": "tokens", "seconds": "seconds of training", "relative_change": DISPLACEMENT}
    about = metric_name(study)
    panels = [_along(study, about, "metric", key, label, f"c{i}") for i, (key, label) in enumerate(axes.items())]
    missing = [label for panel, label in zip(panels, axes.values(), strict=True) if panel is None]
    cut = "below" if study.higher_is_better else "above"
    thin_lines = ", with the runs as thin lines" if len(study.candidates) <= MAX_WITH_RUNS else ""
    caption = f"Mean over the seeds{thin_lines}. The axis is cut {cut}, so that the ends show."
    return panels_or_sentence(study, panels, caption, missing, f"{about} along the runs", "c")


def front_figure(study: Study) -> Figure:
    """Return gain against forgetting: along the runs, at the ends, and against displacement and KL."""
    about = metric_name(study)
    panels = [
        _front_panel(study, "f0"),
        _retained_panel(study, "f1"),
        _along(study, RETENTION, "retention_loss", "relative_change", DISPLACEMENT, "f2"),
        _along(study, about, "metric", "kl_to_start", KL, "f3"),
        _along(study, RETENTION, "retention_loss", "kl_to_start", KL, "f4"),
    ]
    names = ["retention loss against gain", "retained scores against gain", "retention loss against displacement"]
    names += [f"{about} against KL", "retention loss against KL"]
    missing = [name for panel, name in zip(panels, names, strict=True) if panel is None]
    caption = (
        "Gain on the task against what was forgotten, from the starting checkpoint (0, 0); large markers: the ends of"
        " the runs. An optimizer is ahead where it forgets less at an equal gain, displacement or KL."
    )
    return panels_or_sentence(study, panels, caption, missing, "the front", "f")


def _front_panel(study: Study, name: str) -> Panel | None:
    begin, retained = start(study, "metric"), start(study, "retention_loss")
    if begin is None or retained is None:
        return None
    sign = 1.0 if study.higher_is_better else -1.0
    lines = {
        i: [
            [(sign * (x - begin), y - retained) for x, y in points]
            for points in _with_mean(shown_runs(candidate), "metric", "retention_loss")
        ]
        for i, candidate in enumerate(study.candidates)
    }
    return lines_panel(study, RETENTION, f"gain in {metric_name(study)}", lines, name, cut=False)


def _retained_panel(study: Study, name: str) -> Panel | None:
    """Return the change of the retained columns' mean against the gain at the end of every run."""
    columns = ((study.file.get("verdict") or {}).get("retention") or {}).get("columns") or []
    begin, base = start(study, "metric"), study.base_scores or {}
    columns = [column for column in columns if column in base]
    if begin is None or not columns:
        return None
    sign = 1.0 if study.higher_is_better else -1.0
    dots: dict[int, Curve] = {}
    for i, candidate in enumerate(study.candidates):
        for run in finished(candidate.verdict):
            changes = [run.scores[column] - base[column] for column in columns if column in (run.scores or {})]  # pyright: ignore[reportOptionalSubscript]
            if changes and run.metric is not None:
                dots.setdefault(i, []).append((sign * (run.metric - begin), fmean(changes)))
    if not dots:
        return None
    figure, axes = new_panel(f"change of {', '.join(columns)}, points", f"gain in {metric_name(study)}")
    for i, points in dots.items():
        axes.plot(*columns_of(points), **{**look(i), "linestyle": ""}, markersize=7)
    axes.axhline(0, color=MUTED, linewidth=1)
    axes.locator_params(axis="x", nbins=5)
    words = [f"{study.candidates[i].name} {fmean(y for _, y in points):+.1f}" for i, points in dots.items()]
    alt = f"Mean change of {', '.join(columns)} in points at the ends of the runs: {', '.join(words)}."
    return Panel(as_svg(figure, name, alt), alt)


def tuning_figure(study: Study) -> Figure:
    """Return the expected best metric of so many trials for each candidate."""
    lines = {}
    for i, candidate in enumerate(study.candidates):
        best = expected_best(trial_metrics(study, candidate), study.higher_is_better)
        if best:
            lines[i] = [[], [(float(k), value) for k, value in enumerate(best, 1)]]
    about = metric_name(study)
    panel = lines_panel(study, f"expected best {about}", "trials", lines, "t0", cut=True)
    caption = (
        "The expected best of so many trials, drawn from those of the search; a trial without a result counts as the"
        " starting checkpoint. Where lines cross, the better optimizer depends on the budget for tuning."
    )
    return panels_or_sentence(study, [panel], caption, [], "the expected best of so many trials", "t")


def _with_mean(runs: Sequence[Run], x: str, y: str) -> list[Curve]:
    """Return the curves of several runs, and their mean as the last."""
    curves = [thin(curve(run, x, y)) for run in runs] if len(runs) > 1 else []
    return [*curves, thin(mean_curve(runs, x, y))]


def _along(study: Study, title: str, y: str, x: str, label: str, name: str) -> Panel | None:
    """Return a quantity along the runs of all candidates against another; a retention loss from the start's."""
    zero = 0.0
    if y == "retention_loss":
        begin = start(study, y)
        if begin is None:
            return None
        zero = begin
    lines = {
        i: [[(a, b - zero) for a, b in points] for points in _with_mean(shown_runs(candidate), x, y)]
        for i, candidate in enumerate(study.candidates)
    }
    return lines_panel(study, title, label, lines, name, cut=y == "metric")


def lines_panel(
    study: Study, title: str, label: str, lines: dict[int, list[Curve]], name: str, *, cut: bool
) -> Panel | None:
    """Return a panel with thin lines for runs and a line with markers for their mean, each candidate's last curve."""
    lines = {i: curves for i, curves in lines.items() if curves and len(curves[-1]) > 1}
    if not lines:
        return None
    figure, axes = new_panel(title, label)
    for i, (*runs, mean) in lines.items():
        style = look(i)
        for points in runs if len(lines) <= MAX_WITH_RUNS else ():
            axes.plot(*columns_of(points), color=style["color"], linewidth=0.6, alpha=0.55)
        every = max(1, len(mean) // 6)
        line = {**style, "markevery": (i % every, every), "markersize": 4.5, "linewidth": 1.6}
        axes.plot(*columns_of(mean), **line)
        axes.plot(*mean[-1], **style, markersize=7)
    if cut and (limits := focus([y for curves in lines.values() for _, y in curves[-1]], study.higher_is_better)):
        axes.set_ylim(*limits)
    axes.xaxis.set_major_formatter(_compact)
    axes.locator_params(axis="x", nbins=5)
    ends = [
        f"{study.candidates[i].name} {curves[-1][-1][1]:.4g} at {curves[-1][-1][0]:.4g}" for i, curves in lines.items()
    ]
    alt = f"{title} against {label}; at the end: {', '.join(ends)}."
    return Panel(as_svg(figure, name, alt), alt)


def _compact(value: float, _: object) -> str:
    """Return a tick label: 300,000 is 300k."""
    for unit, length in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= length:
            return f"{value / (1e3 if unit == 'k' else length):g}{unit}"
    return f"{value:g}"


def panels_or_sentence(
    study: Study, panels: Sequence[Panel | None], caption: str, missing: Sequence[str], about: str, name: str
) -> Figure:
    """Return the panels that there are with a legend; without any, a sentence."""
    drawn = [panel for panel in panels if panel is not None]
    if not drawn:
        return Paragraph(f"No figure of {about}: no finished run measured what it needs.", kind="muted")
    if missing:
        caption += f" Not measured: {', '.join(missing)}."
    legend = [Key(swatch(i, f"{name}k{i}"), each.name) for i, each in enumerate(study.candidates)]
    return Panels(drawn, caption, legend)


# ---
# The figures whose marks are single results: differences with their intervals, and the trials of the search.

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


# ---
# The figure of spectra over training, from the run folders of a study that recorded them (run.log_spectra).

MAX_BYTES = 1 << 26
"""Of a spectra.jsonl that is read; a larger one is left to `soren-align spectrum`."""
Spectra = dict[tuple[int, str], list[float]]


def spectra_figure(study: Study, folder: Path) -> Panels | Paragraph:
    """Return the stable rank of the momenta over training, and the spectrum of one matrix at the last step."""
    ranks: dict[int, list[Curve]] = {}
    last: dict[int, list[Curve]] = {}
    for i, candidate in enumerate(study.candidates):
        spectra = next((each for run in shown_runs(candidate) if (each := _read(folder, run))), {})
        steps = sorted({step for step, _ in spectra})
        means = [fmean(_stable_rank(s) for (at, _), s in spectra.items() if at == step) for step in steps]
        ranks[i] = [[*zip(map(float, steps), means, strict=True)]]
        if spectra:
            step, name = max(spectra, key=lambda key: (key[0], len(spectra[key]), key[1]))
            values = spectra[step, name]
            last[i] = [thin([(mode / len(values), value / values[0]) for mode, value in enumerate(values, 1)])]
    if not last:
        return Paragraph("No figure of spectra: none were recorded (run.log_spectra).", kind="muted")
    panels: list[Panel | None] = [
        lines_panel(study, "stable rank of the momentum", "steps", ranks, "r0", cut=False),
        lines_panel(study, "singular value / the largest", "share of the modes", last, "r1", cut=False),
    ]
    caption = (
        "Singular values s of the momenta, the input of the optimizers' maps. First: stable rank, the sum of s^2 over"
        " the largest s^2, mean over the recorded matrices. Second: the largest matrix at the last recorded step."
    )
    return panels_or_sentence(study, panels, caption, [], "spectra", "r")


def _read(folder: Path, run: Run) -> Spectra:
    """Return the singular values of a run by step and matrix; nothing if there are none, or the file is damaged."""
    file = folder / run.folder / "spectra.jsonl"
    try:
        if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file() or file.stat().st_size > MAX_BYTES:
            return {}
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        spectra = {
            (int(line["step"]), str(line["name"])): [float(s) for s in line["singular_values"]] for line in lines
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {key: values for key, values in spectra.items() if values and all(map(isfinite, values)) and values[0] > 0}


def _stable_rank(values: list[float]) -> float:
    return sum((value / values[0]) ** 2 for value in values)
