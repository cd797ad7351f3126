"""Write the report of a study: a page, its Markdown twin and a table of all runs; print the verdict."""

import csv
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...core.errors import printable
from ...core.files import write
from ..study import Study
from .curves import start
from .html import page_html
from .markdown import page_markdown
from .page import report_page
from .text import (
    columns_of_suite,
    comparisons,
    finished,
    headline,
    is_selected,
    metric_name,
    metric_text,
    no_verdict,
    references_of,
    spread,
)

STYLES = {"better": "green", "worse": "red", "open": ""}


def write_report(study: Study, folder: Path) -> None:
    """Write report.html, report.md and trials.csv into the study's folder; the same study gives the same bytes."""
    page = report_page(study, folder)
    texts = {"report.html": page_html(page), "report.md": page_markdown(page), "trials.csv": trials_csv(study)}
    for name, text in texts.items():
        write(folder / name, text)


def terminal_verdict(study: Study) -> Group:
    """Return the verdict for a terminal of 80 columns: the scores, each comparison, and faults or cautions."""
    parts: list[Any] = [Text(study.name, style="bold"), Text()]
    if study.problems:
        parts.append(Text("No verdict: the runs cannot be compared", style="bold red"))
        return Group(*parts, *(_point(problem, style="red") for problem in study.problems))
    if not study.differences:
        parts.append(Text(f"{no_verdict(study)}\n"))
    parts += [Text(f"{sentence}\n", style="bold") for sentence in headline(study)]
    parts += [_scores(study), Text()]
    for item in (item for name in references_of(study) for item in comparisons(study, name, most=1)):
        parts.append(_point(Text.assemble((item.lead, STYLES[item.kind]), item.text)))
    if study.differences:
        parts.append(Text("\nPositive differences are better, whatever the measure's direction.", style="dim"))
    if study.cautions:
        parts += [Text("\nHow this conclusion could be wrong", style="bold"), *map(_point, study.cautions)]
    return Group(*parts)


def _scores(study: Study) -> Table:
    """Return the metric and as many columns of the suite as fit, the starting checkpoint first."""
    base = study.base_scores or {}
    columns = columns_of_suite(study)[:3]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    for name in (metric_name(study), *columns):
        table.add_column(name, justify="right", overflow="fold")
    table.add_row(
        "start",
        metric_text(start(study, "metric")),
        *(f"{base[name]:.1f}" if name in base else "-" for name in columns),
    )
    for candidate in study.candidates:
        runs = finished(candidate.verdict)
        metric = spread([run.metric for run in runs if run.metric is not None], 4)
        values = [[run.scores[name] for run in runs if run.scores and name in run.scores] for name in columns]
        table.add_row(candidate.name, metric, *(spread(each, 1) for each in values))
    return table


def _point(text: str | Text, style: str = "") -> Padding:
    grid = Table.grid(padding=(0, 1))
    grid.add_row("-", text if isinstance(text, Text) else Text(text, overflow="fold"), style=style)
    return Padding(grid, 0)


# ---
# trials.csv: a line per run of a study, failed ones too, safe to open in a spreadsheet.

LAST = ("step", "tokens", "train_loss", "relative_change", "kl_to_start", "retention_loss")
"""Quantities of a run's last evaluation."""


def trials_csv(study: Study) -> str:
    """Return the runs as CSV; settings have the column of their recipe key, scores `score:` and the suite's column."""
    runs = [(each, run) for each in study.candidates for run in (*each.trials, *each.verdict)]
    keys = [*dict.fromkeys(key for _, run in runs for key in run.parameters)]
    columns = [*dict.fromkeys(column for _, run in runs for column in run.scores or {})]
    head = ["candidate", "stage", "number", "seed", "folder", "status", "selected", *keys, "metric", "seconds"]
    head += ["peak_memory_bytes", *LAST, *(f"score:{column}" for column in columns), "reason"]
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_safe, head))
    for candidate, run in runs:
        row = [run.candidate, run.stage, run.number, run.seed, run.folder, run.status]
        row += ["yes" if is_selected(candidate, run) else "no", *(run.parameters.get(key) for key in keys)]
        row += [run.metric, run.seconds, run.peak_memory_bytes]
        row += [getattr(run.curve[-1], key) if run.curve else None for key in LAST]
        row += [*((run.scores or {}).get(column) for column in columns), run.reason]
        writer.writerow(map(_safe, row))
    return text.getvalue()


def _safe(value: object) -> object:
    """Return a value that no spreadsheet reads as a formula: a text that starts like one gets an apostrophe."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text
