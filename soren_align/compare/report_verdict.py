"""The first sections of a report: the verdict, the scores with the starting checkpoint's, and every difference."""

from .report_blocks import Alert, Block, Items, Paragraph, Table
from .report_curves import start
from .report_dots import differences_figure
from .report_text import (
    BASE,
    columns_of_suite,
    comparisons,
    count,
    finished,
    headline,
    in_order,
    measure_name,
    measures_of,
    metric_name,
    metric_text,
    no_verdict,
    p_value,
    reference_name,
    references_of,
    seen_size,
    selected_trial,
    setting,
    signed,
    size,
    spread,
)
from .study import Candidate, Difference, Study


def verdict_blocks(study: Study) -> list[Block]:
    """Return the verdict; of a study with faults these instead."""
    if study.problems:
        return [
            Alert("No verdict: the runs cannot be compared", study.problems),
            Paragraph("The figures and tables below show the runs as they are; they do not support a conclusion."),
        ]
    if not study.differences:
        return [Paragraph(no_verdict(study), kind="lead")]
    blocks: list[Block] = [Paragraph(sentence, kind="lead") for sentence in headline(study)]
    for i, name in enumerate(references_of(study)):
        items = Items(comparisons(study, name), f"Against {reference_name(name)}")
        blocks += [items, differences_figure(study, name, f"d{i}x")]
    num = len(study.differences) + sum(d.retained is not None for d in study.differences)
    note = (
        "Intervals are over seeds and questions (of the held-out metric: over seeds). The answers are by p-values"
        f" corrected for {count(num, 'test')} by Holm's method; intervals are not corrected. Positive differences are"
        " better, whatever the measure's direction."
    )
    blocks.append(Paragraph(note, kind="muted"))
    return blocks


def score_blocks(study: Study) -> list[Block]:
    """Return the scores with the starting checkpoint's as the first row, and every difference."""
    base = study.base_scores or {}
    columns = columns_of_suite(study)
    first = [f"{base[c]:.1f}" if c in base else "-" for c in columns]
    rows = [["starting checkpoint", metric_text(start(study, "metric")), *first, "-", ""]]
    for candidate in study.candidates:
        runs = finished(candidate.verdict)
        metrics = spread([run.metric for run in runs if run.metric is not None], 4)
        scores = [spread([run.scores[c] for run in runs if run.scores and c in run.scores], 1) for c in columns]
        rows.append([candidate.name, metrics, *scores, str(len(runs)), _selected(candidate)])
    head = ["", metric_name(study), *columns, "runs", "selected setting"]
    note = "Mean ± standard deviation over the seeds of the verdict; scores in percent."
    blocks: list[Block] = [Table(head, rows, last_text=True), Paragraph(note, kind="muted")]
    return [*blocks, _differences(study)] if study.differences and not study.problems else blocks


def _selected(candidate: Candidate) -> str:
    trial = selected_trial(candidate)
    return "none" if trial is None else "\n".join(f"{key} {setting(value)}" for key, value in trial.parameters.items())


def _differences(study: Study) -> Table:
    """Return a row per comparison, under a row with the measure's name."""
    rows, strong = [], set()
    for measure in measures_of(study):
        strong.add(len(rows))
        rows.append([measure_name(study, measure), *[""] * 6])
        for d in in_order(study, references_of(study)):
            if d.measure == measure:
                reference = "start" if d.reference == BASE else d.reference
                rows.append([f"{d.candidate} - {reference}", d.answer, *_numbers(d)])
    head = ["", "answer", "difference", "95% interval", "Holm's p", "could have seen", "retained"]
    return Table(head, rows, num_text=2, strong=frozenset(strong))


def _numbers(d: Difference) -> list[str]:
    interval = f"[{signed(d.low, d.unit)}, {signed(d.high, d.unit)}]"
    retained = "-"
    if d.retained is not None and d.margin is not None:
        retained = f"{'yes' if d.retained else 'not shown'}, margin {size(d.margin, d.unit)}"
    return [
        signed(d.value, d.unit),
        interval,
        p_value(d.p_holm).removeprefix("p "),
        seen_size(d).removesuffix(" points"),
        retained,
    ]
