"""Write the report of a study: a page, and a table of all runs.

`contents` is one dict: the tables, the figures and the sentences. The template sections.j2 orders
them by a reader's questions, the verdict first; html.j2 defines how each looks.
"""

import csv
import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from ...core.errors import printable
from ...core.files import write
from ...core.text import Table, count, duration, gibibytes, join_words, mean_std, number, p_value
from ...run.metrics import IN_STUDIES
from ...run.provenance import DIGITS
from ..stats import num_declared_tests
from ..study import BASE, HELD_OUT, Study, finished
from . import curves, figures, text
from .verdict import VERDICT, verdict_file

REPORT = "report.html"
STYLES = {"better": "green", "worse": "red", "equivalent": "cyan", "not distinguishable": ""}
SIGNS = {sign: (STYLES[answer], answer) for answer, sign in text.SIGNS.items()}
RUN = ("candidate", "stage", "number", "seed", "folder", "status")
COSTS = ("metric", "seconds", "peak_memory_bytes")
LAST = ("step", "tokens", "train_loss", *(metric.key for metric in IN_STUDIES))
"""Columns of trials.csv: fields of a run, and quantities of its last evaluation."""
MOST_PROBLEMS = 10
"""The most problems that a terminal shows; the page has all."""


def write_report(study: Study, folder: Path) -> None:
    """Write report.html, trials.csv and verdict.json into the study's folder.

    The same study gives the same bytes.
    """
    write(folder / REPORT, render(contents(study)))
    write(folder / "trials.csv", trials_csv(study))
    write(folder / VERDICT, json.dumps(verdict_file(study, folder), indent=1) + "\n")


def render(shown: dict[str, Any]) -> str:
    """Return the page, with every text escaped. shown: of `contents`."""

    # All texts are of unknown origin: names, reasons, keys. autoescape makes texts of HTML; control
    # characters are escaped here.
    def escaped(value: Any) -> Any:
        return value if isinstance(value, Markup) else printable(value)

    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=escaped,
    )
    environment.filters |= {
        "words": join_words,
        "count": count,
        "flat": lambda markup: Markup(" ".join(markup.split())),
    }
    style = Markup((folder / "report.css").read_text(encoding="utf-8"))
    return environment.get_template("html.j2").render(shown, style=style).rstrip() + "\n"


def contents(study: Study) -> dict[str, Any]:
    """Return what the page shows; None and empty lists are left out by the template."""
    # Differences of runs that cannot be compared are not shown: they would be read in spite of the
    # red box.
    has_answers = bool(study.differences) and not study.problems
    rules = text.rules_of(study) if study.differences else None
    references = text.references_of(study) if has_answers else []
    columns, measures = text.columns_of_suite(study), text.measures_of(study)
    return {
        "study": study,
        "metric": text.metric_name(study),
        "digits": study.declaration[:DIGITS],
        "plan": plan(study),
        "has_answers": has_answers,
        "rules": rules,
        "num_tests": rules and num_declared_tests(rules, len(study.candidates), measures),
        "headline": text.headline(study) if has_answers else [],
        "no_verdict": text.no_verdict(study),
        "sign_legend": text.legend(study),
        "comparisons": {
            text.reference_name(name): text.comparisons(study, name) for name in references
        },
        "scores": score_table(study, columns),
        "differences": difference_table(study) if has_answers else None,
        "costs": cost_table(study),
        "runs": run_table(study),
        "file": json.dumps(study.file, indent=1, ensure_ascii=False, default=str),
        "legend": figures.legend(study),
        "has_lines_of_runs": len(study.candidates) <= figures.MAX_WITH_RUNS,
        "figures": {
            "differences": {
                text.reference_name(name): figures.differences_figure(study, name)
                for name in references
            },
            "along": figures.curves_figure(study),
            "search": figures.search_figure(study),
            "front": figures.front_figure(study),
        },
        "keys_without_panel": figures.free_keys(*study.candidates)[figures.MAX_KEYS :],
    }


def plan(study: Study) -> dict[str, Any]:
    """Return the numbers of a study's runs, for the sentence below its title."""
    trials = [run for candidate in study.candidates for run in candidate.trials]
    ended = [run for run in trials if run.status not in ("waiting", "running")]
    # Runs of unequal length have no common number of steps; the audit reports them.
    steps = {run.curve[-1].step for run in study.runs if run.status == "finished" and run.curve}
    settings = {len({run.number for run in each.trials}) for each in study.candidates}
    return {
        "recipe": study.file.get("recipe", "one recipe"),
        "steps": max(steps) if len(steps) == 1 else None,
        "settings": " or ".join(map(str, sorted(settings))) or "no",
        "search_seeds": len({run.seed for run in trials}),
        "trials": len(trials),
        "ended": len(ended),
        "lost": sum(run.status != "finished" for run in ended),
        "seeds": sorted({run.seed for each in study.candidates for run in each.verdict}),
    }


def score_table(study: Study, columns: Sequence[str]) -> Table:
    """Return the scores, the starting checkpoint's in the first row, with the selected settings."""
    start, *scores = _scores(study, columns)
    rows = [["starting checkpoint", *start, "-", ""]]
    for candidate, own in zip(study.candidates, scores, strict=True):
        trial = candidate.selected_trial
        settings = [
            f"{key} {text.setting(trial.parameters[key])}"
            for key in figures.free_keys(candidate)
            if trial and key in trial.parameters
        ]
        num_runs = str(len(finished(candidate.verdict)))
        rows.append([candidate.name, *own, num_runs, "\n".join(settings) or "none"])
    head = ["", text.metric_name(study), *columns, "runs", "selected setting"]
    return Table(head, rows, align="l" + "r" * (len(head) - 2) + "l", signs=SIGNS)


def _scores(study: Study, columns: Sequence[str]) -> list[list[str]]:
    """Return the selection metric and scores: the starting checkpoint's, then each candidate's."""
    base = study.base_scores or {}
    runs = [run for candidate in study.candidates for run in candidate.verdict]
    # The start of a final run is measured on the examples that judge, that of a trial is not.
    starts = [run.start for run in runs if run.start is not None]
    metric = text.metric_text(starts[0] if starts else curves.start(study, "metric"))
    rows = [[metric, *(number(base.get(column), ".1f") for column in columns)]]
    for candidate in study.candidates:
        cells = []
        for measure in (HELD_OUT, *columns):
            results = [run.results.get(measure) for run in finished(candidate.verdict)]
            known = [result for result in results if result is not None]
            mean = mean_std(known, 3 if measure == HELD_OUT else 1)
            cells.append(mean + text.sign(study, candidate.name, measure))
        rows.append(cells)
    return rows


def difference_table(study: Study) -> Table:
    """Return every difference under its measure."""
    rows, groups = [], set()
    for measure in text.measures_of(study):
        groups.add(len(rows))
        rows.append([text.measure_name(study, measure), *[""] * 7])
        for reference in text.references_of(study):
            for d in text.differences_to(study, reference):
                if d.measure != measure:
                    continue
                retained = "-"
                if d.retained is not None and d.margin is not None:
                    answer = "yes" if d.retained else "not shown"
                    retained = f"{answer}, margin {text.size(d.margin, d.unit)}"
                value, low, high = (text.signed_size(v, d.unit) for v in (d.value, d.low, d.high))
                row = [
                    f"{d.candidate} - {'start' if reference == BASE else reference}",
                    d.answer,
                    value,
                    f"[{low}, {high}]",
                    p_value(d.p_holm).removeprefix("p "),
                    text.detectable(d).removesuffix(" points"),
                    f"{d.seed_share:.0%}",
                    retained,
                ]
                rows.append(row)
    head = ["", "answer", "difference", "95% interval", "Holm's p", "detectable", "by seeds"]
    return Table([*head, "retained"], rows, align="ll", groups=frozenset(groups))


def cost_table(study: Study) -> Table:
    """Return times and memory of the runs of each candidate."""
    rows = []
    for candidate in study.candidates:
        runs = curves.shown_runs(candidate)
        seconds = [run.seconds for run in runs if run.seconds is not None]
        peaks = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
        row = [
            candidate.name,
            duration(sum(seconds) / len(seconds) if seconds else None),
            gibibytes(max(peaks, default=None)),
            duration(sum(run.seconds or 0.0 for run in candidate.runs)),
        ]
        rows.append(row)
    return Table(["", "time of a run", "peak memory", "all runs together"], rows)


def run_table(study: Study) -> Table:
    """Return every run, of the search and of the verdict, failed ones too."""
    keys = [*dict.fromkeys(key for run in study.runs for key in run.parameters)]
    rows, groups = [], set()
    for candidate in study.candidates:
        groups.add(len(rows))
        for run in candidate.runs:
            row = [
                run.candidate,
                f"{run.stage} {run.number}",
                f"{run.status}, selected" if candidate.is_selected(run) else run.status,
                str(run.seed),
                *(text.setting(run.parameters.get(key), 4) for key in keys),
                text.metric_text(run.metric),
                duration(run.seconds),
                gibibytes(run.peak_memory_bytes),
                run.reason or "",
            ]
            rows.append(row)
    head = ["", "run", "status", "seed", *keys, text.metric_name(study), "time", "peak memory"]
    align = "lll" + "r" * (len(head) - 3) + "l"
    return Table([*head, "reason"], rows, align=align, groups=frozenset(groups))


def terminal_verdict(study: Study) -> Group:
    """Return the verdict for a terminal of 80 columns: the scores, each comparison, and faults or
    cautions.
    """
    title = Text(study.name, style="bold")
    if study.declaration:
        title.append(f"  declaration {study.declaration[:DIGITS]}", style="dim")
    parts: list[Any] = [title, Text()]
    # With problems, nothing else is printed: scores below them would be read as a result.
    if study.problems:
        parts.append(Text("No verdict: the runs cannot be compared", style="bold red"))
        parts += [_point(Text(problem, style="red")) for problem in study.problems[:MOST_PROBLEMS]]
        if (more := len(study.problems) - MOST_PROBLEMS) > 0:
            parts.append(Text(f"The report has {count(more, 'further problem')}.", style="red"))
        return Group(*parts)
    if not study.differences:
        parts.append(Text(f"{text.no_verdict(study)}\n"))
    parts += [Text(f"{sentence}\n", style="bold") for sentence in text.headline(study)]
    # Four columns of "12.34 ± 0.56 ▲" and a name fit into 80.
    columns = text.columns_of_suite(study)[:3]
    names = ["start", *(candidate.name for candidate in study.candidates)]
    rows = [[name, *scores] for name, scores in zip(names, _scores(study, columns), strict=True)]
    parts += [Table(["", text.metric_name(study), *columns], rows, signs=SIGNS).rich(), Text()]
    if legend := text.legend(study):
        parts.append(Text(f"{legend}\n", style="dim"))
    for reference in text.references_of(study):
        for each in text.comparisons(study, reference):
            # That training helped is in the first sentences; the page has all numbers.
            if reference != BASE or len(study.candidates) == 1 or not each.is_better_throughout:
                parts.append(_point(Text.assemble((each.lead, STYLES[each.answer]), each.facts)))
    if study.cautions:
        parts.append(Text("\nHow this conclusion could be wrong", style="bold"))
        parts += [_point(Text(caution)) for caution in study.cautions]
    return Group(*parts)


def _point(sentence: Text) -> RichTable:
    """Return a sentence behind a dash, whose further lines are indented."""
    grid = RichTable.grid(padding=(0, 1))
    sentence.overflow = "fold"
    grid.add_row("-", sentence)
    return grid


def trials_csv(study: Study) -> str:
    """Return a line per run, failed ones too.

    Settings have the column of their recipe key, scores `score:` and the suite's column.
    """
    keys = [*dict.fromkeys(key for run in study.runs for key in run.parameters)]
    columns = [*dict.fromkeys(column for run in study.runs for column in run.scores or {})]
    head = [*RUN, "selected", *keys, *COSTS, *LAST, *(f"score:{column}" for column in columns)]
    head += ["reason", "declaration"]
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(_safe, head))
    for candidate in study.candidates:
        for run in candidate.runs:
            line = {key: getattr(run, key) for key in (*RUN, *COSTS, "reason")} | run.parameters
            line["selected"] = "yes" if candidate.is_selected(run) else "no"
            line["declaration"] = study.declaration[:DIGITS]
            line |= {f"score:{column}": score for column, score in (run.scores or {}).items()}
            line |= {key: getattr(run.curve[-1], key) for key in LAST if run.curve}
            writer.writerow([_safe(line.get(key)) for key in head])
    return stream.getvalue()


def _safe(value: object) -> object:
    """Return a value that no spreadsheet reads as a formula: a text that starts like one gets an
    apostrophe.
    """
    if not isinstance(value, str):
        return value
    printed = printable(value)
    return f"'{printed}" if printed.lstrip().startswith(("=", "+", "-", "@")) else printed
