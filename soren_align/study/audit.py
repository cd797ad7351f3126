"""Check the runs of a study before its verdict.

The audit is whether its candidates were compared on equal terms, read from the run folders alone.
With any problem there is no verdict; cautions weaken the conclusion (docs/comparison.md).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import file_sha256, write
from ..core.text import dotted
from ..evaluate.report.results import read_results
from ..evaluate.stats.paired import read_points, read_sample_points
from ..evaluate.suite.suites import Suite, suite_of
from ..recipe import differences, load_resolved, recipe_hash
from ..recipe.schema import is_derived, trains_adapter
from ..run.folder import RunFolder
from . import stats
from .config import METRICS, load_resolved_study, study_problems
from .declaration import (
    declaration_problems,
    final_runs,
    history_cautions,
    look_number,
    note,
    read_history,
)
from .report.page import write_report
from .runs import RunFiles, flat, read_files, run_folders
from .search import STUDY_FILE, STUDY_RESULT, read_study
from .study import Study, by_number, mean_metric

EQUAL = {
    "starting_weights": "other initial weights",
    "batches": "other batches, or the same in another order",
    "data": "other training or held-out examples",
    "precision": "another precision",
    "processes": "another number of processes",
    "global_batch_size": "another global batch size",
    "device": "another kind of device",
    "versions": "other versions of packages",
}
"""Parts of `identity` in run.json that all runs share, and the finding if they differ."""
AT_A_SEED = ("batches", "starting_weights")
"""Those that only the runs with one seed share; the starting weights where they are drawn."""
FOLLOWS = "not set"
"""In a difference of recipes, the value of a key that follows another one."""
MATCHED = "remove this folder and rerun the study, so that all candidates are trained alike"
RESTORE = "restore this file, or remove this folder and rerun the study"
MANY_SEEDS = 5
"""Of a verdict, from which on their number is no caution: with 3, a 95% interval over seeds alone
is 4.3 standard errors wide to each side, with 5 it is 2.8 (Student's t)."""
MANY_EXAMPLES = 100
"""Held out, from which on their number is no caution."""


def conclude(folder: Path, failures: Mapping[str, str] | None = None) -> Study:
    """Return the study in a folder with its verdict, after writing study.json and the report.

    failures: reasons of runs that ended without a record, by folder.
    """
    study = read_verdict(folder, failures)
    if study.differences and look_number(folder, study) > len(read_history(folder, "looked")):
        answers = [
            f"{d.candidate} - {d.reference}, {d.measure}: {d.answer}" for d in study.differences
        ]
        note(folder, "looked", runs=final_runs(study), answers=answers)
    study = replace(study, cautions=[*study.cautions, *history_cautions(folder, study)])
    write(folder / STUDY_RESULT, json.dumps(asdict(study), indent=1) + "\n")
    write_report(study, folder)
    return study


def read_verdict(folder: Path, failures: Mapping[str, str] | None = None) -> Study:
    """Return the study in a folder with its verdict, but for cautions from its history; nothing is
    written.

    Its runs are audited, then compared; with a problem there is no verdict.
    """
    study = read_study(folder, failures)
    final = [run for candidate in study.candidates for run in candidate.verdict]
    recipe = next(
        (file for run in final if (file := RunFolder(folder / run.folder).recipe).is_file()), None
    )
    # None before the first run of the verdict
    options = load_resolved(recipe).eval if recipe else None
    contamination = None
    # all train on the same examples
    if options and (evaluated := next((run for run in final if run.scores), None)):
        results = read_results(RunFolder(folder / evaluated.folder).evaluation(options.name))
        contamination = results.get("contamination") if results else None
    runs, unreadable = read_files(folder)
    file = load_resolved_study(folder / STUDY_FILE)
    problems = [f"{STUDY_FILE}: {dotted(key)}: {message}" for key, message in study_problems(file)]
    problems += [*declaration_problems(folder, file), *unreadable, *audit(study, folder, runs)]
    weaknesses = [*cautions(study, folder, runs, contamination)]
    answers, num_questions = [], {}
    if not problems:
        suite, higher = options.name if options else None, study.higher_is_better
        read, about_answers = stats.read_answers(
            folder, study.candidates, file.search.metric, suite, higher_is_better=higher
        )
        answers = stats.verdict(
            file.verdict,
            study.candidates,
            read,
            average=options is not None and suite_of(options).average,
            look=look_number(folder, study),
        )
        weaknesses += [*about_answers, *stats.cautions(study.candidates, read)]
        num_questions = stats.num_questions(read)
    return replace(
        study,
        problems=problems,
        cautions=weaknesses,
        contamination=contamination,
        differences=answers,
        num_questions=num_questions,
    )


def audit(study: Study, folder: Path, runs: list[RunFiles]) -> list[str]:
    """Return the problems of a study that has ended, each a sentence with place, finding and
    remedy.

    runs: those in the folder.
    """
    file = study.file
    searched = {
        name: {*(file["search"].get("space") or {}), *(section.get("space") or {})}
        for name, section in file["candidates"].items()
    }
    problems = [
        *_folder_problems(study, folder, runs),
        *_recipe_problems(runs, file, searched, folder),
    ]
    trained = [run for run in runs if run.num_steps is not None]
    numbers = [run.num_steps for run in trained]
    steps = most_common(numbers)
    problems += _deviations(trained, numbers, "another number of steps than the other runs")
    draws_weights = any(
        run.recipe.task == "pretrain" or trains_adapter(run.recipe.model) for run in runs
    )
    for part, finding in EQUAL.items():
        by_seed = part in AT_A_SEED if draws_weights else part == "batches"
        keys = [by_seed and run.seed for run in runs]
        for seed in dict.fromkeys(keys):
            alike = [run for run, key in zip(runs, keys, strict=True) if key == seed]
            compared = [run for run in alike if run.record.get("identity")]
            # known at the end; those of another number of steps differ anyway
            if part in ("batches", "precision"):
                compared = [
                    run for run in compared if run.num_steps is not None and run.num_steps == steps
                ]
            parts = [run.record["identity"].get(part) for run in compared]
            where = f" with seed {seed}" if by_seed else ""
            problems += _deviations(compared, parts, f"{finding} than the other runs{where}")
    problems += [*_selection_problems(study, runs, searched), *_file_problems(trained, folder)]
    return list(dict.fromkeys(problems))


def _file_problems(runs: list[RunFiles], folder: Path) -> Iterator[str]:
    """Files that are not those that a run has left, and answers by the weights of another run.

    Whoever edits all files of a run alike, with their hashes, is not found by any of these.
    """
    by_weights: dict[str, RunFiles] = {}
    for run in runs:
        own, written = RunFolder(folder / run.place), run.record.get("written")
        if written is None:
            yield f"{run.place}: run.json has no hashes of the training's files; {MATCHED}"
            continue
        if file_sha256(own.metrics) != written["metrics_sha256"]:
            yield f"{run.place}: metrics.jsonl differs from the file that the training wrote; {RESTORE}"
        held_out = (
            file_sha256(own.held_out) if run.stage == "verdict" and own.held_out.is_file() else None
        )
        if held_out not in (None, written.get("held_out_sha256")):
            yield f"{run.place}: held_out.json differs from the file that the training wrote; {RESTORE}"
        if recipe_hash(run.recipe, with_optimizer=True) != written["recipe_sha256"]:
            yield f"{run.place}: recipe.yaml differs from the recipe of the training; {RESTORE}"
        weights = written["weights_sha256"]
        other = run if weights is None else by_weights.setdefault(weights, run)
        if other.record.get("identity", {}).get("batches") != run.record.get("identity", {}).get(
            "batches"
        ):
            finding = f"has the same weights as {other.place}, although the two runs trained on different batches"
            yield f"{run.place}: {finding}; {MATCHED}"
        options = run.recipe.eval if run.stage == "verdict" else None
        if options and (results := read_results(own.evaluation(options.name))):
            if results["rows"][-1].get("weights_sha256") != weights:
                remedy = f"evaluate the run again (soren-align eval {own})"
                yield f"{run.place}: the evaluated weights are not the weights of this run's model; {remedy}"
            yield from _sample_problems(own.evaluation(options.name), suite_of(options))


def _sample_problems(output: Path, suite: Suite) -> Iterator[str]:
    """Points that are not those of the samples, which have the model's answers.
    output: an evaluation's folder.
    """
    try:
        # the starting checkpoint's, and the run's own
        rows = list(read_points(output).items())[-2:]
        for name, points in rows:
            for task in (task for task in suite.tasks if task.column in points):
                file = output / "samples" / name / f"{task.column}.jsonl"
                own = read_sample_points(file, task.metric, task.filter, task.num_choices)
                if own is not None and own != points[task.column].each.tolist():
                    yield f"{output}: the scores of {name} in {task.column} differ from its samples; {RESTORE}"
    except UserError as error:
        yield str(error)


def _folder_problems(study: Study, folder: Path, runs: list[RunFiles]) -> Iterator[str]:
    """Runs that the study does not list, unequal numbers of trials, and seeds that it does not
    declare or that miss.
    """
    file = study.file
    on_disk = [path.relative_to(folder).as_posix() for path in run_folders(folder)]
    listed = {run.folder: run.status for run in study.runs}
    for place in on_disk:
        if place not in listed:
            remedy = "remove this folder, or add the trial for all candidates"
            yield f"{place}: is a run that the study does not list; {remedy}"
    for run in runs:
        if listed.get(run.place) == "finished" and run.num_steps is None:
            yield f"{run.place}: is listed as finished, but its training did not end; rerun the study"

    # The same number for all is no problem: a budget has ended, or the search was extended.
    counts = Counter(place.split("/")[1] for place in on_disk if place.startswith("search/"))
    declared = file["search"]["trials"] * len(file["search"]["seeds"])
    numbers = {name: counts[name] for name in {**file["candidates"], **counts}}
    for name, number in numbers.items() if len({*numbers.values()}) > 1 else ():
        if name not in file["candidates"]:
            yield f"search/{name}: the study declares no candidate {name!r}; remove this folder"
        elif number != declared:
            remedy = (
                "remove the surplus trials"
                if number > declared
                else "rerun the study to run the missing trials"
            )
            yield f"search/{name}: has {number} trials, but the study declares {declared} per candidate; {remedy}"

    seeds = {stage: file[stage]["seeds"] for stage in ("search", "verdict")}
    selecting = {run.seed for run in runs if run.stage == "search"} | {*seeds["search"]}
    for run in runs:
        if run.stage == "verdict" and run.seed in selecting:
            finding = f"has seed {run.seed}, which the search also used to select the setting"
            yield f"{run.place}: {finding}; write other verdict.seeds"
        elif run.seed not in seeds[run.stage]:
            yield f"{run.place}: has seed {run.seed}, which is not in {run.stage}.seeds; {MATCHED}"
    with_verdict = {
        candidate.name for candidate in study.candidates if candidate.selected is not None
    }
    for name in file["candidates"]:
        started = [run for run in runs if (run.stage, run.candidate) == ("verdict", name)]
        missing = [
            str(seed) for seed in seeds["verdict"] if seed not in {run.seed for run in started}
        ]
        if missing and (started or name in with_verdict):
            yield f"verdict/{name}: has no run with seed {', '.join(missing)}; rerun the study"


def _recipe_problems(
    runs: list[RunFiles], file: dict[str, Any], searched: dict[str, set[str]], folder: Path
) -> Iterator[str]:
    """Recipes that differ in more than the study declares: from its keys, from each other, from
    their candidate's.
    """
    for run in runs:
        if not run.record.get("identity"):
            finding = "run.json has no section `identity`, so it is unknown which batches the run trained on"
            yield f"{run.place}: {finding}; {MATCHED}"
        for key, value in declared_settings(file, run.candidate).items():
            trained = run.settings.get(key, value)
            if (
                value is not None
                and key not in searched.get(run.candidate, ())
                and trained != value
            ):
                yield f"{run.place}: {key} is {trained!r}, but the study declares {value!r}; {MATCHED}"
        if (part := run.recipe.data.eval_part) != run.stage:
            yield f"{run.place}: data.eval_part is {part}, but a run of this stage has {run.stage}; {MATCHED}"
    unlike = {}
    for name in file["candidates"]:
        of_candidate = [run for run in runs if run.candidate == name]
        unlike |= _unlike(of_candidate, searched[name].__contains__, f"other runs of {name}")
    free = {
        key
        for name in searched
        for key in (*searched[name], *declared_settings(file, name, shared=False))
    }
    others = _unlike(
        runs, lambda key: key.startswith("optimizer.") or key in free, "other candidates"
    )
    yield from (others | unlike).values()
    # A key that all runs of a candidate have, and the study does not name: unlike no other run, but
    # the candidate's.
    for name in file["candidates"]:
        place = f"candidates/{name}.yaml"
        if not (folder / place).is_file():
            yield f"{place}: is missing; rerun the study, which writes this file again"
            continue
        declared = RunFiles("candidates", name, place, load_resolved(folder / place), {})
        for run in (
            run for run in runs if run.candidate == name and run.place not in others | unlike
        ):
            for key in sorted({*run.settings, *declared.settings} - searched[name]):
                theirs, own = declared.settings.get(key), run.settings.get(key)
                if theirs != own and not (
                    is_derived(declared.recipe, key) and is_derived(run.recipe, key)
                ):
                    yield f"{run.place}: {key} is {own!r} in this run, but {theirs!r} in {place}; {MATCHED}"


def declared_settings(
    file: dict[str, Any], candidate: str, *, shared: bool = True
) -> dict[str, Any]:
    """The recipe's keys, dotted to the last, that a study sets for a candidate; shared: those for
    all runs, too.
    """
    own = file["candidates"].get(candidate, {}).get("set") or {}
    return flat({**(file.get("set") or {}), **own} if shared else own)


def _unlike(runs: list[RunFiles], is_free: Callable[[str], bool], others: str) -> dict[str, str]:
    """By place the problem of a recipe that differs from those of most runs in a key that is not
    free.

    A key that most recipes do not set, and that follows another one, such as AdamW's aux_lr its lr,
    is equal where it follows.
    """
    settings = [
        {key: value for key, value in run.settings.items() if not is_free(key)} for run in runs
    ]
    for key in dict.fromkeys(key for each in settings for key in each):
        if any(each.get(key) != settings[0].get(key) for each in settings):
            derived = [is_derived(run.recipe, key) for run in runs]
            followed = [
                each.get(key) for each, is_one in zip(settings, derived, strict=True) if is_one
            ]
            if 2 * len(followed) > len(runs) and any(value != followed[0] for value in followed):
                settings = [
                    s | {key: FOLLOWS} if d else s for s, d in zip(settings, derived, strict=True)
                ]
    problems = {}
    for run, each in zip(runs, settings, strict=True):
        if lines := differences(most_common(settings), each):
            finding = f"differs from {others} in undeclared keys ({'; '.join(lines[:3])})"
            problems[run.place] = f"{run.place}: {finding}; {MATCHED}"
    return problems


def _deviations(runs: list[RunFiles], values: list[Any], finding: str) -> Iterator[str]:
    """A problem for each candidate with a run whose value is not that of most runs, or is
    unknown.
    """
    usual = most_common(values)
    by_candidate: dict[tuple[str, str], list[tuple[str, Any]]] = {}
    for run, value in zip(runs, values, strict=True):
        if value != usual or usual is None:
            by_candidate.setdefault((run.stage, run.candidate), []).append((run.place, value))
    for (place, theirs), *others in by_candidate.values():
        more = f" and {len(others)} more runs" if others else ""
        text = f"{theirs} instead of {usual}"
        if isinstance(theirs, dict) and isinstance(usual, dict):
            text = "; ".join(differences(usual, theirs)[:3])
        yield f"{place}{more}: has {finding} ({text}); {MATCHED}"


def _selection_problems(
    study: Study, runs: list[RunFiles], searched: dict[str, set[str]]
) -> Iterator[str]:
    """Selection by anything but the best held-out metric, and verdicts of other settings than the
    selected ones.
    """
    metric = study.file["search"]["metric"]
    if metric not in METRICS:
        allowed = " or ".join(METRICS)
        yield f"search.metric: found {metric!r}, which is no metric of held-out examples; write {allowed}"
        return

    settings = {}
    for run in runs:
        keys = sorted(searched.get(run.candidate, ()))
        settings[run.place] = json.dumps({key: run.settings.get(key) for key in keys})
    for candidate in study.candidates:
        trials = [
            trial for trial in by_number(candidate.trials).values() if trial[0].folder in settings
        ]
        metrics = {settings[trial[0].folder]: mean_metric(trial) for trial in trials}
        best = settings.get(candidate.selected_trial.folder) if candidate.selected_trial else None
        places: dict[str, list[str]] = {}  # of the verdict, by setting
        for run in runs:
            if (run.stage, run.candidate) == ("verdict", candidate.name) and settings[
                run.place
            ] != best:
                places.setdefault(settings[run.place], []).append(run.place)
        for setting, (place, *others) in places.items():
            where = f"{place} and {len(others)} more runs" if others else place
            if best is None:
                yield f"{where}: no trial of {candidate.name} has finished, so no setting is selected; rerun the study"
                continue
            theirs = metrics.get(setting)
            has = "was not tried in the search" if theirs is None else f"has {metric} {theirs:.5g}"
            yield (
                f"{where}: the setting ({_in_words(setting)}) {has}, but the best setting of the search "
                f"({_in_words(best)}) has {metrics[best]:.5g}; {MATCHED}"
            )


def _in_words(setting: str) -> str:
    """Return "optimizer.lr 0.00661, ..." of a setting's JSON text."""
    values = json.loads(setting).items()
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values
    )


def most_common(values: list[Any]) -> Any:
    """The value that occurs most often, the first of several; values may be dicts.
    None of no value.
    """
    if not values:
        return None
    texts = [json.dumps(value, sort_keys=True, default=str) for value in values]
    return values[texts.index(Counter(texts).most_common(1)[0][0])]


def cautions(
    study: Study, folder: Path, runs: list[RunFiles], contamination: dict[str, Any] | None = None
) -> Iterator[str]:
    """Yield the cautions, each a sentence.
    runs: those in the folder. contamination: as in Study.
    """
    candidates, file = study.candidates, study.file
    search, sections = file["search"], file["candidates"]
    for candidate in candidates:
        for key, end in candidate.at_edge.items():
            word = "largest" if end == "high" else "smallest"
            finding = f"the selected {key} is the {word} value that was tried, and a better value may lie beyond"
            yield f"{candidate.name}: {finding} this value; extend the search (--extend)"
        for status in ("diverged", "failed"):
            if number := sum(run.status == status for run in candidate.trials):
                yield f"{candidate.name}: {number} of {len(candidate.trials)} trials {status}"
        if candidate.selected is None:
            yield f"{candidate.name}: no trial has finished, so there is no verdict on this candidate"
    finished = {c.name: sum(run.status == "finished" for run in c.trials) for c in candidates}
    if len({*finished.values()}) > 1:
        counts = ", ".join(f"{name} {number}" for name, number in finished.items())
        yield f"the candidates have unequal numbers of finished trials ({counts}): more trials find better settings"
    declared = search["trials"] * len(search["seeds"])
    number = max((len(each.trials) for each in candidates), default=declared)
    if number < declared:
        yield f"each candidate has {number} trials instead of the declared {declared}, because the budget ended"
    elif number > declared:
        yield f"the search was extended from {declared} to {number} trials of each candidate"

    # Unequal terms that the study declares.
    numbers = {}
    for name, section in sections.items():
        space = {**(search.get("space") or {}), **(section.get("space") or {})}
        numbers[name] = sum(not isinstance(values, str) for values in space.values())
    if len({*numbers.values()}) > 1:
        counts = ", ".join(f"{name} {number}" for name, number in numbers.items())
        yield (
            f"the candidates have different numbers of searched keys ({counts}) but equal numbers of trials, so "
            "the candidates with more keys are tuned less thoroughly"
        )
    own = {name: declared_settings(file, name, shared=False) for name in sections}
    for name in sections:
        keys = sorted(key for key in own[name] if not key.startswith("optimizer."))
        if any(own[other].get(key) != own[name][key] for other in sections for key in keys):
            yield f"{name}: its {', '.join(keys)} differ from the other candidates', so not only the optimizer differs"

    evaluated = [
        run.place
        for run in runs
        if run.stage == "search" and (folder / run.place / "eval").is_dir()
    ]
    if evaluated:
        more = f" and {len(evaluated) - 1} more runs" if len(evaluated) > 1 else ""
        yield f"{evaluated[0]}{more}: a trial of the search was evaluated on benchmarks, which must not select settings"
    held_out = [run.record.get("data", {}).get("eval") or {} for run in runs]
    sizes = [each.get("num_kept", each.get("num_examples")) for each in held_out]
    number = min((each for each in sizes if isinstance(each, int)), default=None)
    if number is not None and number < MANY_EXAMPLES:
        finding = f"the held-out metric is a mean over only {number} examples"
        yield f"{finding}; hold out more examples for narrower intervals"
    chosen = [
        run
        for run in runs
        if run.recipe.run.early_stopping or run.recipe.trainer.get("load_best_model_at_end")
    ]
    if chosen:
        yield (
            "early stopping or trainer.load_best_model_at_end chose the step of each model by the same held-out "
            "examples on which the verdict compares the models, so every held-out loss is too low"
        )
    commits = sorted({str(run.record["commit"])[:12] for run in runs if run.record.get("commit")})
    if len(commits) > 1:
        yield f"the runs were made by {len(commits)} different commits of soren-align ({', '.join(commits[:3])})"
    if any(str(run.record.get("commit")).endswith("-dirty") for run in runs):
        yield "runs were made by an edited checkout of soren-align (-dirty), so no commit has the code of these runs"
    if (number := len(file["verdict"]["seeds"])) < MANY_SEEDS:
        yield f"the verdict has {number} seeds; with {MANY_SEEDS} or more, the intervals are much narrower"
    for column, counts in (contamination or {}).items():
        if counts.get("overlapping"):
            finding = f"{counts['overlapping']} of {counts['questions']} questions overlap with the training data"
            yield f"{column}: {finding}; compare the scores without these questions"
