"""Write the report of a study: a page, the same in Markdown, and a table of all runs.

The sections of the page are in the order of a reader's questions: the verdict first, then all that
it is made of.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from ...core.errors import UserError, printable
from ...core.files import write
from ...core.text import Table, count, duration, gibibytes, join_words, mean_std, p_value
from ...evaluate.report.results import Results, read_results
from ...publish.answers import of_evaluation
from ...recipe import load_resolved
from ...run.folder import RunFolder
from ...run.metrics import IN_STUDIES
from ...run.provenance import DIGITS
from ..stats import num_declared_tests
from ..study import BASE, HELD_OUT, Study, finished
from . import charts, curves, text
from .blocks import Alert, Block, Code, Item, Items, LongTable, Paragraph, TextTable, render
from .verdict import VERDICT, verdict_file

REPORT = "report.html"
STYLES = {"better": "green", "worse": "red", "equivalent": "cyan", "open": ""}
SIGNS = {sign: (STYLES[answer], answer) for answer, sign in text.SIGNS.items()}
LAST = ("step", "tokens", "train_loss", *(metric.key for metric in IN_STUDIES))
"""Quantities of a run's last evaluation, in trials.csv."""
OWN = ("recipe", "num_batches", "versions")
"""Parts of a run's identity that are not shown: its own recipe, and what stands elsewhere."""
MOST_PROBLEMS = 10
"""In a terminal; the page has all."""
CONTAMINATION = {"exact": "as a whole", "scores": "scores without these (change)"}


def write_report(study: Study, folder: Path) -> None:
    """Write report.html, report.md, trials.csv and verdict.json into the study's folder; the same
    study gives the same bytes.

    Spectra are read from its run folders in `folder`, all else from the study, its declaration and
    its history.
    """
    cautions: list[Block] = [Items([Item("", caution, "caution") for caution in study.cautions])]
    if not study.cautions:
        cautions = [
            Paragraph(
                "The audit has no cautions: no selected value is the smallest or largest that was tried, no question "
                "is in the training data, and there are enough seeds."
            )
        ]
    general = (
        "The conclusion holds for this model, these data, this schedule and these search spaces: with a longer "
        "training, a larger model or other search spaces, the order of the optimizers may be different."
    )
    if study.base_scores and not study.contamination:
        general = (
            f"The overlap of the training examples with the questions was not counted. {general}"
        )
    repeat: list[Block] = [Code(study.command)] if study.command else []
    if study.versions:
        versions = ", ".join(f"{name} {version}" for name, version in study.versions.items())
        repeat.append(Paragraph(f"Versions: {versions}."))
    repeat += [Paragraph(f"Machine: {study.machine}.")] if study.machine else []
    resolved = json.dumps(study.file, indent=1, ensure_ascii=False, default=str)
    parts: Mapping[str, Sequence[Block | None]] = {
        "Verdict": verdict_blocks(study, folder),
        "How this conclusion could be wrong": [*cautions, Paragraph(general)],
        "Along the runs": [charts.curves_figure(study)],
        "Answers": answer_blocks(study, folder),
        "The search": [charts.search_figure(study)],
        "At equal displacement": [charts.front_figure(study), *matched(study)],
        "Spectra": [charts.spectra_figure(study, folder)],
        "Time and memory": _costs(study),
        "Contamination": [_contamination(study)],
        "Every difference": difference_blocks(study),
        "Every run": [
            _runs(study),
            Paragraph("trials.csv has these runs with more columns.", kind="muted"),
        ],
        "To repeat it": [
            *repeat,
            *identities(study),
            Code(resolved, folded="The study's file, resolved"),
        ],
    }
    sections = {
        name: [block for block in blocks if block is not None] for name, blocks in parts.items()
    }
    sections = {name: blocks for name, blocks in sections.items() if blocks}
    subtitle = text.subtitle(study)
    write(folder / REPORT, render("html", study.name, subtitle, sections))
    write(folder / "report.md", render("md", study.name, subtitle, sections))
    write(folder / "trials.csv", trials_csv(study))
    write(folder / VERDICT, json.dumps(verdict_file(study, folder).model_dump(), indent=1) + "\n")


def verdict_blocks(study: Study, folder: Path) -> list[Block]:
    """Return the verdict; of a study with faults these instead."""
    if study.problems:
        return [
            Alert("No verdict: the runs cannot be compared", study.problems),
            Paragraph(
                "The figures and tables below show the runs as they are; they do not support a conclusion."
            ),
            *score_blocks(study, folder),
        ]
    if not study.differences:
        return [Paragraph(text.no_verdict(study), kind="lead"), *score_blocks(study, folder)]
    blocks: list[Block] = [Paragraph(sentence, kind="lead") for sentence in text.headline(study)]
    blocks += score_blocks(study, folder)
    num = num_declared_tests(text.rules_of(study), len(study.candidates), text.measures_of(study))
    note = (
        "Intervals cover the spread over seeds, and over questions or held-out examples. Two optimizers are compared "
        "seed by seed and question by question. A candidate is better or worse if its p-value is below 0.05 after "
        f"Holm's correction for the {count(num, 'test')} of this study. The intervals are not corrected: an interval "
        'can exclude 0 although the candidate is "not distinguishable". In tables and figures, positive differences '
        "are better, also for a loss."
    )
    blocks.append(Paragraph(note, kind="muted"))
    for name in text.references_of(study):
        blocks.append(
            Items(text.comparisons(study, name, most=1), f"Against {text.reference_name(name)}")
        )
        blocks.append(charts.differences_figure(study, name))
    return blocks


def score_blocks(study: Study, folder: Path) -> list[Block]:
    """Return the scores, the starting checkpoint's in the first row, marked by the answers against
    the reference.
    """
    columns = text.columns_of_suite(study)
    rows = [["starting checkpoint", *_scores(study, columns)[0], "-", ""]]
    for candidate, scores in zip(study.candidates, _scores(study, columns)[1:], strict=True):
        trial = candidate.selected_trial
        searched = trial.parameters.items() if trial else ()
        # =optimizer.lr
        derived = {key for key, values in candidate.space.items() if isinstance(values, str)}
        settings = [
            f"{key} {text.setting(value)}" for key, value in searched if key not in derived
        ] or ["none"]
        rows.append(
            [candidate.name, *scores, str(len(finished(candidate.verdict))), "\n".join(settings)]
        )
    head = ["", text.metric_name(study), *columns, "runs", "selected setting"]
    note = f"Mean ± standard deviation over the seeds of the final runs; scores in percent. {_suite(study, folder)}"
    note = f"{note.strip()} {text.legend(study)}".strip()
    align = "l" + "r" * (len(head) - 2) + "l"
    blocks: list[Block] = [
        Table(head, rows, align=align, signs=SIGNS),
        Paragraph(note, kind="muted"),
    ]
    return blocks


def difference_blocks(study: Study) -> list[Block]:
    """Return every difference under its measure; nothing without a verdict."""
    if study.problems or not study.differences:
        return []
    rows, groups = [], set()
    for measure in text.measures_of(study):
        groups.add(len(rows))
        rows.append([text.measure_name(study, measure), *[""] * 7])
        for d in text.in_order(study, text.references_of(study)):
            if d.measure == measure:
                value, low, high = (
                    text.signed_size(value, d.unit) for value in (d.value, d.low, d.high)
                )
                retained = "-"
                if d.retained is not None and d.margin is not None:
                    retained = f"{'yes' if d.retained else 'not shown'}, margin {text.size(d.margin, d.unit)}"
                row = [
                    f"{d.candidate} - {'start' if d.reference == BASE else d.reference}",
                    d.answer,
                ]
                row += [value, f"[{low}, {high}]", p_value(d.p_holm).removeprefix("p ")]
                row += [text.seen_size(d).removesuffix(" points"), f"{d.seed_share:.0%}", retained]
                rows.append(row)
    power = text.rules_of(study).power
    head = [
        "",
        "answer",
        "difference",
        "95% interval",
        "Holm's p",
        "detectable",
        "by seeds",
        "retained",
    ]
    note = (
        f"Detectable: a study like this one finds a true difference of this size in {power:.0%} of repetitions. By "
        "seeds: the share of the difference's variance that the seeds cause. More seeds lower this part, and more "
        "questions or examples lower the other part."
    )
    return [Table(head, rows, align="ll", groups=frozenset(groups)), Paragraph(note, kind="muted")]


def _scores(study: Study, columns: list[str]) -> list[list[str]]:
    """Return the selection metric and scores of the suite: of the starting checkpoint, then of each
    candidate.
    """
    base = study.base_scores or {}
    starts = [
        run.start
        for candidate in study.candidates
        for run in candidate.verdict
        if run.start is not None
    ]
    metric = text.metric_text(starts[0] if starts else curves.start(study, "metric"))
    rows = [[metric, *(f"{base[c]:.1f}" if c in base else "-" for c in columns)]]
    for candidate in study.candidates:
        cells = []
        for measure in (HELD_OUT, *columns):
            results = [run.results.get(measure) for run in finished(candidate.verdict)]
            mean = mean_std(
                [each for each in results if each is not None], 3 if measure == HELD_OUT else 1
            )
            cells.append(mean + text.sign(study, candidate.name, measure))
        rows.append(cells)
    return rows


def answer_blocks(study: Study, folder: Path) -> list[Block]:
    """Return answers to questions whose answers are generated: the start's, then each
    candidate's.
    """
    names: list[str] = []
    rows: dict[str, list[str]] = {}
    source = ""
    for candidate in study.candidates:
        for run in finished(candidate.verdict)[:1]:
            output, results = _evaluation(folder / run.folder)
            if output is None or results is None or len(results["rows"]) < 2:
                continue
            *_, start, own = results["rows"]
            if (answers := of_evaluation(output, results, own, start)) is None:
                continue
            names.append(candidate.name)
            source = answers.source
            for (prompt, before, after), target in zip(answers.rows, answers.targets, strict=True):
                rows.setdefault(prompt, [prompt, target or "-", before]).append(after)
    complete = [row for row in rows.values() if len(row) == 3 + len(names)]
    if not complete:
        return []
    note = f"{source}: generated by the starting checkpoint, and by each optimizer's final run with the first seed."
    head = ["", "right answer", "start", *names]
    return [TextTable(head, complete, align="l" * len(head)), Paragraph(note, kind="muted")]


def _suite(study: Study, folder: Path) -> str:
    """Return a sentence about the suite's scores, as the first final run's results name them; ""
    without results.
    """
    runs = [run for candidate in study.candidates for run in finished(candidate.verdict)]
    results = _evaluation(folder / runs[0].folder)[1] if runs else None
    columns = [column for column in text.columns_of_suite(study) if column != text.AVERAGE]
    scores = results["rows"][-1]["scores"] if results and results["rows"] else {}
    if not results or not columns or not all(column in scores for column in columns):
        return ""
    parts = []
    for column in columns:
        metric = results["settings"].get("metrics", {}).get(column, "").split(",")[0]
        chance, number = scores[column].get("chance"), study.num_questions.get(column, 0)
        facts = [metric, *[count(number, "question")] * bool(number)]
        facts += [] if chance is None else [f"{chance:.0f}% by guessing"]
        parts.append(f"{column} ({', '.join(facts)})")
    return f"Scores of the suite {results['title']}: {join_words(parts)}."


def _evaluation(folder: Path) -> tuple[Path | None, Results | None]:
    """Return the folder and the results of a run's evaluation; None of damaged files, which the
    audit reports.
    """
    with suppress(UserError):
        run = RunFolder(folder)
        if options := load_resolved(run.recipe).eval:
            output = run.evaluation(options.name)
            return output, read_results(output)
    return None, None


def matched(study: Study) -> list[Block]:
    """Return the candidates at equal displacement and at equal KL: interpolated along their
    runs.
    """
    begin, name = curves.start(study, "retention_loss"), text.metric_name(study)
    head, rows, names = [""], [[candidate.name] for candidate in study.candidates], []
    for along, label in (("relative_change", "displacement"), ("kl_to_start", "KL")):
        level = curves.common_level(study, along)
        if level is None:
            continue
        names.append(label)
        head += [f"{label} at the end", f"{name} at {label} {level:.3g}"]
        head += [f"rise of the retention loss at {label} {level:.3g}"] if begin is not None else []
        for row, runs in zip(rows, map(curves.shown_runs, study.candidates), strict=True):
            paths = [curves.curve(run, along, "metric") for run in runs]
            ends = [points[-1][0] for points in paths if points]
            row.append(text.metric_text(sum(ends) / len(ends)) if ends else "-")
            # Passed before the first evaluation: a line from the start is far from the curve.
            coarse = (
                " †" if any(len(points) > 1 and level < points[1][0] for points in paths) else ""
            )
            for key, zero in (("metric", 0.0), ("retention_loss", begin)):
                if zero is not None:
                    values = [curves.interpolate(run, along, level, key) for run in runs]
                    row.append(
                        mean_std([value - zero for value in values if value is not None], 3)
                        + coarse
                    )
    if len(head) == 1:
        return []
    note = (
        f"The table has the loss of each run at the point where its {join_words(names, 'or')} first reaches the "
        "value in the column's title, which is the largest value that all runs reach. Displacement is the change "
        "of the weights since the starting checkpoint, ||W - W0|| / ||W0||. If a run ends at a larger value, this "
        "point is in the middle of its schedule, where the learning rate is still high. Its loss would be lower "
        "if its schedule ended there."
    )
    if any("†" in cell for row in rows for cell in row):
        note += (
            " †: reached before the first evaluation. The value lies on a straight line from the start, and a loss "
            "is too high there; to avoid this, evaluate more often (trainer.eval_steps)."
        )
    return [Table(head, rows), Paragraph(note, kind="muted")]


def _costs(study: Study) -> list[Block]:
    """Return times and memory.
    Times of a CPU are compared only between runs that found it about equally loaded.
    """
    loads = curves.cpu_loads(study)
    is_comparable = curves.are_times_comparable(loads)
    rows = []
    for candidate in study.candidates:
        runs = curves.shown_runs(candidate)
        seconds = [run.seconds for run in runs if run.seconds is not None]
        steps = [
            (run.seconds, run.curve[-1].step)
            for run in runs
            if run.seconds and run.curve and run.curve[-1].step
        ]
        peak = max(
            (run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None),
            default=None,
        )
        mean = duration(sum(seconds) / len(seconds) if seconds else None)
        per_step = mean_std([time / num * 1e3 for time, num in steps], 1) if is_comparable else "-"
        total = duration(sum(run.seconds or 0.0 for run in candidate.runs))
        rows.append([candidate.name, mean, per_step, gibibytes(peak), total])
    blocks: list[Block] = [
        Table(["", "time of a run", "ms per step", "peak memory", "all runs together"], rows)
    ]
    if not is_comparable:
        note = f"Times are not compared: the CPU's load was {min(loads):.1f} in one of these runs and {max(loads):.1f}"
        blocks.append(Paragraph(f"{note} in another.", kind="muted"))
    return blocks


def _contamination(study: Study) -> Block | None:
    """Return a row per benchmark: the questions that the training examples contain, and the scores
    without them.
    """
    if not study.contamination:
        return None
    keys = [
        str(key)
        for key in dict.fromkeys(key for each in study.contamination.values() for key in each)
    ]
    keys = [key for key in keys if key != "indices"]
    rows = [
        [name, *(_entry(each.get(key)) for key in keys)]
        for name, each in study.contamination.items()
    ]
    return Table(["", *(CONTAMINATION.get(key, key.replace("_", " ")) for key in keys)], rows)


def _entry(value: Any) -> str:
    """Return an entry of the contamination: a number, or scores by row."""
    if isinstance(value, dict) and {"value", "change"} <= value.keys():
        return f"{value['value']:.1f} ({value['change']:+.1f})"
    if isinstance(value, dict):
        return "\n".join(f"{key} {_entry(each)}" for key, each in value.items())
    if isinstance(value, int | float):
        return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return str(value or "-")


def _runs(study: Study) -> Table:
    """Return every run, of the search and of the verdict, failed ones too."""
    keys = [*dict.fromkeys(key for run in study.runs for key in run.parameters)]
    rows, groups = [], set()
    for candidate in study.candidates:
        groups.add(len(rows))
        for run in candidate.runs:
            status = f"{run.status}, selected" if candidate.is_selected(run) else run.status
            settings = [text.setting(run.parameters.get(key), 4) for key in keys]
            costs = [duration(run.seconds), gibibytes(run.peak_memory_bytes)]
            row = [run.candidate, f"{run.stage} {run.number}", status, str(run.seed), *settings]
            rows.append([*row, text.metric_text(run.metric), *costs, run.reason or ""])
    head = [
        "",
        "run",
        "status",
        "seed",
        *keys,
        text.metric_name(study),
        "time",
        "peak memory",
        "reason",
    ]
    return LongTable(
        head, rows, align="lll" + "r" * (len(head) - 4) + "l", groups=frozenset(groups)
    )


def identities(study: Study) -> list[Block]:
    """Return the hashes and settings that all runs share, and by seed those that differ between
    seeds.
    """
    runs = [run for run in study.runs if run.identity]
    keys = [*dict.fromkeys(key for run in runs for key in run.identity if key not in OWN)]
    shared = [
        key
        for key in keys
        if all(run.identity.get(key) == runs[0].identity.get(key) for run in runs)
    ]
    own = [key for key in keys if key not in shared]
    blocks: list[Block] = []
    if shared:
        rows = [[key.replace("_", " "), _identity(runs[0].identity.get(key))] for key in shared]
        blocks += [
            Paragraph("All runs are equal in the following; long numbers are hashes."),
            Table(["", ""], rows, align="ll"),
        ]
    if own:
        rows = []
        for seed in sorted({run.seed for run in runs}):
            rows.append([str(seed)])
            for key in own:
                names: dict[str, dict[str, None]] = {}  # of the candidates, by value
                for run in (run for run in runs if run.seed == seed):
                    names.setdefault(_identity(run.identity.get(key)), {})[run.candidate] = None
                lines = [f"{join_words([*each])}: {value}" for value, each in names.items()]
                rows[-1].append("\n".join(lines) if len(names) > 1 else next(iter(names)))
        note = (
            "The cells have hashes. A single hash means that all candidates are equal with this seed; otherwise the "
            "cell lists one hash for each candidate. study.json has the complete hashes."
        )
        table = Table(
            ["seed", *(key.replace("_", " ") for key in own)], rows, align="l" * (1 + len(own))
        )
        blocks += [table, Paragraph(note, kind="muted")]
    return blocks


def _identity(value: Any) -> str:
    """Return a hash by its first 16 digits; other values as they are."""
    if isinstance(value, dict):
        return ", ".join(
            f"{key} {_identity(each)}" for key, each in value.items() if each is not None
        )
    if isinstance(value, list):
        return " ".join(map(str, value))
    digits = "not recorded" if value is None else str(value).removeprefix("sha256:")
    return f"{digits[:16]}…" if len(digits) == 64 else digits


def terminal_verdict(study: Study) -> Group:
    """Return the verdict for a terminal of 80 columns: the scores, each comparison, and faults or
    cautions.
    """
    name = Text(study.name, style="bold")
    if study.declaration:
        name.append(f"  declaration {study.declaration[:DIGITS]}", style="dim")
    parts: list[Any] = [name, Text()]
    if study.problems:
        parts.append(Text("No verdict: the runs cannot be compared", style="bold red"))
        parts += [_point(Text(problem, style="red")) for problem in study.problems[:MOST_PROBLEMS]]
        if (more := len(study.problems) - MOST_PROBLEMS) > 0:
            parts.append(Text(f"The report has {count(more, 'further problem')}.", style="red"))
        return Group(*parts)
    if not study.differences:
        parts.append(Text(f"{text.no_verdict(study)}\n"))
    parts += [Text(f"{sentence}\n", style="bold") for sentence in text.headline(study)]
    columns = text.columns_of_suite(study)[:3]
    names = ["start", *(candidate.name for candidate in study.candidates)]
    rows = [[name, *scores] for name, scores in zip(names, _scores(study, columns), strict=True)]
    parts += [Table(["", text.metric_name(study), *columns], rows, signs=SIGNS).rich(), Text()]
    if legend := text.legend(study):
        parts.append(Text(f"{legend}\n", style="dim"))
    for item in (
        item for name in text.references_of(study) for item in text.comparisons(study, name, most=1)
    ):
        parts.append(_point(Text.assemble((item.lead, STYLES[item.kind]), item.text)))
    if study.cautions:
        title = Text("\nHow this conclusion could be wrong", style="bold")
        parts += [title, *(_point(Text(caution)) for caution in study.cautions)]
    return Group(*parts)


def _point(sentence: Text) -> RichTable:
    grid = RichTable.grid(padding=(0, 1))
    sentence.overflow = "fold"
    grid.add_row("-", sentence)
    return grid


def trials_csv(study: Study) -> str:
    """Return a line per run, failed ones too; settings have the column of their recipe key, scores
    `score:` and the suite's column."""
    keys = [*dict.fromkeys(key for run in study.runs for key in run.parameters)]
    columns = [*dict.fromkeys(column for run in study.runs for column in run.scores or {})]
    head = [
        "candidate",
        "stage",
        "number",
        "seed",
        "folder",
        "status",
        "selected",
        *keys,
        "metric",
        "seconds",
    ]
    head += [
        "peak_memory_bytes",
        *LAST,
        *(f"score:{column}" for column in columns),
        "reason",
        "declaration",
    ]
    stream = StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(_safe, head))
    for candidate in study.candidates:
        for run in candidate.runs:
            row = [run.candidate, run.stage, run.number, run.seed, run.folder, run.status]
            row += [
                "yes" if candidate.is_selected(run) else "no",
                *(run.parameters.get(key) for key in keys),
            ]
            row += [run.metric, run.seconds, run.peak_memory_bytes]
            row += [getattr(run.curve[-1], key) if run.curve else None for key in LAST]
            row += [
                *((run.scores or {}).get(column) for column in columns),
                run.reason,
                study.declaration[:DIGITS],
            ]
            writer.writerow(map(_safe, row))
    return stream.getvalue()


def _safe(value: object) -> object:
    """Return a value that no spreadsheet reads as a formula: a text that starts like one gets an
    apostrophe.
    """
    if not isinstance(value, str):
        return value
    printed = printable(value)
    return f"'{printed}" if printed.lstrip().startswith(("=", "+", "-", "@")) else printed
