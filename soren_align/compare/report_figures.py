"""The figures whose marks are lines along runs: curves, the front, the expected best of so many trials.

Each is a row of small panels. A figure without data is left out, with a sentence instead.
"""

from collections.abc import Sequence
from statistics import fmean

from .expected_best import expected_best
from .report_blocks import Key, Panel, Panels, Paragraph
from .report_curves import (
    Curve,
    columns_of,
    curve,
    focus,
    mean_curve,
    shown_runs,
    start,
    thin,
    trial_metrics,
)
from .report_svg import MUTED, as_svg, look, new_panel, swatch
from .report_text import (
    finished,
    metric_name,
)
from .study import Run, Study

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
