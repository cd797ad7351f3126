"""Check that the runs of a study were trained on equal terms, and conclude it.

The checks read run folders alone, and look for accidents: examples that changed, a package that was
updated, a folder that was copied. Somebody who edits the files of a run is not found by any of
them. With any problem there is no verdict; cautions weaken the conclusion (docs/comparison.md).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import file_sha256, write
from ..evaluate.report.results import read_results
from ..evaluate.stats.paired import read_points
from ..evaluate.suite.suites import suite_of
from ..recipe import differences
from ..recipe.schema import trains_adapter
from ..run.folder import RunFolder
from . import stats
from .config import StudyFile, load_resolved_study
from .declaration import look_number, note_look, read_history
from .report.page import write_report
from .runs import RunFiles, flat, read_files
from .search import STUDY_FILE, STUDY_RESULT, read_study
from .study import MANY_EXAMPLES, Run, Study

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
AT_THE_END = ("batches", "precision")
"""Those that are complete only after the last step."""
MATCHED = "remove this folder and rerun the study, so that all candidates are trained alike"
MANY_SEEDS = 5
"""Seeds of a verdict from which their number is no caution: with 3, a 95% interval over seeds alone
is 4.3 standard errors wide to each side, with 5 it is 2.8 (Student's t)."""
FAR = 0.3
"""The distance of the mean of held_out.json from the last evaluation, as a share of the larger:
one is weighted by tokens and the other by batches, so that they differ a little."""


def conclude(folder: Path, failures: Mapping[str, str] | None = None) -> Study:
    """Return the study in a folder with its verdict, after writing study.json and the report.

    failures: reasons of runs that ended without a record, by folder.
    """
    study = read_study(folder, failures)
    file = load_resolved_study(folder / STUDY_FILE)
    runs, problems = read_files(folder, study.runs)
    problems += audit(runs, folder)
    options = next((run.recipe.eval for run in runs if run.stage == "verdict"), None)
    weaknesses = [*cautions(study, file, runs), *accidents(study, runs, folder)]

    # Only runs on equal terms are compared, since a difference of others is not the optimizers'.
    suite, higher = options.name if options else None, study.higher_is_better
    answers = stats.Answers({}, {})
    if not problems:
        try:
            answers, about_answers = stats.read_answers(
                folder, study.candidates, file.search.metric, suite, higher_is_better=higher
            )
            weaknesses += [*about_answers, *stats.cautions(study.candidates)]
        except UserError as error:
            problems.append(str(error))
    if not problems:
        has_average = options is not None and suite_of(options).average
        look = look_number(folder, study)
        differences = stats.verdict(
            file.verdict, study.candidates, answers, average=has_average, look=look
        )
        study = replace(study, differences=differences, num_questions=stats.num_questions(answers))
        note_look(folder, study)
        for task in suite_of(options).tasks if options and not options.limit else ():
            number = study.num_questions.get(task.column)
            if task.questions and number not in (None, task.questions):
                weaknesses.append(
                    f"{task.column}: {number:,} questions were answered, but the suite has "
                    f"{task.questions:,}"
                )
    if (looks := len(read_history(folder, "looked"))) > 1:
        weaknesses.append(
            f"`compare` has computed {looks} verdicts, each from a different set of runs. Each "
            "verdict is another chance of a wrong answer, so the p-values of this verdict are "
            f"multiplied by {looks}"
        )
    study = replace(study, cautions=weaknesses, problems=problems)
    write(folder / STUDY_RESULT, json.dumps(asdict(study), indent=1) + "\n")
    write_report(study, folder)
    return study


def audit(runs: list[RunFiles], folder: Path) -> list[str]:
    """Return the problems of a study's runs, each a sentence with place, finding and remedy.

    folder: the study's.
    """
    trained = [run for run in runs if run.num_steps is not None]
    numbers = [run.num_steps for run in trained]
    steps = _most_common(numbers)
    problems = [*_deviations(trained, numbers, "another number of steps than the other runs")]
    # Pre-training and new adapters draw their starting weights by the seed.
    draws_weights = any(
        run.recipe.task == "pretrain" or trains_adapter(run.recipe.model) for run in runs
    )
    for part, finding in EQUAL.items():
        by_seed = part in AT_A_SEED if draws_weights else part == "batches"
        for seed in dict.fromkeys(run.seed if by_seed else None for run in runs):
            compared = [run for run in runs if seed in (None, run.seed)]
            compared = [run for run in compared if run.record.get("identity")]
            # Those of another number of steps differ anyway.
            if part in AT_THE_END:
                compared = [run for run in compared if run.num_steps and run.num_steps == steps]
            parts = [run.record["identity"].get(part) for run in compared]
            where = f" with seed {seed}" if by_seed else ""
            problems += _deviations(compared, parts, f"{finding} than the other runs{where}")
    for run in trained:
        problems += _evaluation_problems(run, RunFolder(folder / run.place))
    return [*problems, *_copies(trained, folder)]


def _deviations(runs: list[RunFiles], values: list[Any], finding: str) -> Iterator[str]:
    """Yield a problem for each candidate with a run whose value is not that of most runs, or is
    unknown.
    """
    # The usual value is that of most runs: one accident is then named by itself, and not all
    # others.
    usual = _most_common(values)
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


def _most_common(values: list[Any]) -> Any:
    """Return the value that occurs most often, the first of several; None of no value.

    Values may be dicts.
    """
    texts = [json.dumps(value, sort_keys=True, default=str) for value in values]
    return values[texts.index(Counter(texts).most_common(1)[0][0])] if values else None


def _evaluation_problems(run: RunFiles, folder: RunFolder) -> Iterator[str]:
    """Yield what is wrong with the benchmark scores of a final run: other weights or questions."""
    options = run.recipe.eval if run.stage == "verdict" else None
    results = read_results(folder.evaluation(options.name)) if options else None
    if options is None or results is None:
        return
    remedy = f"evaluate the run again (soren-align eval {folder})"
    weights = (run.record.get("written") or {}).get("weights_sha256")
    # An evaluation of an earlier model in this folder would otherwise count as this run's.
    if results["rows"][-1].get("weights_sha256") != weights:
        finding = "the evaluated weights are not the weights of this run's model"
        yield f"{run.place}: {finding}; {remedy}"
    try:
        points = [*read_points(folder.evaluation(options.name)).values()][-1]
    except UserError as error:
        yield str(error)
        return
    if missing := [t.column for t in suite_of(options).tasks if t.column not in points]:
        yield f"{run.place}: no question of {', '.join(missing)} was answered; {remedy}"


def _copies(runs: list[RunFiles], folder: Path) -> Iterator[str]:
    """Yield runs whose results are those of other weights, as after a folder was copied.

    Two trainings on other batches never end with equal weights, and other weights never give the
    same losses and answers to the last digit.
    """
    batches: dict[str, tuple[RunFiles, Any]] = {}
    weights: dict[tuple[str, str], tuple[RunFiles, Any]] = {}
    for run in runs:
        own = (run.record.get("written") or {}).get("weights_sha256")
        if own is None:
            continue
        identity = run.record.get("identity") or {}
        other, theirs = batches.setdefault(own, (run, identity.get("batches")))
        if theirs != identity.get("batches"):
            finding = f"has the same weights as {other.place}, although the two runs trained on"
            yield f"{run.place}: {finding} different batches; {MATCHED}"
        for name, digest in _results(run, RunFolder(folder / run.place)):
            other, theirs = weights.setdefault((name, digest), (run, own))
            if theirs != own:
                finding = f"has the same {name} as {other.place}, although their weights differ"
                yield f"{run.place}: {finding}; {MATCHED}"


def _results(run: RunFiles, folder: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield the hashes of a final run's held-out losses, and of its answers to questions."""
    if run.stage == "verdict" and folder.held_out.is_file():
        yield "held-out losses", file_sha256(folder.held_out)
    options = run.recipe.eval if run.stage == "verdict" else None
    results = read_results(folder.evaluation(options.name)) if options else None
    if options and results:
        samples = folder.evaluation(options.name) / "samples" / results["rows"][-1]["name"]
        if files := sorted(samples.glob("*.jsonl")):
            texts = "".join(file_sha256(file) for file in files)
            yield "answers", hashlib.sha256(texts.encode()).hexdigest()


def accidents(study: Study, runs: list[RunFiles], folder: Path) -> Iterator[str]:
    """Yield records that are incomplete or do not fit together, each a caution."""
    if bare := [
        run.place
        for run in runs
        if not run.record.get("identity")
        or (run.num_steps is not None and not run.record.get("written"))
    ]:
        more = f" and {len(bare) - 1} more runs" if len(bare) > 1 else ""
        yield f"{bare[0]}{more}: run.json has no hashes, so equal terms were not checked"
    for run in (run for candidate in study.candidates for run in candidate.verdict):
        last = run.curve[-1].metric if run.curve else None
        if run.metric is None or last is None:
            continue
        if abs(run.metric - last) > FAR * max(abs(run.metric), abs(last)):
            yield (
                f"{run.folder}: held_out.json has a mean of {run.metric:.4g}, but the last "
                f"evaluation {last:.4g}; the file may be another run's"
            )


def cautions(study: Study, file: StudyFile, runs: list[RunFiles]) -> Iterator[str]:
    """Yield the cautions about the search, the declared terms and the data, each a sentence."""
    yield from _search_cautions(study, file)

    # Unequal terms that the study declares.
    numbers = {name: len(file.free(name)) for name in file.candidates}
    if len({*numbers.values()}) > 1:
        yield (
            f"the candidates have different numbers of searched keys ({_counts(numbers)}) but "
            "equal numbers of trials, so the candidates with more keys are tuned less thoroughly"
        )
    own = {name: flat(section.set) for name, section in file.candidates.items()}
    # Keys outside of the optimizer's section make another training, of which the verdict would call
    # the difference one of optimizers.
    for name in own:
        keys = sorted(key for key in own[name] if not key.startswith("optimizer."))
        if any(own[other].get(key) != own[name][key] for other in own for key in keys):
            yield (
                f"{name}: its {', '.join(keys)} differ from the other candidates', so not only "
                "the optimizer differs"
            )

    # Few examples or seeds.
    held_out = [run.record.get("data", {}).get("eval") or {} for run in runs]
    sizes = [each.get("num_kept", each.get("num_examples")) for each in held_out]
    number = min((each for each in sizes if isinstance(each, int)), default=None)
    if number is not None and number < MANY_EXAMPLES:
        finding = f"the held-out metric is a mean over only {number} examples"
        yield f"{finding}; hold out more examples for narrower intervals"
    if any(
        run.recipe.run.early_stopping or run.recipe.trainer.get("load_best_model_at_end")
        for run in runs
    ):
        yield (
            "early stopping or trainer.load_best_model_at_end chose the step of each model by the "
            "same held-out examples on which the verdict compares the models, so every held-out "
            "loss is too low"
        )
    if (number := len(file.verdict.seeds)) < MANY_SEEDS:
        yield (
            f"the verdict has {number} seeds; with {MANY_SEEDS} or more, the intervals are much "
            "narrower"
        )

    commits = sorted({str(run.record["commit"])[:12] for run in runs if run.record.get("commit")})
    if len(commits) > 1:
        names = ", ".join(commits[:3])
        yield f"the runs were made by {len(commits)} different commits of soren-align ({names})"
    if any(str(run.record.get("commit")).endswith("-dirty") for run in runs):
        yield (
            "runs were made by an edited checkout of soren-align (-dirty), so no commit has the "
            "code of these runs"
        )


def _search_cautions(study: Study, file: StudyFile) -> Iterator[str]:
    """Yield what weakens the search: edges, lost trials, unequal or unusual numbers of them."""
    for candidate in study.candidates:
        for key, end in candidate.at_edge.items():
            word = "largest" if end == "high" else "smallest"
            yield (
                f"{candidate.name}: the selected {key} is the {word} value that was tried, and a "
                "better value may lie beyond this value; extend the search (--yes)"
            )
        for status in ("diverged", "failed"):
            if number := sum(run.status == status for run in candidate.trials):
                yield f"{candidate.name}: {number} of {len(candidate.trials)} trials {status}"
        if candidate.selected is None:
            yield (
                f"{candidate.name}: no trial has finished, so there is no verdict on this candidate"
            )
    finished = {each.name: _num_finished(each.trials) for each in study.candidates}
    if len({*finished.values()}) > 1:
        yield (
            f"the candidates have unequal numbers of finished trials ({_counts(finished)}): more "
            "trials find better settings"
        )
    declared = file.search.trials * len(file.search.seeds)
    number = max((len(each.trials) for each in study.candidates), default=declared)
    if number > declared:
        yield f"the search was extended from {declared} to {number} trials of each candidate"


def _num_finished(runs: list[Run]) -> int:
    return sum(run.status == "finished" for run in runs)


def _counts(numbers: Mapping[str, int]) -> str:
    """Return "adamw 5, soren 4"."""
    return ", ".join(f"{name} {number}" for name, number in numbers.items())
