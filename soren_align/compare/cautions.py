"""Facts that weaken a study's conclusion without being faults: edges, lost trials, few seeds, overlaps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .audit import declared_settings
from .evidence import Evidence
from .study import Candidate

MANY_SEEDS = 5
"""Of a verdict, from which on their number is no caution: with 3, a 95% interval over seeds alone is 4.3 standard
errors wide to each side, with 5 it is 2.8 (Student's t)."""
MANY_EXAMPLES = 100
"""Held out, from which on their number is no caution."""


def cautions(
    candidates: list[Candidate],
    study_folder: Path,
    file: dict[str, Any],
    runs: list[Evidence],
    contamination: dict[str, Any] | None = None,
) -> list[str]:
    """Return the cautions, each a sentence. runs: those of `read_evidence`. contamination: as in Study."""
    sentences = [*_of_search(candidates, file), *_of_terms(file), *_of_folders(study_folder, runs)]
    sentences += _of_verdict(file)
    for column, counts in (contamination or {}).items():
        if counts.get("overlapping"):
            sentences.append(
                f"{column}: {counts['overlapping']} of {counts['questions']} questions overlap with the training data; "
                "compare the scores without them"
            )
    return sentences


def _of_search(candidates: list[Candidate], file: dict[str, Any]) -> Iterator[str]:
    for candidate in candidates:
        for key, end in candidate.at_edge.items():
            word = "largest" if end == "high" else "least"
            yield (
                f"{candidate.name}: the selected {key} is the {word} that was tried, and a better one may lie beyond; "
                "extend the search (--extend)"
            )
        for status in ("diverged", "failed", "pruned"):
            if number := sum(run.status == status for run in candidate.trials):
                yield f"{candidate.name}: {number} of {len(candidate.trials)} trials {_PAST[status]}"
        if candidate.selected is None:
            yield f"{candidate.name}: no trial has finished, so that it has no verdict"
    finished = {c.name: sum(run.status == "finished" for run in c.trials) for c in candidates}
    if len({*finished.values()}) > 1:
        counts = ", ".join(f"{name} {number}" for name, number in finished.items())
        yield f"the candidates have unequal numbers of finished trials ({counts}): more trials find better settings"
    declared = file["search"]["trials"] * len(file["search"]["seeds"])
    number = max((len(each.trials) for each in candidates), default=declared)
    if number < declared:
        yield f"{number} of the declared {declared} trials of each candidate were made; the budget had ended"
    elif number > declared:
        yield f"the search was extended from {declared} to {number} trials of each candidate"


_PAST = {"diverged": "diverged", "failed": "failed", "pruned": "were pruned before the end of their schedule"}


def _of_terms(file: dict[str, Any]) -> Iterator[str]:
    """Unequal terms that the study declares."""
    search, sections = file["search"], file["candidates"]
    numbers = {}
    for name, section in sections.items():
        space = {**(search.get("space") or {}), **(section.get("space") or {})}
        numbers[name] = sum(not isinstance(values, str) for values in space.values())
    if len({*numbers.values()}) > 1:
        counts = ", ".join(f"{name} {number}" for name, number in numbers.items())
        yield f"the candidates search unequal numbers of keys ({counts}) with the same number of trials"
    for name in sections:
        own = declared_settings(file, name, shared=False)
        keys = sorted(key for key in own if not key.startswith("optimizer."))
        if keys and any(
            declared_settings(file, other, shared=False).get(key) != own[key] for other in sections for key in keys
        ):
            yield f"{name}: is trained with its own {', '.join(keys)}, so that more than the optimizer differs"


def _of_folders(study_folder: Path, runs: list[Evidence]) -> Iterator[str]:
    evaluated = [run.place for run in runs if run.stage == "search" and (study_folder / run.place / "eval").is_dir()]
    if evaluated:
        more = f" and {len(evaluated) - 1} more" if len(evaluated) > 1 else ""
        yield f"{evaluated[0]}{more}: a trial of the search was evaluated on benchmarks, which must not select settings"
    held_out = [run.record.get("data", {}).get("eval") or {} for run in runs]
    numbers = [each.get("num_kept", each.get("num_examples")) for each in held_out]
    number = min((each for each in numbers if isinstance(each, int)), default=None)
    if number is not None and number < MANY_EXAMPLES:
        yield f"the held-out metric is of {number} examples, whose spread is in no interval: those are over seeds alone"
    commits = sorted({str(run.record["commit"])[:12] for run in runs if run.record.get("commit")})
    if len(commits) > 1:
        yield f"the runs were made by {len(commits)} commits of soren-align ({', '.join(commits[:3])})"
    if any(str(run.record.get("commit")).endswith("-dirty") for run in runs):
        yield "runs were made by an edited checkout of soren-align (-dirty), which no commit repeats"


def _of_verdict(file: dict[str, Any]) -> Iterator[str]:
    if (number := len(file["verdict"]["seeds"])) < MANY_SEEDS:
        yield f"the verdict has {number} seeds; from {MANY_SEEDS} on, the intervals over seeds are much narrower"
    yield (
        "the held-out examples selected the settings and are compared in the verdict too: for every candidate their "
        "loss is lower than that of new examples; the benchmarks selected nothing"
    )
