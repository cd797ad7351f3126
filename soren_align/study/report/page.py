"""The sections of a report, in the order of a reader's questions: the verdict first, then all that it is made of."""

import json
from pathlib import Path
from typing import Any

from ..study import Candidate, Difference, Run, Study
from .charts import curves_figure, differences_figure, front_figure, sensitivity_figures, spectra_figure, tuning_figure
from .curves import common_level, curve, interpolate, is_coarse, shown_runs, start
from .model import Alert, Block, Code, Item, Items, Page, Paragraph, Section, Table
from .text import (
    BASE,
    columns_of_suite,
    comparisons,
    count,
    duration,
    finished,
    headline,
    in_order,
    is_selected,
    listed,
    measure_name,
    measures_of,
    memory,
    metric_name,
    metric_text,
    no_verdict,
    number,
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


def report_page(study: Study, folder: Path) -> Page:
    """Return the report of a study; spectra are read from its run folders in `folder`, all else from the study."""
    sections = [
        Section("Verdict", verdict_blocks(study)),
        Section("Scores and differences", score_blocks(study)),
        Section("Sensitivity to the settings", [*sensitivity_figures(study), *_edges(study)]),
        Section("Along the runs", [curves_figure(study)]),
        Section("At equal displacement", [front_figure(study), *_matched(study)]),
        Section("How much tuning", [tuning_figure(study)]),
        Section("Spectra", [spectra_figure(study, folder)]),
        Section("Time and memory", [_costs(study)]),
        Section("Contamination", _contamination(study)),
        Section("How this conclusion could be wrong", _cautions(study)),
        Section("Every run", [_runs(study), Paragraph("The same with more columns: trials.csv.", kind="muted")]),
        Section("To repeat it", _repeat(study)),
    ]
    return Page(study.name, _subtitle(study), sections)


def _subtitle(study: Study) -> str:
    """Return the study in one sentence: the recipe, the candidates, their trials, the seeds."""
    trials = [run for candidate in study.candidates for run in candidate.trials]
    ended = [run for run in trials if run.status not in ("waiting", "running")]
    lost = [run for run in ended if run.status != "finished"]
    numbers = sorted({len({run.number for run in candidate.trials}) for candidate in study.candidates})
    each = " or ".join(map(str, numbers)) or "no"
    seeds = sorted({run.seed for candidate in study.candidates for run in candidate.verdict})
    fresh = f"{count(len(seeds), 'fresh seed')} ({', '.join(map(str, seeds))})" if seeds else "no fresh seeds yet"
    without = f", {len(lost)} of them without a result" if lost else ""
    return (
        f"{count(len(study.candidates), 'optimizer')} on {study.file.get('recipe', 'one recipe')}: {each} trials each"
        f" ({len(ended)} of {len(trials)} ended{without}), selected by {metric_name(study)}, then compared on {fresh}."
    )


def _edges(study: Study) -> list[Block]:
    edges = [f"{each.name} {key} ({end})" for each in study.candidates for key, end in each.at_edge.items()]
    if not edges:
        return []
    text = f": {listed(edges)}. A better value may lie outside."
    return [Items([Item("Selected at the end of the searched space", text, "caution")])]


def _matched(study: Study) -> list[Block]:
    """Return the candidates at equal displacement and at equal KL: interpolated along their runs."""
    begin = start(study, "retention_loss")
    head, columns = [""], []
    for along, label in (("relative_change", "displacement"), ("kl_to_start", "KL")):
        level = common_level(study, along)
        if level is None:
            continue
        head += [f"{label} at the end", f"{metric_name(study)} at {label} {level:.3g}"]
        columns.append((along, level, "metric", 0.0))
        if begin is not None:
            head.append(f"rise of the retention loss at {label} {level:.3g}")
            columns.append((along, level, "retention_loss", begin))
    if not columns:
        return [
            Paragraph("No matched comparison: displacement was measured for fewer than two candidates.", kind="muted")
        ]
    rows = [[candidate.name, *_matched_row(shown_runs(candidate), columns)] for candidate in study.candidates]
    note = (
        "Matched: the values where each run first reaches the largest displacement (or KL) that all runs reach. A run"
        " that moves further is seen there before its schedule has ended, with a learning rate that is still high."
    )
    if any("†" in cell for row in rows for cell in row):
        note += (
            " †: reached before the first evaluation, so that the value is on a straight line from the start and too"
            " high for a loss; trainer.eval_steps makes evaluations more frequent."
        )
    return [Table(head, rows), Paragraph(note, kind="muted")]


def _matched_row(runs: list[Run], columns: list[tuple[str, float, str, float]]) -> list[str]:
    cells = []
    for along, level, key, zero in columns:
        if key == "metric":
            ends = [points[-1][0] for run in runs if (points := curve(run, along, key))]
            cells.append(metric_text(sum(ends) / len(ends)) if ends else "-")
        values = [value - zero for run in runs if (value := interpolate(run, along, level, key)) is not None]
        coarse = " †" if any(is_coarse(run, along, level) for run in runs) else ""
        cells.append(f"{spread(values, 4)}{coarse}")
    return cells


def _costs(study: Study) -> Table:
    rows = []
    for candidate in study.candidates:
        runs = shown_runs(candidate)
        seconds = [run.seconds for run in runs if run.seconds is not None]
        per_step = [
            run.seconds / run.curve[-1].step * 1e3 for run in runs if run.seconds and run.curve and run.curve[-1].step
        ]
        peak = max((run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None), default=None)
        total = sum(run.seconds or 0.0 for run in (*candidate.trials, *candidate.verdict))
        mean = duration(sum(seconds) / len(seconds) if seconds else None)
        rows.append([candidate.name, mean, spread(per_step, 1), memory(peak), duration(total)])
    return Table(["", "time of a run", "ms per step", "peak memory", "all runs together"], rows)


def _contamination(study: Study) -> list[Block]:
    """Return a row per benchmark: the questions that the training examples contain, and the scores without them."""
    if not study.contamination:
        return [Paragraph("The overlap of the training examples with the questions was not counted.")]
    keys = [str(key) for key in dict.fromkeys(key for each in study.contamination.values() for key in each)]
    keys = [key for key in keys if key != "indices"]
    rows = [[name, *(_count(each.get(key)) for key in keys)] for name, each in study.contamination.items()]
    return [Table(["", *(_CONTAMINATION.get(key, key.replace("_", " ")) for key in keys)], rows)]


_CONTAMINATION = {"exact": "as a whole", "scores": "scores without these (change)"}


def _count(value: Any) -> str:
    """Return an entry of the contamination: a number, or scores by row."""
    if isinstance(value, dict) and {"value", "change"} <= value.keys():
        return f"{value['value']:.1f} ({value['change']:+.1f})"
    if isinstance(value, dict):
        return "\n".join(f"{key} {_count(each)}" for key, each in value.items())
    return (
        f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value or "-")
    )


def _cautions(study: Study) -> list[Block]:
    items = [Item("", caution, "caution") for caution in study.cautions]
    general = (
        "It holds for this model, these data, this schedule and these search spaces: a longer training, a larger model"
        " or other spaces may order the optimizers differently."
    )
    none = (
        []
        if items
        else [Paragraph("The audit has no cautions: no selected value at an edge, no overlap, enough seeds.")]
    )
    return [*([Items(items)] if items else none), Paragraph(general)]


def _runs(study: Study) -> Table:
    """Return every run, of the search and of the verdict, failed ones too."""
    runs = [(each, run) for each in study.candidates for run in (*each.trials, *each.verdict)]
    keys = [*dict.fromkeys(key for _, run in runs for key in run.parameters)]
    rows, strong = [], set()
    for candidate, run in runs:
        if not rows or rows[-1][0] != run.candidate:
            strong.add(len(rows))
        status = f"{run.status}, selected" if is_selected(candidate, run) else run.status
        values = [setting(run.parameters.get(key), 4) for key in keys]
        cells = [run.candidate, f"{run.stage} {run.number}", status, str(run.seed), *values]
        cells += [
            metric_text(number(run.metric)),
            duration(run.seconds),
            memory(run.peak_memory_bytes),
            run.reason or "",
        ]
        rows.append(cells)
    head = ["", "run", "status", "seed", *keys, metric_name(study), "time", "peak memory", "reason"]
    return Table(head, rows, num_text=3, strong=frozenset(strong), last_text=True, long=True)


def _repeat(study: Study) -> list[Block]:
    versions = ", ".join(f"{name} {version}" for name, version in study.versions.items())
    blocks: list[Block] = [Code(study.command)] if study.command else []
    blocks += [
        Paragraph(text)
        for text in (
            f"Versions: {versions}." if versions else "",
            f"Machine: {study.machine}." if study.machine else "",
        )
        if text
    ]
    blocks += _identities(study)
    return [
        *blocks,
        Code(json.dumps(study.file, indent=1, ensure_ascii=False, default=str), folded="The study's file, resolved"),
    ]


def _identities(study: Study) -> list[Block]:
    """Return the hashes and settings that all runs share, and by seed those that differ between seeds."""
    runs = [run for each in study.candidates for run in (*each.trials, *each.verdict) if run.identity]
    keys = [*dict.fromkeys(key for run in runs for key in run.identity if key not in OWN)]
    shared = {key: _identity(runs[0].identity.get(key)) for key in keys if _is_shared(runs, key)}
    own = [key for key in keys if key not in shared]
    blocks: list[Block] = []
    if shared:
        text = "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in shared.items())
        blocks.append(Paragraph(f"Equal for all runs: {text}."))
    if own:
        rows = [
            [str(seed), *(_at_seed([run for run in runs if run.seed == seed], key) for key in own)]
            for seed in sorted({run.seed for run in runs})
        ]
        note = "Equal for all candidates with a seed, or each one's where they differ; study.json has the whole hashes."
        table = Table(["seed", *(key.replace("_", " ") for key in own)], rows, num_text=1 + len(own))
        blocks += [table, Paragraph(note, kind="muted")]
    return blocks


OWN = ("recipe", "num_batches", "versions")
"""Parts of a run's identity that are not shown: its own recipe, and what stands elsewhere."""


def _is_shared(runs: list[Run], key: str) -> bool:
    return all(run.identity.get(key) == runs[0].identity.get(key) for run in runs)


def _at_seed(runs: list[Run], key: str) -> str:
    """Return the value of all runs with a seed, or of each candidate."""
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(_identity(run.identity.get(key)), []).append(run.candidate)
    if len(names) == 1:
        return next(iter(names))
    return "\n".join(f"{listed([*dict.fromkeys(each)])}: {value}" for value, each in names.items())


def _identity(value: Any) -> str:
    """Return a hash by its first 16 digits; other values as they are."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_identity(each)}" for key, each in value.items() if each is not None)
    if isinstance(value, list):
        return " ".join(map(str, value))
    text = "not recorded" if value is None else str(value).removeprefix("sha256:")
    return f"{text[:16]}…" if len(text) == 64 else text


# ---
# The first sections of a report: the verdict, the scores with the starting checkpoint's, and every difference.


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
