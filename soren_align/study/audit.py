"""The audit of a study: whether its candidates were compared on equal terms, read from the run folders alone.

Nothing in study.json is trusted: what it states is compared with the folders. With any problem there is no verdict;
cautions weaken the conclusion (docs/comparison.md).
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from ..core.version import __version__
from ..recipe import differences, is_derived, recipe_hash
from .config import METRICS
from .runs import STAGES, Evidence, flat, run_folders
from .study import Candidate, Run

EQUAL_AT_A_SEED = {
    "starting_weights": "other initial weights",
    "batches": "other batches, or the same in another order",
    "data": "other training or held-out examples",
    "precision": "another precision",
    "processes": "another number of processes",
    "global_batch_size": "another global batch size",
    "device": "another kind of device",
    "versions": "other versions of packages",
}
"""Parts of `identity` in run.json, and the finding if they differ."""
FOLLOWS = "not set"
"""In a difference of recipes, the value of a key that follows another one."""
MATCHED = "remove this folder and rerun the study, so that all candidates are trained alike"


def audit(
    candidates: list[Candidate], study_folder: Path, file: dict[str, Any], evidence: tuple[list[Evidence], list[str]]
) -> list[str]:
    """Return the problems of a study that has ended, each a sentence with place, finding and remedy.

    candidates: as study.json has them; the trials of each in `trials`, the runs with fresh seeds in `verdict`. file:
    the study's resolved file. evidence: `read_evidence` of the folder.
    """
    runs, problems = evidence[0], [*evidence[1]]
    searched = {name: _searched_keys(file, name) for name in file["candidates"]}
    problems += _listing_problems(candidates, study_folder, runs)
    problems += _trial_problems(study_folder, file)
    problems += _seed_problems(candidates, runs, file)
    problems += _recipe_problems(runs, file, searched)
    problems += _identity_problems(runs)
    problems += _selection_problems(candidates, runs, file, searched)
    return list(dict.fromkeys(problems))


def _searched_keys(file: dict[str, Any], candidate: str) -> set[str]:
    return {*(file["search"].get("space") or {}), *(file["candidates"].get(candidate, {}).get("space") or {})}


def _listing_problems(candidates: list[Candidate], study_folder: Path, runs: list[Evidence]) -> Iterator[str]:
    """Folders that the study does not list, listed runs without a folder, and a listed status that is not the run's."""
    on_disk = {folder.relative_to(study_folder).as_posix() for folder in run_folders(study_folder)}
    listed = {run.folder: run for candidate in candidates for run in (*candidate.trials, *candidate.verdict)}
    for place in sorted(on_disk - {*listed}):
        yield f"{place}: is a run that the study does not list; declare its trial for all candidates, or remove it"
    for place in sorted({*listed} - on_disk):
        if listed[place].status in ("finished", "pruned"):
            yield f"{place}: is listed as {listed[place].status} and has no folder; rerun the study"
    for run in runs:
        entry = listed.get(run.place)
        if entry is not None and entry.status == "finished" and not run.is_trained:
            yield f"{run.place}: is listed as finished and is not trained to its end; rerun the study"
        if entry is not None and (entry.candidate, entry.stage) != (run.candidate, run.stage):
            yield f"{run.place}: is listed as {entry.stage} of {entry.candidate}; rerun the study"


def _trial_problems(study_folder: Path, file: dict[str, Any]) -> Iterator[str]:
    """Unequal numbers of trials; the same for all is no problem (a budget that has ended, or an extended search)."""
    places = [folder.relative_to(study_folder) for folder in run_folders(study_folder)]
    counts = Counter(place.parts[1] for place in places if place.parts[0] == STAGES[0])
    declared = file["search"]["trials"] * len(file["search"]["seeds"])
    numbers = {name: counts[name] for name in {**file["candidates"], **counts}}
    if len({*numbers.values()}) == 1:
        return
    for name, number in numbers.items():
        if name not in file["candidates"]:
            yield f"search/{name}: the study declares no candidate {name!r}; remove the folder"
        elif number != declared:
            yield (
                f"search/{name}: has {number} trials, and {declared} are declared for each candidate; "
                f"{'remove those beyond them' if number > declared else 'rerun the study to make the others'}"
            )


def _seed_problems(candidates: list[Candidate], runs: list[Evidence], file: dict[str, Any]) -> Iterator[str]:
    """A verdict on seeds of the search, or without one of its own; a candidate of which no trial finished has none."""
    selected = {name: None for name in file["candidates"]} | {each.name: each.selected for each in candidates}
    fresh, selecting = file["verdict"]["seeds"], {run.seed for run in runs if run.stage == "search"}
    for run in runs:
        if run.stage == "verdict" and run.seed in selecting | {*file["search"]["seeds"]}:
            yield f"{run.place}: has seed {run.seed}, with which the setting was selected; write other verdict.seeds"
        elif run.seed not in (fresh if run.stage == "verdict" else file["search"]["seeds"]):
            yield f"{run.place}: has seed {run.seed}, which {run.stage}.seeds does not declare; {MATCHED}"
    for name in file["candidates"]:
        started = {run.seed for run in runs if (run.stage, run.candidate) == ("verdict", name)}
        missing = [str(seed) for seed in fresh if seed not in started]
        if missing and (started or selected[name] is not None):
            yield f"verdict/{name}: has no run with seed {', '.join(missing)}; rerun the study"


def _recipe_problems(runs: list[Evidence], file: dict[str, Any], searched: dict[str, set[str]]) -> Iterator[str]:
    """Recipes that differ in more than the study declares, or are not those that were trained."""
    for run in runs:
        trained_by = run.record.get("identity")
        if not trained_by:
            yield f"{run.place}: run.json has no identity, so that nothing is known of its batches; {MATCHED}"
        elif trained_by["versions"].get("soren-align") == __version__ and trained_by["recipe"] != recipe_hash(
            run.recipe
        ):
            yield f"{run.place}: recipe.yaml is not the recipe that it was trained by; {MATCHED}"
        for key, value in declared_settings(file, run.candidate).items():
            trained = run.settings.get(key, value)
            if value is not None and key not in searched.get(run.candidate, ()) and trained != value:
                yield f"{run.place}: {key} is {trained!r}, and the study declares {value!r}; {MATCHED}"
    unlike = {}
    for name in file["candidates"]:
        of_candidate = [run for run in runs if run.candidate == name]
        unlike |= _unlike(of_candidate, searched[name].__contains__, f"other runs of {name}")
    free = {key for name in searched for key in (*searched[name], *declared_settings(file, name, shared=False))}
    others = _unlike(runs, lambda key: key.startswith("optimizer.") or key in free, "other candidates")
    yield from (others | unlike).values()


def declared_settings(file: dict[str, Any], candidate: str, *, shared: bool = True) -> dict[str, Any]:
    """The recipe's keys, dotted to the last, that a study sets for a candidate; shared: those for all runs, too."""
    own = file["candidates"].get(candidate, {}).get("set") or {}
    return flat({**(file.get("set") or {}), **own} if shared else own)


def _unlike(runs: list[Evidence], is_free: Callable[[str], bool], others: str) -> dict[str, str]:
    """By place the problem of a recipe that differs from those of most runs in a key that is not free.

    A key that most recipes do not set, and that follows another one, such as AdamW's aux_lr its lr, is equal where it
    follows.
    """
    settings = [{key: value for key, value in run.settings.items() if not is_free(key)} for run in runs]
    for key in dict.fromkeys(key for each in settings for key in each):
        if any(each.get(key) != settings[0].get(key) for each in settings):
            derived = [is_derived(run.recipe, key) for run in runs]
            followed = [each.get(key) for each, is_one in zip(settings, derived, strict=True) if is_one]
            if 2 * len(followed) > len(runs) and any(value != followed[0] for value in followed):
                settings = [s | {key: FOLLOWS} if d else s for s, d in zip(settings, derived, strict=True)]
    problems = {}
    for run, each in zip(runs, settings, strict=True):
        if lines := differences(most_common(settings), each):
            problems[run.place] = f"{run.place}: is unlike {others}, undeclared ({'; '.join(lines[:3])}); {MATCHED}"
    return problems


def _identity_problems(runs: list[Evidence]) -> Iterator[str]:
    """Parts of the identity that are not equal for all runs with one seed, and unequal numbers of steps."""
    trained = [run for run in runs if run.is_trained]
    yield from _deviations(trained, lambda run: run.num_steps, "another number of steps than the other runs")
    steps = most_common([run.num_steps for run in trained])
    for seed in dict.fromkeys(run.seed for run in runs):
        for part, finding in EQUAL_AT_A_SEED.items():
            compared = [run for run in runs if run.seed == seed and run.record.get("identity")]
            if part in (
                "batches",
                "precision",
            ):  # known at the end; the batches of another number of steps differ anyway
                compared = [run for run in compared if run.is_trained and run.num_steps == steps]
            others = f"{finding} than the other runs with seed {seed}"
            yield from _deviations(compared, lambda run, part=part: run.record["identity"].get(part), others)


def _deviations(runs: list[Evidence], value: Callable[[Evidence], Any], finding: str) -> Iterator[str]:
    """A problem for each candidate with a run whose value is not that of most runs, or is unknown."""
    usual = most_common([value(run) for run in runs])
    by_candidate: dict[tuple[str, str], list[Evidence]] = {}
    for run in runs:
        if value(run) != usual or usual is None:
            by_candidate.setdefault((run.stage, run.candidate), []).append(run)
    for unlike in by_candidate.values():
        first, more = unlike[0], f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        theirs = value(first)
        values = f"{theirs} instead of {usual}"
        if isinstance(theirs, dict) and isinstance(usual, dict):
            values = "; ".join(differences(usual, theirs)[:3])
        yield f"{first.place}{more}: {finding} ({values}); {MATCHED}"


def _selection_problems(
    candidates: list[Candidate], runs: list[Evidence], file: dict[str, Any], searched: dict[str, set[str]]
) -> Iterator[str]:
    """Selection by anything but the best held-out metric, and verdicts of other settings than the selected ones."""
    metric = file["search"]["metric"]
    if metric not in METRICS:
        allowed = " or ".join(METRICS)
        yield f"search.metric: selects by {metric!r}, which is no metric of held-out examples; write {allowed}"
        return
    yield from _misstated_metrics(candidates, runs, metric)
    for name in file["candidates"]:
        trials = settings_of_search([run for run in runs if run.candidate == name], metric, searched[name])
        best = selected_settings(trials, len(file["search"]["seeds"]), METRICS[metric])
        places: dict[str, list[str]] = {}  # of the verdict, by setting
        for run in runs:
            if (run.stage, run.candidate) == ("verdict", name):
                places.setdefault(_key(_parameters(run, searched[name])), []).append(run.place)
        for key, (place, *others) in places.items():
            if key in best:
                continue
            where = f"{place} and {len(others)} more" if others else place
            if not best:
                yield f"{where}: no trial of {name} has finished; a verdict needs a selected setting"
                continue
            theirs = f"has {metric} {fmean(trials[key]):.5g}" if key in trials else "is none of the search"
            yield (
                f"{where}: the setting ({_in_words(key)}) {theirs}, and the best of the search ({_in_words(best[0])}) "
                f"has {fmean(trials[best[0]]):.5g}: it was not selected on the held-out examples; rerun the verdict"
            )


def _in_words(setting: str) -> str:
    """Return "optimizer.lr 0.00661, ..." of a setting's JSON text."""
    values = json.loads(setting).items()
    return ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values)


def settings_of_search(runs: list[Evidence], metric: str, keys: set[str]) -> dict[str, list[float]]:
    """The metrics of the finished trials by setting, as JSON text; one for each seed of the search."""
    trials: dict[str, list[float]] = {}
    for run in runs:
        if run.stage == "search" and run.is_trained and (value := run.metric(metric)) is not None:
            trials.setdefault(_key(_parameters(run, keys)), []).append(value)
    return trials


def selected_settings(trials: dict[str, list[float]], num_seeds: int, higher_is_better: bool) -> list[str]:
    """The settings with the best mean metric, among those that finished with all seeds."""
    means = {key: fmean(values) for key, values in trials.items() if len(values) >= num_seeds}
    best = (max if higher_is_better else min)(means.values(), default=None)
    return [key for key, mean in means.items() if mean == best]


def _misstated_metrics(candidates: list[Candidate], runs: list[Evidence], metric: str) -> Iterator[str]:
    by_place = {run.place: run for run in runs}
    listed: Iterable[Run] = (run for c in candidates for run in (*c.trials, *c.verdict) if run.status == "finished")
    for entry in listed:
        if (run := by_place.get(entry.folder)) is None:
            continue
        stated, measured = entry.metric, run.metric(metric)
        if stated != measured and not (stated and measured and math.isclose(stated, measured, rel_tol=1e-9)):
            yield f"{run.place}: metrics.jsonl has {metric} {measured}, and study.json states {stated}; rerun the study"


def _parameters(run: Evidence, keys: set[str]) -> dict[str, Any]:
    return {key: run.settings.get(key) for key in sorted(keys)}


def _key(parameters: dict[str, Any]) -> str:
    return json.dumps(parameters, sort_keys=True)


def most_common(values: list[Any]) -> Any:
    """The value that occurs most often, the first of several; values may be dicts. None of no value."""
    if not values:
        return None
    texts = [json.dumps(value, sort_keys=True, default=str) for value in values]
    return values[texts.index(Counter(texts).most_common(1)[0][0])]


# ---
# Facts that weaken a study's conclusion without being faults: edges, lost trials, few seeds, overlaps.

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
