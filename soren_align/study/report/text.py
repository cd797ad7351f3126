"""Write the sentences of a report for the page, for Markdown and for the terminal."""

from collections.abc import Iterable
from typing import Any

from ...core.text import count, join_words, number, p_value
from ...run.provenance import DIGITS
from ..config import VerdictSection
from ..study import AVERAGE, BASE, HELD_OUT, Difference, Study
from .blocks import Item

_METRICS = {
    "eval_loss": "held-out loss",
    "eval_mean_token_accuracy": "held-out token accuracy",
    "eval_rewards/margins": "held-out margin",
    "eval_rewards/accuracies": "held-out preference accuracy",
}
POINTS = {"loss": "", "percent": " points"}
"""By the unit of a difference."""
THAN = {
    "better": "better than",
    "worse": "worse than",
    "equivalent": "equivalent to",
    "not distinguishable": "not distinguishable from",
}
SIGNS = {"better": " ▲", "worse": " ▼", "equivalent": " ="}
"""By answer, after a score."""


def rules_of(study: Study) -> VerdictSection:
    """Return the section `verdict` of a study's file."""
    return VerdictSection.model_validate(study.file["verdict"])


def metric_name(study: Study) -> str:
    """Return the selection metric as a reader calls it."""
    metric = str((study.file.get("search") or {}).get("metric", "eval_loss"))
    return _METRICS.get(metric, metric)


def measure_name(study: Study, measure: str) -> str:
    """Return a measure's name: the selection metric's, or a column's."""
    return metric_name(study) if measure == HELD_OUT else measure


def reference_name(reference: str) -> str:
    """Return a reference's name; the starting checkpoint's is not that of a candidate."""
    return "the starting checkpoint" if reference == BASE else reference


def measures_of(study: Study) -> list[str]:
    """Return the compared measures: held-out first, then the average, then the columns in the
    suite's order.
    """
    names = dict.fromkeys(d.measure for d in study.differences)
    return sorted(names, key=lambda name: (name != HELD_OUT, name != AVERAGE))


def columns_of_suite(study: Study) -> list[str]:
    """Return the columns of the suite: the average first, as the measures are."""
    names = dict.fromkeys(study.base_scores or {})
    for run in study.runs:
        names |= dict.fromkeys(run.scores or {})
    return sorted(names, key=lambda name: name != AVERAGE)


def references_of(study: Study) -> list[str]:
    """Return the references of all differences: the candidates in the study's order, then the
    starting checkpoint.
    """
    names = {d.reference for d in study.differences}
    return [
        name
        for name in (*(candidate.name for candidate in study.candidates), BASE)
        if name in names
    ]


def in_order(study: Study, references: Iterable[str]) -> list[Difference]:
    """Return the differences to these references: by reference, measure and candidate."""
    measures, names = measures_of(study), [candidate.name for candidate in study.candidates]
    order = {reference: place for place, reference in enumerate(references)}
    chosen = [d for d in study.differences if d.reference in order]
    return sorted(
        chosen,
        key=lambda d: (order[d.reference], measures.index(d.measure), names.index(d.candidate)),
    )


def comparisons(study: Study, reference: str, *, most: int | None = None) -> list[Item]:
    """Return a sentence for each candidate compared with a reference: the answers by measure, then
    the numbers.

    most: so many measures have numbers. Of a difference that is open, they end with the one that
    could be detected.
    """
    differences, items = in_order(study, [reference]), []
    for candidate in dict.fromkeys(d.candidate for d in differences):
        own = [d for d in differences if d.candidate == candidate]
        answers, numbers, retained = [], [], ""
        for answer, than in THAN.items():
            measures = [measure_name(study, d.measure) for d in own if d.answer == answer]
            if measures:
                all_of_them = (
                    f"all {len(measures)} measures" if len(measures) == len(own) > 2 else None
                )
                other = "it" if answers else reference_name(reference)
                answers.append(f"{than} {other} on {all_of_them or join_words(measures)}")
        for i, d in enumerate(own):
            name, points = measure_name(study, d.measure), POINTS[d.unit]
            seen = f"; {resolution(study, d)}" if d.answer == "not distinguishable" else ""
            if d.is_equivalent and d.equivalence is not None:
                seen = f"; equivalent within {size(d.equivalence, d.unit)}{points}"
            # In the words of `change`: "0.420 to 0.671", or "0.1 higher to 0.2 lower".
            ends = sorted((d.low, d.high), reverse=d.value < 0)
            words = [
                "" if d.low * d.high > 0 else f" {_direction(study, d.unit, end)}" for end in ends
            ]
            bounds = " to ".join(
                f"{size(abs(end), d.unit)}{word}" for end, word in zip(ends, words, strict=True)
            )
            interval = f"{'' if i else '95% interval '}{bounds}"
            facts = f"{interval}, corrected {p_value(d.p_holm)}{seen}"
            numbers.append(f"{'its ' * (not i)}{name} is {change(study, d)} ({facts})")
            if d.margin is not None and d.retained is not None:
                shown = "is shown" if d.retained else "is not shown"
                retained += f" It {shown} to lose less than the margin of {size(d.margin, d.unit)}{points} on {name}."
        kind = "open" if own[0].answer == "not distinguishable" else own[0].answer
        items.append(
            Item(
                f"{candidate} is {join_words(answers)}",
                f": {'; '.join(numbers[:most])}.{retained}",
                kind,
            )
        )
    return items


def change(study: Study, d: Difference) -> str:
    """Return a difference in words: "0.545 lower", "3.2 points higher"."""
    return f"{size(abs(d.value), d.unit)}{POINTS[d.unit]} {_direction(study, d.unit, d.value)}"


def _direction(study: Study, unit: str, value: float) -> str:
    """Return the direction in which a measure changed. value: positive where better."""
    is_higher = (value > 0) == (unit == "percent" or study.higher_is_better)
    return "higher" if is_higher else "lower"


def headline(study: Study) -> list[str]:
    """Return the verdict in a sentence per reference: the first measure against it, and against the
    start.
    """
    sentences = []
    for reference in references_of(study):
        differences = in_order(study, [reference])
        differences = [d for d in differences if d.measure == differences[0].measure]
        answers = []
        for answer, than in THAN.items():
            names = [d.candidate for d in differences if d.answer == answer]
            if names:
                all_of_them = (
                    f"all {len(names)} candidates" if len(names) == len(differences) > 4 else None
                )
                verb = "is" if len(names) == 1 else "are"
                answers.append(
                    f"{all_of_them or join_words(names)} {verb} {than} {reference_name(reference)}"
                )
        open_ones = [d for d in differences if d.answer == "not distinguishable"]
        seen = (
            f" ({join_words([*dict.fromkeys(resolution(study, d) for d in open_ones)])})"
            if open_ones
            else ""
        )
        sentences.append(
            f"On {measure_name(study, differences[0].measure)}, {'; '.join(answers)}{seen}."
        )
    return sentences


def sign(study: Study, candidate: str, measure: str) -> str:
    """Return the sign of a candidate's answer against the reference on one measure; none against
    several references.
    """
    compared = (candidate, _only_reference(study), measure)
    answers = (
        d.answer for d in study.differences if (d.candidate, d.reference, d.measure) == compared
    )
    return SIGNS.get(next(answers, ""), "")


def legend(study: Study) -> str:
    """Return what the signs mean; empty without a verdict, or with several references."""
    reference = _only_reference(study)
    if reference is None:
        return ""
    equivalent = ", = equivalent" if rules_of(study).equivalence else ""
    signs = f"▲ better than {reference}, ▼ worse{equivalent}; values without a sign: not distinguishable."
    others = [*dict.fromkeys(d.candidate for d in study.differences if d.reference == reference)]
    return (
        f"{signs} Not compared with one another: {join_words(others)}."
        if len(others) > 1
        else signs
    )


def _only_reference(study: Study) -> str | None:
    """Return the candidate that all others are compared with; None without a verdict, or with
    several references.
    """
    references = {d.reference for d in study.differences} - {BASE}
    return references.pop() if len(references) == 1 and not study.problems else None


def no_verdict(study: Study) -> str:
    """Return the reason why a study without faults has no verdict."""
    runs = [run for candidate in study.candidates for run in candidate.verdict]
    unfinished = [run for run in runs if run.status in ("waiting", "running")]
    without = [candidate.name for candidate in study.candidates if candidate.selected is None]
    if without:
        return f"There is no verdict: no trial of {join_words(without)} finished."
    if unfinished or not runs:
        return f"There is no verdict yet: {len(unfinished) or 'all'} runs of the verdict are not finished."
    if len(study.candidates) < 2:
        return "There is no verdict, because the study has only one candidate."
    return "There is no verdict: the runs were not compared."


def subtitle(study: Study) -> str:
    """Return the study in one sentence: the recipe, the candidates, their trials, the seeds."""
    trials = [run for candidate in study.candidates for run in candidate.trials]
    ended = [run for run in trials if run.status not in ("waiting", "running")]
    lost = sum(run.status != "finished" for run in ended)
    numbers = sorted(
        {len({run.number for run in candidate.trials}) for candidate in study.candidates}
    )
    each = " or ".join(map(str, numbers)) or "no"
    searched = {run.seed for run in trials}
    with_seeds = f" with {len(searched)} seeds" if len(searched) > 1 else ""
    seeds = sorted({run.seed for candidate in study.candidates for run in candidate.verdict})
    fresh = (
        f"{count(len(seeds), 'fresh seed')} ({', '.join(map(str, seeds))})"
        if seeds
        else "no fresh seeds yet"
    )
    without = f", {lost} of them without a result" if lost else ""
    recipe = study.file.get("recipe", "one recipe")
    steps = {run.curve[-1].step for run in study.runs if run.status == "finished" and run.curve}
    length = f", {count(max(steps), 'step')} per run" if len(steps) == 1 else ""
    digits = study.declaration[:DIGITS]
    declared = f" The study was declared before its first run (hash {digits})." if digits else ""
    best = f"{'highest' if study.higher_is_better else 'lowest'} {'mean ' * bool(with_seeds)}{metric_name(study)}"
    return (
        f"{count(len(study.candidates), 'optimizer')} with the recipe {recipe}{length}. Search: {each} settings of "
        f"each optimizer{with_seeds} ({len(ended)} of {len(trials)} runs ended{without}); each optimizer's setting "
        f"with the {best} is selected. Final runs: the selected settings with {fresh}, judged on other held-out "
        f"examples.{declared}"
    )


def size(value: float, unit: str) -> str:
    """Return a difference without a plus sign: one decimal of percent points; of a loss three,
    below 0.01 four.
    """
    return signed_size(value, unit).removeprefix("+")


def signed_size(value: float, unit: str) -> str:
    """Return a difference with its sign and the decimals of `size`."""
    decimals = 1 if unit == "percent" else 3 if abs(value) >= 0.01 else 4
    return f"{value + 0.0:+.{decimals}f}"  # 0.0: no negative zero


def seen_size(d: Difference) -> str:
    """Return the difference that a study can detect; of percent points there are 100."""
    if d.detectable is None or (d.unit == "percent" and d.detectable > 100):
        return "none"
    return f"{size(d.detectable, d.unit)}{POINTS[d.unit]}"


def resolution(study: Study, d: Difference) -> str:
    """Return why a difference is open: what the study can detect, or that the seeds differ too
    much.

    The seeds differ too much where they cause most of the variance, and the study cannot detect a
    difference as large as what the training changed.
    """
    if d.detectable is None:
        return "the seeds gave identical results, which shows no spread"
    to_base = [e for e in study.differences if (e.reference, e.measure) == (BASE, d.measure)]
    changes = [abs(e.value) for e in to_base if e.candidate in (d.candidate, d.reference)]
    if d.seed_share > 0.5 and d.detectable > max(changes, default=float("inf")):
        return f"too noisy to decide: {d.noisiest}'s seeds differ by {size(d.seed_range, d.unit)}{POINTS[d.unit]}"
    return f"detectable: {seen_size(d)}"


def metric_text(value: float | None) -> str:
    """Return a value of the selection metric, a loss or a score."""
    return number(value, ".3f")


def setting(value: Any, digits: int = 3) -> str:
    """Return the value of a searched key: a number, or a word such as a map's name."""
    if value is None:
        return "-"
    return (
        f"{value:.{digits}g}"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else str(value)
    )
