"""The progress of a study: the runs that can start, those that have ended, and the Study that they make."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..core.errors import UserError
from ..core.files import read_json, write
from ..recipe import Recipe, differences, load_resolved, to_yaml, training_part
from ..run.folder import RunFolder
from ..tasks import TASKS
from .config import Range, StudyFile, first_run, load_resolved_study, recipe_of_run, study_to_yaml
from .runs import by_trial, edges, read_run, read_scores, search_runs, select, verdict_runs
from .search import JOURNAL, Trials, beyond, drop_incomplete_line
from .study import ENDED, Candidate, Run, Study, metric_of_trial

STUDY_FILE, STUDY_RESULT, EXTENSIONS = "study.yaml", "study.json", "extensions.json"
CHANGEABLE: Any = dict.fromkeys(("title", "jobs", "budget_hours", "output_dir"), True) | {"search": {"keep_models"}}
"""Keys of a study's file that may change while it runs: they change no run."""


@dataclass(frozen=True)
class Extension:
    """Further trials of every candidate, after those of the study's file and of earlier extensions."""

    trials: int
    spaces: dict[str, dict[str, dict[str, Any]]]
    """By candidate and key: the interval beyond the end at which the best value lay."""


def create(folder: Path, study: StudyFile) -> None:
    """Create a study's folder, or compare it with the study. The caller holds the study's lock.

    Raises UserError, with the differences, if the folder is another study's.
    """
    drop_incomplete_line(folder)
    recipes = {name: recipe_of_run(study, first_run(study, name)) for name in study.candidates}
    files = {name: folder / "candidates" / f"{name}.yaml" for name in recipes}
    changed = []
    if (folder / STUDY_FILE).is_file():
        before = load_resolved_study(folder / STUDY_FILE)
        changed = differences(before.model_dump(exclude=CHANGEABLE), study.model_dump(exclude=CHANGEABLE))
    for name, recipe in recipes.items():
        if not changed and files[name].is_file():
            started = load_resolved(files[name])
            changed += [f"{name}: {line}" for line in differences(training_part(started), training_part(recipe))]
    if changed:
        raise UserError(
            f"{folder}: holds another study:",
            *(f"  {line}" for line in changed),
            "Restore these to continue, or choose another output_dir; --extend adds trials to a study",
        )
    write(folder / STUDY_FILE, study_to_yaml(study))  # first: with it the folder is a study's
    (folder / "candidates").mkdir(exist_ok=True)
    for name in (name for name in recipes if not files[name].is_file()):  # of a command that was killed here
        write(files[name], to_yaml(recipes[name]))


class Progress:
    """The runs of the study in a folder. `failures`: reasons of runs that this command has seen fail, by folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.study = load_resolved_study(folder / STUDY_FILE)
        task = load_resolved(next((folder / "candidates").glob("*.yaml"))).task
        self.higher_is_better = TASKS[task].higher_is_better[self.study.search.metric]
        self.trials = Trials(folder, self.study, higher_is_better=self.higher_is_better)
        self.failures: dict[str, str] = {}
        self._ended: dict[str, Run] = {}

    def update(self) -> list[Run]:
        """Record results, draw trials, and return all runs that can start, run or have ended, in their order.

        The caller holds the study's lock.
        """
        drop_incomplete_line(self.folder)  # of another command, killed since `create`
        while True:
            runs = self.search()
            for name in self.study.candidates:
                for number, trial in by_trial(run for run in runs if run.candidate == name).items():
                    if all(run.status in ENDED for run in trial):
                        is_failure = any(run.status == "failed" for run in trial)
                        metric = None if is_failure else metric_of_trial(trial)
                        self.trials.record(name, number, metric, is_failure=is_failure)
            if not self._draw(runs):
                return runs + [run for name in self.study.candidates for run in self.verdict(name, runs)]

    def search(self) -> list[Run]:
        """The search's runs, without those that the budget excludes."""
        drawn = {name: self.trials.drawn(name) for name in self.study.candidates}
        runs = [self._read(run) for run in search_runs(self.study, drawn)]
        if self._is_spent(runs):
            started = max(run.number for run in runs if run.status != "waiting")
            runs = [run for run in runs if run.number <= started]
        return runs

    def verdict(self, candidate: str, runs: list[Run]) -> list[Run]:
        """The verdict's runs of a candidate; none before its search has ended. runs: the whole search's."""
        own = [run for run in runs if run.candidate == candidate]
        number = select(own, higher_is_better=self.higher_is_better)
        complete = len(by_trial(own)) == self._num_trials() or self._is_spent(runs)
        if number is None or not complete or any(run.status not in ENDED for run in own):
            return []
        parameters = by_trial(own)[number][0].parameters
        return [self._read(run) for run in verdict_runs(self.study, candidate, parameters)]

    def extend(self) -> dict[str, dict[str, str]]:
        """Add an extension where a selected value lies at an end of its space; returns the ends by candidate.

        Half of the study's trials for every candidate, those of a widened one beyond its end. Raises UserError if the
        search has not ended, or if a recipe refuses the values beyond.
        """
        runs = self.update()
        search = [run for run in runs if run.stage == "search"]
        if any(run.status not in ENDED for run in search) or self.study.search.method == "grid":
            reason = "is a grid; widen its lists in another study" if self.study.search.method == "grid" else None
            raise UserError(f"{self.folder}: the search {reason or 'has not ended; rerun without --extend first'}")
        ends, spaces = {}, {}
        for name in self.study.candidates:
            own = [run for run in search if run.candidate == name]
            number = select(own, higher_is_better=self.higher_is_better)
            at_edge = edges(self.study, name, own, number) if number is not None else {}
            for key, end in at_edge.items():
                if isinstance(values := self.study.free(name)[key], Range):
                    tried = [run.parameters[key] for run in own]
                    wider = beyond(self._widest(name, key, values), tried, end)
                    self._check(name, own, key, wider.low if end == "low" else wider.high)
                    ends.setdefault(name, {})[key] = end
                    spaces.setdefault(name, {})[key] = wider.model_dump()
        if ends:
            extensions = [*self._extensions(), Extension(max(2, self.study.search.trials // 2), spaces)]
            write(self.folder / EXTENSIONS, json.dumps([asdict(each) for each in extensions], indent=2) + "\n")
        return ends

    def _read(self, run: Run) -> Run:
        if run.folder in self._ended and self._ended[run.folder].parameters == run.parameters:
            return self._ended[run.folder]
        folder = RunFolder(self.folder / run.folder)
        if run.stage == "verdict" and not self.is_own(run, folder):
            return run  # of the setting that was selected before an extension
        if run.stage == "search" and not self.is_own(run, folder):
            raise UserError(
                f"{folder}: its recipe.yaml has other values than trial {run.number + 1} of {run.candidate} in "
                f"{self.folder / JOURNAL}: one of both was changed. Remove the journal, whose trials are drawn again "
                "as they were, or this folder; then rerun the same command"
            )
        run = read_run(run, folder, self.study.search.metric)
        if run.status in ENDED:
            self._ended[run.folder] = run
        elif run.folder in self.failures:
            run = replace(run, status="failed", reason=self.failures[run.folder])
        return run

    def is_own(self, run: Run, folder: RunFolder) -> bool:
        """Whether a folder's recipe, if it has one, has the run's parameters."""
        try:
            recipe = load_resolved(folder.recipe)
        except UserError:
            if folder.recipe.is_file():
                raise
            return True  # not started yet, or being started again by another command
        values = recipe.model_dump()
        for key, value in run.parameters.items():
            *sections, last = key.split(".")
            node: Any = values
            for part in sections:
                if not isinstance(node := node.get(part), dict):
                    return False
            node[last] = value
        try:
            return Recipe.model_validate(values) == recipe  # `map: sns` is a section there
        except ValidationError:
            return False

    def _is_spent(self, runs: list[Run]) -> bool:
        hours = sum(run.seconds or 0 for run in runs) / 3600
        return self.study.budget_hours is not None and hours >= self.study.budget_hours

    def _extensions(self) -> list[Extension]:
        file = self.folder / EXTENSIONS
        return [Extension(**each) for each in read_json(file)] if file.is_file() else []

    def _num_trials(self) -> int:
        return self.study.search.trials + sum(each.trials for each in self._extensions())

    def _widest(self, name: str, key: str, values: Range) -> Range:
        """The interval with its earlier extensions."""
        for each in self._extensions():
            if key in each.spaces.get(name, {}):
                own = each.spaces[name][key]
                values = values.model_copy(
                    update={"low": min(values.low, own["low"]), "high": max(values.high, own["high"])}
                )
        return values

    def _space(self, name: str, number: int) -> Mapping[str, Range]:
        """The intervals of an extension for a trial with this number."""
        first = self.study.search.trials
        for each in self._extensions():
            if first <= number < first + each.trials:
                return {key: Range(**values) for key, values in each.spaces.get(name, {}).items()}
            first += each.trials
        return {}

    def _draw(self, runs: list[Run]) -> bool:
        """Draw trials; returns whether there are new ones. Of TPE one, once all before it have a result."""
        chained, is_spent = self.study.search.method == "tpe", self._is_spent(runs)
        has_new = False
        for name in self.study.candidates:
            number = len(self.trials.drawn(name))
            while number < self._num_trials():
                if is_spent or (chained and self.trials.num_recorded(name) < number):
                    break
                self.trials.draw(name, self._space(name, number))
                number, has_new = number + 1, True
        return has_new

    def _check(self, name: str, own: list[Run], key: str, value: float) -> None:
        """Raise UserError if the candidate's recipe refuses the value."""
        drawn = {each: own[0].parameters[each] for each in self.study.free(name)} | {key: value}
        recipe_of_run(self.study, replace(own[0], parameters=self.study.parameters(name, drawn)))


def read_study(folder: Path, failures: Mapping[str, str] | None = None) -> Study:
    """The study in a folder as plain data, without differences and problems. Nothing is written.

    failures: reasons of runs that ended without a record, by folder.
    """
    progress = Progress(folder)
    progress.failures |= failures or {}
    study, search = progress.study, progress.search()
    candidates, base_scores = [], None
    for name, section in study.candidates.items():
        own = [run for run in search if run.candidate == name]
        selected = select(own, higher_is_better=progress.higher_is_better)
        at_edge = edges(study, name, own, selected) if selected is not None else {}
        space = study.model_dump()["search"]["space"] | section.model_dump()["space"]
        verdict = progress.verdict(name, search)
        candidates.append(Candidate(name, section.set, space, own, selected, at_edge, verdict))
        for run in verdict:
            if base_scores is None and run.scores:
                base_scores = read_scores(RunFolder(folder / run.folder))[0]
    record = next((RunFolder(folder / r.folder).read() or {} for c in candidates for r in c.trials if r.curve), {})
    return Study(
        name=study.title or folder.resolve().name,
        file=study.model_dump(),
        higher_is_better=progress.higher_is_better,
        candidates=candidates,
        base_scores=base_scores,
        command=f"soren-align compare {folder / STUDY_FILE}",
        versions=record.get("versions", {}),
        machine=", ".join(str(record[key]) for key in ("device", "platform") if key in record),
    )


def write_study(folder: Path, study: Study) -> None:
    """Write study.json."""
    write(folder / STUDY_RESULT, json.dumps(asdict(study), indent=1) + "\n")
