"""trials.csv: a line per run of a study, failed ones too, safe to open in a spreadsheet."""

import csv
from io import StringIO

from ..errors import printable
from .report_text import is_selected
from .study import Study

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
