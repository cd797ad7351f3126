"""Sentences and numbers of a report, the same in the page, in Markdown and in the terminal."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..study import Candidate, Difference, Run, Study
from .model import Item

BASE = "base"
"""As a reference: the starting checkpoint."""
_METRICS = {
    "eval_loss": "held-out loss",
    "eval_mean_token_accuracy": "held-out token accuracy",
    "eval_rewards/margins": "held-out margin",
    "eval_rewards/accuracies": "held-out preference accuracy",
}


def metric_name(study: Study) -> str:
    """Return the selection metric as a reader calls it."""
    metric = str((study.file.get("search") or {}).get("metric", "eval_loss"))
    return _METRICS.get(metric, metric)


def measure_name(study: Study, measure: str) -> str:
    """Return a measure's name: the selection metric's, or a column's."""
    return metric_name(study) if measure == "held-out" else measure


def reference_name(reference: str) -> str:
    """Return a reference's name; the starting checkpoint's is not that of a candidate."""
    return "the starting checkpoint" if reference == BASE else reference


def power_of(study: Study) -> float:
    """Return the power at which a difference counts as detectable."""
    return float((study.file.get("verdict") or {}).get("power", 0.8))


def measures_of(study: Study) -> list[str]:
    """Return the compared measures: held-out first, then the average, then the columns in the suite's order."""
    names = dict.fromkeys(d.measure for d in study.differences)
    first = [name for name in ("held-out", "average") if name in names]
    return [*first, *(name for name in names if name not in first)]


def columns_of_suite(study: Study) -> list[str]:
    """Return the columns of the suite: the average first, as the measures are."""
    names = dict.fromkeys(study.base_scores or {})
    for candidate in study.candidates:
        for run in candidate.verdict:
            names |= dict.fromkeys(run.scores or {})
    return sorted(names, key=lambda name: name != "average")


def references_of(study: Study) -> list[str]:
    """Return the references of all differences: the candidates in the study's order, then the starting checkpoint."""
    names = {d.reference for d in study.differences}
    ordered = [*(candidate.name for candidate in study.candidates), BASE]
    return [name for name in ordered if name in names]


def in_order(study: Study, references: Iterable[str]) -> list[Difference]:
    """Return the differences to these references: by reference, measure and candidate."""
    measures, names = measures_of(study), [candidate.name for candidate in study.candidates]
    order = {reference: place for place, reference in enumerate(references)}
    chosen = [d for d in study.differences if d.reference in order]
    return sorted(chosen, key=lambda d: (order[d.reference], measures.index(d.measure), names.index(d.candidate)))


def comparisons(study: Study, reference: str, *, most: int | None = None) -> list[Item]:
    """Return a sentence for each candidate compared with a reference: the answers by measure, then the numbers.

    most: so many measures have numbers.
    """
    by_candidate: dict[str, list[Difference]] = {}
    for d in in_order(study, [reference]):
        by_candidate.setdefault(d.candidate, []).append(d)
    return [_comparison(study, each, most) for each in by_candidate.values()]


def _comparison(study: Study, differences: Sequence[Difference], most: int | None) -> Item:
    first = differences[0]
    reference = reference_name(first.reference)
    parts = []
    for answer in ("better", "worse", "not distinguishable"):
        measures = [measure_name(study, d.measure) for d in differences if d.answer == answer]
        if measures:
            where = f"all {len(measures)} measures" if len(measures) == len(differences) > 2 else listed(measures)
            parts.append(f"{answer} {_than(answer)} {'it' if parts else reference} on {where}")
    numbers = "; ".join(
        (f"{measure_name(study, d.measure)} " if len(differences) > 1 else "") + _numbers(study, d, first=d is first)
        for d in differences[:most]
    )
    kind = "open" if first.answer == "not distinguishable" else first.answer
    text = f": {numbers}.{''.join(_retention(study, d) for d in differences)}"
    return Item(f"{first.candidate} is {listed(parts)}", text, kind)


def _than(answer: str) -> str:
    return "from" if answer == "not distinguishable" else "than"


def _numbers(study: Study, d: Difference, *, first: bool) -> str:
    """Return a difference with its interval and p; of one that is open, the difference that could be seen."""
    unit = _points(d.unit)
    seen = ""
    if d.answer == "not distinguishable":
        whose, power = ("this study ", f" with {power_of(study):.0%} power") if first else ("", "")
        seen = f"; {whose}could have seen {seen_size(d)}{power}"
    interval = f"{'95% interval ' if first else ''}{signed(d.low, d.unit)} to {signed(d.high, d.unit)}"
    return f"{signed(d.value, d.unit)}{unit} ({interval}, {p_value(d.p_holm)}{seen})"


def _retention(study: Study, d: Difference) -> str:
    if d.margin is None or d.retained is None:
        return ""
    name, margin = measure_name(study, d.measure), f"{size(d.margin, d.unit)}{_points(d.unit)}"
    shown = "It is shown" if d.retained else "It is not shown"
    return f" {shown} to lose less than the margin of {margin} on {name}."


def headline(study: Study) -> list[str]:
    """Return the verdict in a sentence per reference: the first measure against it, and against the start."""
    sentences = []
    for reference in references_of(study):
        differences = in_order(study, [reference])
        measure = differences[0].measure
        sentences.append(_answers(study, measure, [d for d in differences if d.measure == measure]))
    return sentences


def _answers(study: Study, measure: str, differences: Sequence[Difference]) -> str:
    """Return one sentence for all candidates compared with one reference on one measure."""
    reference = reference_name(differences[0].reference)
    parts = []
    for answer in ("better", "worse", "not distinguishable"):
        names = [d.candidate for d in differences if d.answer == answer]
        if names:
            verb = "is" if len(names) == 1 else "are"
            who = f"all {len(names)} candidates" if len(names) == len(differences) > 4 else listed(names)
            parts.append(f"{who} {verb} {answer} {_than(answer)} {reference}")
    unseen = [d.detectable for d in differences if d.answer == "not distinguishable"]
    seen = ""
    if unseen:
        unit, low, high = differences[0].unit, min(unseen), max(unseen)
        words = size(high, unit) if size(low, unit) == size(high, unit) else f"{size(low, unit)} to {size(high, unit)}"
        seen = f", and this study could have seen a difference of {words}{_points(unit)}"
    return f"On {measure_name(study, measure)}, {'; '.join(parts)}{seen}."


def no_verdict(study: Study) -> str:
    """Return the reason why a study without faults has no verdict."""
    runs = [run for candidate in study.candidates for run in candidate.verdict]
    unfinished = [run for run in runs if run.status in ("waiting", "running")]
    without = [candidate.name for candidate in study.candidates if candidate.selected is None]
    if without:
        return f"There is no verdict: no trial of {listed(without)} finished."
    if unfinished or not runs:
        return f"There is no verdict yet: {len(unfinished) or 'all'} runs of the verdict are not finished."
    if len(study.candidates) < 2:
        return "There is no verdict: one candidate has nothing to be compared with."
    return "There is no verdict: the runs were not compared."


def listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 trial`, `6 trials`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(value: float, unit: str) -> str:
    """Return a difference without a plus sign: one decimal of percent points, four of a loss."""
    decimals = 4 if unit == "loss" else 1
    return f"{value + 0.0:.{decimals}f}"


def seen_size(d: Difference) -> str:
    """Return the difference that a study could have seen; of percent points there are 100."""
    if d.unit == "percent" and d.detectable > 100:
        return "none"
    return f"{size(d.detectable, d.unit)}{_points(d.unit)}"


def signed(value: float, unit: str) -> str:
    """Return a difference with its sign."""
    text = size(value, unit)
    return text if text.startswith("-") else f"+{text}"


def _points(unit: str) -> str:
    return " points" if unit == "percent" else ""


def p_value(p: float) -> str:
    """Return a corrected p-value."""
    return "p < 0.001" if p < 0.001 else f"p {p:.3f}"


def metric_text(value: float | None) -> str:
    """Return a value of the selection metric, a loss or a score."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4f}"


def setting(value: Any, digits: int = 3) -> str:
    """Return the value of a searched key: a number, or a word such as a map's name."""
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def spread(values: Sequence[float], decimals: int) -> str:
    """Return the mean and, of several values, their standard deviation."""
    if not values:
        return "-"
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.{decimals}f}"
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return f"{mean:.{decimals}f} ± {deviation:.{decimals}f}"


def duration(seconds: float | None) -> str:
    """Return a time in its natural unit."""
    if seconds is None:
        return "-"
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def memory(num_bytes: int | None) -> str:
    """Return an amount of memory in GiB."""
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"


def finished(runs: Iterable[Run]) -> list[Run]:
    """Return the runs that have a result."""
    return [run for run in runs if run.status == "finished" and number(run.metric) is not None]


def number(value: float | None) -> float | None:
    """Return a finite number, or None."""
    return value if value is not None and math.isfinite(value) else None


def is_selected(candidate: Candidate, run: Run) -> bool:
    """Whether a run is one of the trial whose setting the verdict's runs have."""
    return run.stage == "search" and run.number == candidate.selected


def selected_trial(candidate: Candidate) -> Run | None:
    """Return the selected trial; of one with several seeds, its first run."""
    return next((run for run in candidate.trials if is_selected(candidate, run)), None)
