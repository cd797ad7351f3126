"""The effort behind a result: how sharp a search is, and how soon runs reach the final metric of
the reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.text import Table, count, number
from ..config import ALL_PAIRS
from ..study import Candidate, Study, by_number, finished
from ..tuning import MIN_SEARCH_SEEDS, NEAR, RATE, Reading, Tuning, tuning
from . import curves, text
from .blocks import Block, Item, Items, Paragraph

MOST_RATES = 3
"""Of resampled searches: the rates that are shown."""


@dataclass(frozen=True, order=True)
class Time:
    """Steps or seconds until a metric is reached, or those of a run that has not reached it, the
    longest of all.
    """

    is_longer: bool
    """Not reached: the true time is longer than `value`."""
    value: float


@dataclass(frozen=True)
class TargetTimes:
    """The times of a candidate's runs to the reference's final metric, one per seed; shares: of the
    reference's own.
    """

    steps: list[Time]
    step_shares: list[Time]
    seconds: list[Time]
    second_shares: list[Time]


def tuning_blocks(study: Study) -> list[Block]:
    """Return a row per candidate about its search, without the columns that no candidate fills."""
    tunings = [
        tuning(candidate, higher_is_better=study.higher_is_better) for candidate in study.candidates
    ]
    tunings = [each for each in tunings if each is not None]
    metric = text.metric_name(study)
    readings = [each for tuned in tunings for each in (tuned.half, tuned.twice) if each]
    meanings = {
        "not tried": "no trials lie on both sides of this rate",
        "no result": "a neighbouring trial diverged or failed",
    }
    present = [reason for reason in meanings if any(each.reason == reason for each in readings)]
    reasons = "".join(
        f' "{reason.capitalize()}" means that {meanings[reason]}.' for reason in present
    )
    columns: list[tuple[str, Callable[[Tuning], str], str]] = [
        ("", lambda each: each.candidate.name, ""),
        (f"selected {RATE}", lambda each: text.setting(each.rate), ""),
        (
            "at an edge",
            lambda each: each.candidate.at_edge.get(RATE, "no") if each.rate else "-",
            "",
        ),
        (metric, lambda each: text.metric_text(each.metric), ""),
        ("at half", lambda each: _reading(each.half), ""),
        (
            "at twice",
            lambda each: _reading(each.twice),
            f"At half and at twice the selected {RATE}, the {metric} is interpolated between trials, on a "
            f"logarithmic axis.{reasons}",
        ),
        (
            "interpolated optimum",
            lambda each: (
                f"{each.optimum.rate:.3g}, gain {each.optimum.gain:.3f}" if each.optimum else "-"
            ),
            "The interpolated optimum is the vertex of a parabola through the selected trial and its neighbours. The "
            f"gain is the estimated improvement of the {metric} from the selected trial to this optimum. No run has "
            "measured it, and it is overestimated if one neighbour is much worse than the other.",
        ),
        (
            f"trials within {NEAR:.0%}",
            lambda each: f"{each.num_near} of {each.num_trials}",
            f"The narrower the search space, the more trials are within {NEAR:.0%} of the best {metric}.",
        ),
        (
            "selected again",
            _selected_again,
            "Selected again: the seeds of the trials are resampled with replacement, and each sample selects the "
            "setting that is best in it; the cells have the share of the samples that select a setting.",
        ),
        (
            "selection sd",
            lambda each: number(each.selection.variance**0.5, ".4f") if each.selection else "-",
            f"Selection sd: each sample's selected setting has its mean {metric} over all seeds of the search; this is "
            "the standard deviation of these values over the samples.",
        ),
    ]
    columns = [column for column in columns if any(column[1](each) != "-" for each in tunings)]
    if not columns:
        return []
    note = " ".join(sentence for _, _, sentence in columns if sentence)
    if not any(each.selection for each in tunings):
        seeds = count(len((study.file.get("search") or {}).get("seeds") or [0]), "seed")
        note += f" The search has {seeds}; {MIN_SEARCH_SEEDS} or more seeds would show how the selection varies."
    rows = [[cell(each) for _, cell, _ in columns] for each in tunings]
    return [Table([heading for heading, _, _ in columns], rows), Paragraph(note, kind="muted")]


def _reading(reading: Reading | None) -> str:
    if reading is None:
        return "-"
    return reading.reason or text.metric_text(reading.metric)


def _selected_again(each: Tuning) -> str:
    """Return the most frequent selections: their rates, or of equal rates the share of the selected
    trial.
    """
    if each.selection is None:
        return "-"
    rates = {run.number: run.parameters.get(RATE) for run in each.candidate.trials}
    if len({*rates.values()}) < len(rates):
        return f"{each.selection.shares.get(each.candidate.selected or 0, 0.0):.0%}"
    shown = [*each.selection.shares.items()][:MOST_RATES]
    return "\n".join(f"{text.setting(rates[trial])} in {share:.0%}" for trial, share in shown)


def target_blocks(study: Study) -> list[Block]:
    """Return how soon the runs of each candidate reach the reference's final metric at their
    seed.
    """
    names = {candidate.name: candidate for candidate in study.candidates}
    declared = (study.file.get("verdict") or {}).get("reference", ALL_PAIRS)
    reference = names.get(declared) or next(iter(names.values()), None)
    if study.problems or reference is None:
        return []
    times = {
        candidate.name: target_times(candidate, reference, higher_is_better=study.higher_is_better)
        for candidate in (reference, *(each for each in study.candidates if each is not reference))
    }
    times = {name: each for name, each in times.items() if each.steps}
    if len(times) < 2:
        return []
    metric = text.metric_name(study)
    target = f"{reference.name}'s final {metric}"
    own, length = (
        times[reference.name],
        max(run.curve[-1].step for run in finished(reference.verdict) if run.curve),
    )
    is_comparable = curves.are_times_comparable(curves.cpu_loads(study))
    has_seconds = is_comparable and all(
        len(each.seconds) == len(each.steps) for each in times.values()
    )
    # when each candidate first reaches the target, beside the reference's own time
    items, rows = [], []
    usual = _time(_summary(own.steps)[0], ".0f")
    for name, each in times.items():
        num, seeds = sum(not time.is_longer for time in each.steps), count(len(each.steps), "seed")
        row = [
            name,
            f"{num} of {seeds}",
            _spread(each.steps, ".0f"),
            _spread(each.step_shares, ".0%"),
        ]
        rows.append(
            row
            + (
                [_spread(each.seconds, ".1f"), _spread(each.second_shares, ".0%")]
                if has_seconds
                else []
            )
        )
        if name == reference.name:
            continue
        if 2 * num <= len(each.steps):
            items.append(Item(f"{name} reached {target} with {num} of {seeds}", "."))
            continue
        middle, least, most = (_time(time, ".0%") for time in _summary(each.step_shares))
        interval = f"; smallest {least}, largest {most}" if least != most else ""
        lead = f"{name} first reached {target} at step {_time(_summary(each.steps)[0], '.0f')} of {length}"
        usually = f"{reference.name}'s own runs first reached their final value at step {usual}"
        shares = f"With equal seeds, {name} needed {middle} of the steps that {reference.name} needed for this value"
        items.append(
            Item(lead, f"; {usually} (medians over {seeds}). {shares} (median{interval}).")
        )
    head = ["", "reached", "steps", f"share of {reference.name}'s steps"]
    head += ["seconds", f"share of {reference.name}'s seconds"] if has_seconds else []
    note = (
        f"The target of each run is {target} with the same seed. The cells have the median over the seeds, with the "
        "smallest and the largest value; > marks a target that was not reached. Between evaluations, the metric is "
        f"interpolated. {reference.name} itself reaches its final {metric} before its last step if the curve is flat "
        "at the end. A step of each optimizer has the same forward and backward FLOPs, so the share of steps is also "
        "the share of these FLOPs. The optimizer's own FLOPs come on top; the command soren-align plan counts them."
    )
    if not is_comparable:
        note += " Seconds are not shown, because the CPU's load differed between the runs."
    caveat = (
        "These steps are read from the curves of longer runs: a run whose learning rate schedule ends at one of these "
        f"steps would have another {metric}."
    )
    return [Items(items), Paragraph(caveat), Table(head, rows), Paragraph(note, kind="muted")]


def target_times(
    candidate: Candidate, reference: Candidate, *, higher_is_better: bool
) -> TargetTimes:
    """Return the times to the reference's final metric, for the seeds at which both have ended.

    Of a seed's draws, the first one counts. A reference that had its final metric earlier counts
    with that time. It has none if it started with it.
    """
    first, own = (
        [runs[0] for runs in by_number(each.verdict).values()] for each in (candidate, reference)
    )
    own = {run.seed: run for run in finished(own) if run.curve}
    times = TargetTimes([], [], [], [])
    for run in first:
        if run.seed not in own or run.status not in ("finished", "diverged") or not run.curve:
            continue
        end = own[run.seed]
        # not the run's metric, whose mean over examples has other weights
        target = end.curve[-1].metric
        usual = None if target is None else curves.first_reach(end, target, higher_is_better)
        if target is None or usual is None or usual[0] == 0:
            continue
        reach = curves.first_reach(run, target, higher_is_better)
        # A diverged run has fewer steps, and would not have reached it in all.
        last = max((run, end), key=lambda each: each.curve[-1].step).curve[-1]
        step, seconds = reach or (last.step, last.seconds)
        times.steps.append(Time(reach is None, step))
        times.step_shares.append(Time(reach is None, step / usual[0]))
        if seconds is not None and usual[1]:
            times.seconds.append(Time(reach is None, seconds))
            times.second_shares.append(Time(reach is None, seconds / usual[1]))
    return times


def _spread(times: Sequence[Time], form: str) -> str:
    middle, least, most = (_time(time, form) for time in _summary(times))
    return middle if least == most else f"{middle} ({least} to {most})"


def _summary(times: Sequence[Time]) -> tuple[Time, Time, Time]:
    """Return the median, the least and the largest."""
    ordered = sorted(times)
    below, above = ordered[(len(times) - 1) // 2], ordered[len(times) // 2]
    return Time(above.is_longer, (below.value + above.value) / 2), ordered[0], ordered[-1]


def _time(time: Time, form: str) -> str:
    return f"{'> ' if time.is_longer else ''}{time.value:{form}}"
