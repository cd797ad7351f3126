"""Write the sentences that the page, its Markdown and the terminal have in common.

The sentences that only the page has stand in its template, sections.j2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ...core.text import duration, join_words, number, p_value
from ..config import ALL_PAIRS, VerdictSection
from ..study import (
    AVERAGE,
    BASE,
    HELD_OUT,
    MANY_EXAMPLES,
    Candidate,
    Difference,
    Study,
    by_number,
    finished,
)

METRICS = {
    "eval_loss": "held-out loss",
    "eval_mean_token_accuracy": "held-out token accuracy",
    "eval_rewards/margins": "held-out margin",
    "eval_rewards/accuracies": "held-out preference accuracy",
}
THAN = {
    "better": "better than",
    "worse": "worse than",
    "equivalent": "equivalent to",
    "not distinguishable": "not distinguishable from",
}
FINER = 0.05
"""The share of an interval from which on the part for settings between those tried is named."""
SIGNS = {"better": " ▲", "worse": " ▼", "equivalent": " ="}
"""The mark after a score, by answer."""


@dataclass(frozen=True)
class Comparison:
    """A candidate against a reference in one sentence, which begins with `lead` in bold."""

    lead: str
    facts: str
    answer: str
    """The answer on the first measure, which colours the sentence."""
    is_better_throughout: bool
    """Whether the candidate is better on every measure, and no margin was tested."""


def rules_of(study: Study) -> VerdictSection:
    """Return the section `verdict` of a study's file."""
    return VerdictSection.model_validate(study.file["verdict"])


def metric_name(study: Study) -> str:
    """Return the selection metric as a reader calls it."""
    metric = str((study.file.get("search") or {}).get("metric", "eval_loss"))
    return METRICS.get(metric, metric)


def measure_name(study: Study, measure: str) -> str:
    """Return a measure's name: the selection metric's, or a column's."""
    return metric_name(study) if measure == HELD_OUT else measure


def reference_name(reference: str) -> str:
    """Return a reference's name; the starting checkpoint's is not that of a candidate."""
    return "the starting checkpoint" if reference == BASE else reference


def measures_of(study: Study) -> list[str]:
    """Return the compared measures: held-out, the average, then the columns as in the suite."""
    names = dict.fromkeys(d.measure for d in study.differences)
    return sorted(names, key=lambda name: (name != HELD_OUT, name != AVERAGE))


def columns_of_suite(study: Study) -> list[str]:
    """Return the columns of the suite: the average first, as the measures are."""
    names = dict.fromkeys(study.base_scores or {})
    for run in study.runs:
        names |= dict.fromkeys(run.scores or {})
    return sorted(names, key=lambda name: name != AVERAGE)


def references_of(study: Study) -> list[str]:
    """Return the references of all differences, as in the study; the starting checkpoint last."""
    names = {d.reference for d in study.differences}
    order = [*(candidate.name for candidate in study.candidates), BASE]
    return [name for name in order if name in names]


def differences_to(study: Study, reference: str) -> list[Difference]:
    """Return the differences to a reference, by measure and then by candidate."""
    measures, names = measures_of(study), [candidate.name for candidate in study.candidates]
    return sorted(
        (d for d in study.differences if d.reference == reference),
        key=lambda d: (measures.index(d.measure), names.index(d.candidate)),
    )


def headline(study: Study) -> list[str]:
    """Return the verdict in one sentence per reference, on the first measure; the first sentence
    begins with what limits all of them. Then which optimizer to take, and what so few runs cannot
    show.
    """
    sentences = []
    limits = _limits(study)
    for reference in references_of(study):
        differences = differences_to(study, reference)
        differences = [d for d in differences if d.measure == differences[0].measure]
        answers, other = [], reference_name(reference)
        for answer, than in THAN.items():
            names = [d.candidate for d in differences if d.answer == answer]
            if len(names) == len(differences) > 4:
                answers.append(f"all {len(names)} candidates are {than} {other}")
            elif names:
                verb = "is" if len(names) == 1 else "are"
                answers.append(f"{join_words(names)} {verb} {than} {other}")
        name = measure_name(study, differences[0].measure)
        sentence = f"On {name}{limits}, {'; '.join(answers)}"
        limits = ""
        unclear = [d for d in differences if d.answer == "not distinguishable"]
        if unclear:
            reasons = dict.fromkeys(resolution(d) for d in unclear)
            sentence += f" ({join_words([*reasons])})"
        sentences.append(f"{sentence}.")
    return [*sentences, *_choice(study), *_rare_failures(study)]


def _limits(study: Study) -> str:
    """Return " of only 40 examples, each optimizer at the best of 5 settings (...)", where these
    limit the verdict.
    """
    number = study.num_questions.get(HELD_OUT, MANY_EXAMPLES)
    text = f" of only {number} examples" if number < MANY_EXAMPLES else ""
    edges = [
        f"{each.name} has the {'largest' if end == 'high' else 'smallest'} {key}"
        for each in study.candidates
        for key, end in each.at_edge.items()
    ]
    settings = max((len(by_number(each.trials)) for each in study.candidates), default=1)
    if settings > 1:
        text += f", each optimizer at the best of {settings} settings"
    return text + (f" ({join_words(edges)})" if edges else "")


def _choice(study: Study) -> Iterator[str]:
    """Yield the answer to "which one do I take?": the best mean, those that are shown to be as good
    within the declared margin, and which of these costs least time. Nothing unless all others were
    compared with the best one.
    """
    ended = [each for each in study.candidates if finished(each.verdict)]
    means = {each.name: fmean(_metrics(each)) for each in ended}
    if len(means) < 2:
        return
    best = (max if study.higher_is_better else min)(means, key=lambda name: means[name])
    compared: dict[str, Difference] = {}
    for d in study.differences:
        if d.measure == HELD_OUT and best in (d.candidate, d.reference) and d.reference != BASE:
            compared[d.reference if d.candidate == best else d.candidate] = d
    if {*compared} != {*means} - {best}:
        return
    margin = next((d.equivalence for d in compared.values()), None)
    equal = [name for name, d in compared.items() if d.is_equivalent]
    unclear = [name for name, d in compared.items() if d.answer == "not distinguishable"]
    sentence = f"Which one to take: {best} has the best {metric_name(study)}"
    if equal and margin is not None:
        verb = "is" if len(equal) == 1 else "are"
        sentence += f"; {join_words(equal)} {verb} as good within {amount(margin, 'loss')}"
    if unclear:
        sentence += f"; {join_words(unclear)} may be as good, which these runs cannot show"
    times = {
        each.name: fmean(seconds)
        for each in ended
        if each.name in (best, *equal)
        and (seconds := [run.seconds for run in each.verdict if run.seconds])
    }
    if equal and len(times) == len(equal) + 1:
        first, *_ = sorted(times, key=lambda name: times[name])
        sentence += f". Of these, {first} took the least time: {duration(times[first])} a run"
    yield f"{sentence}."


def _rare_failures(study: Study) -> Iterator[str]:
    """Yield what the number of runs cannot exclude: a failure of probability q is missing in n runs
    with probability (1 - q)^n, which is 5% at 1 - 0.05^(1 / n).
    """
    ended = [each for each in study.candidates if finished(each.verdict)]
    if not ended or not study.differences:
        return
    runs = min(len(finished(each.verdict)) for each in ended)
    yield (
        f"With {runs} runs of each, a failure that occurs in up to {1 - 0.05 ** (1 / runs):.0%} of"
        " an optimizer's runs may be missing from these, and would change its mean: the answers"
        " hold for runs like these."
    )


def _metrics(candidate: Candidate) -> list[float]:
    """Return the metric of each final run that has one."""
    return [run.metric for run in finished(candidate.verdict) if run.metric is not None]


def _worst(study: Study, name: str) -> str:
    """Return the worst metric of a candidate's final runs."""
    metrics = next(_metrics(each) for each in study.candidates if each.name == name)
    return metric_text((min if study.higher_is_better else max)(metrics))


def comparisons(study: Study, reference: str) -> list[Comparison]:
    """Return a sentence for each candidate compared with a reference."""
    differences = differences_to(study, reference)
    return [
        _comparison(study, [d for d in differences if d.candidate == candidate])
        for candidate in dict.fromkeys(d.candidate for d in differences)
    ]


def _comparison(study: Study, differences: Sequence[Difference]) -> Comparison:
    """Return a candidate's answers on all measures, then the numbers of the first measure."""
    first, answers = differences[0], []
    other = reference_name(first.reference)
    for answer, than in THAN.items():
        measures = [measure_name(study, d.measure) for d in differences if d.answer == answer]
        if len(measures) == len(differences) > 2:
            answers.append(f"{than} {other} on all {len(measures)} measures")
        elif measures:
            answers.append(f"{than} {other} on {join_words(measures)}")
            other = "it"
    # The first measure's numbers; the table of differences has those of the others.
    facts = f"95% interval {_interval(study, first)}"
    if first.finer > FINER * (first.high - first.low):
        part = amount(first.finer, first.unit)
        facts += f", of which up to {part} for settings between those tried"
    facts += f", corrected {p_value(first.p_holm)}"
    if first.is_equivalent and first.equivalence is not None:
        facts += f"; equivalent within {amount(first.equivalence, first.unit)}"
    elif first.answer == "not distinguishable":
        facts += f"; {resolution(first)}"
    if first.measure == HELD_OUT:
        facts += f"; worst run {_worst(study, first.candidate)}"
        if first.reference != BASE:
            facts += f", {first.reference}'s {_worst(study, first.reference)}"
    name = measure_name(study, first.measure)
    value = f"{amount(abs(first.value), first.unit)} {_direction(study, first, first.value)}"
    facts = f": its {name} is {value} ({facts})."
    # A test of its own, which is stated for every measure that has a margin.
    for d in differences:
        if d.margin is not None and d.retained is not None:
            shown = "is shown" if d.retained else "is not shown"
            margin = f"the margin of {amount(d.margin, d.unit)}"
            facts += f" It {shown} to lose less than {margin} on {measure_name(study, d.measure)}."
    throughout = all(d.answer == "better" and d.margin is None for d in differences)
    lead = f"{first.candidate} is {join_words(answers)}"
    return Comparison(lead, facts, first.answer, throughout)


def _interval(study: Study, d: Difference) -> str:
    """Return an interval without signs: "0.42 to 0.67", "0.1 higher to 0.2 lower"."""
    ends = sorted((d.low, d.high), reverse=d.value < 0)
    if d.low * d.high > 0:
        return " to ".join(size(abs(end), d.unit) for end in ends)
    return " to ".join(f"{size(abs(end), d.unit)} {_direction(study, d, end)}" for end in ends)


def _direction(study: Study, d: Difference, value: float) -> str:
    """Return the direction in which a measure changed. value: positive where better."""
    is_higher = (value > 0) == (d.unit == "percent" or study.higher_is_better)
    return "higher" if is_higher else "lower"


def resolution(d: Difference) -> str:
    """Return why a difference is open: what the study can detect."""
    if d.detectable is None:
        return "the seeds gave identical results, which shows no spread"
    return f"detectable: {detectable(d)}"


def detectable(d: Difference) -> str:
    """Return the difference that a study can detect; of percent points there are 100."""
    if d.detectable is None or (d.unit == "percent" and d.detectable > 100):
        return "none"
    return amount(d.detectable, d.unit)


def sign(study: Study, candidate: str, measure: str) -> str:
    """Return the sign of a candidate's answer against the only reference on one measure."""
    compared = (candidate, _only_reference(study), measure)
    for d in study.differences:
        if (d.candidate, d.reference, d.measure) == compared:
            return SIGNS.get(d.answer, "")
    return ""


def legend(study: Study) -> str:
    """Return what the signs mean; empty without a verdict, or with several references."""
    reference = _only_reference(study)
    if reference is None:
        return ""
    # Signs against several references would look alike.
    signs = [f"▲ better than {reference}", "▼ worse"]
    if rules_of(study).equivalence:
        signs.append("= equivalent")
    meaning = f"{', '.join(signs)}; values without a sign: not distinguishable."
    others = [*dict.fromkeys(d.candidate for d in study.differences if d.reference == reference)]
    if len(others) > 1 and rules_of(study).reference != ALL_PAIRS:
        meaning += f" Not compared with one another: {join_words(others)}."
    return meaning


def _only_reference(study: Study) -> str | None:
    """Return the candidate that all others are compared with: of all pairs, the first one. None
    with problems.
    """
    references = references_of(study)
    return references[0] if references[:1] != [BASE] and references and not study.problems else None


def no_verdict(study: Study) -> str:
    """Return the reason why a study without faults has no verdict."""
    runs = [run for candidate in study.candidates for run in candidate.verdict]
    unfinished = [run for run in runs if run.status in ("waiting", "running")]
    without = [candidate.name for candidate in study.candidates if candidate.selected is None]
    if without:
        return f"There is no verdict: no trial of {join_words(without)} finished."
    if unfinished or not runs:
        num = len(unfinished) or "all"
        return f"There is no verdict yet: {num} runs of the verdict are not finished."
    if len(study.candidates) < 2:
        return "There is no verdict, because the study has only one candidate."
    return "There is no verdict: the runs were not compared."


def size(value: float, unit: str) -> str:
    """Return a difference without a plus sign, with the decimals of `signed_size`."""
    return signed_size(value, unit).removeprefix("+")


def signed_size(value: float, unit: str) -> str:
    """Return a difference: one decimal of percent points; of a loss three, below 0.01 four."""
    decimals = 1 if unit == "percent" else 3 if abs(value) >= 0.01 else 4
    return f"{value + 0.0:+.{decimals}f}"  # 0.0: no negative zero


def amount(value: float, unit: str) -> str:
    """Return a difference with its unit: "0.545", "3.2 points"."""
    return f"{size(value, unit)} points" if unit == "percent" else size(value, unit)


def metric_text(value: float | None) -> str:
    """Return a value of the selection metric, a loss or a score."""
    return number(value, ".3f")


def setting(value: Any, digits: int = 3) -> str:
    """Return the value of a searched key: a number, or a word such as a map's name."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.{digits}g}"
    return "-" if value is None else str(value)
