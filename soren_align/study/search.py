"""Choose the trials of a study, and list the runs that can start and the runs that have ended.

A trial's parameters, and its result, are recorded by Optuna's journal in the folder. Trial i of a candidate depends on
the study, on i and, for TPE, on the candidate's trials before it: not on the order in which runs end, nor on kills. A
trial is one line of the journal, so that a kill leaves none incomplete. Callers hold the study's lock.
"""

import hashlib
import io
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import ValidationError
from scipy.stats import qmc

from ..core.document import dump
from ..core.errors import UserError
from ..core.files import drop_incomplete_line, read_json, write
from ..recipe import Recipe, differences, load_resolved, to_yaml, training_part
from ..run.folder import RunFolder
from ..run.provenance import read_declaration
from ..tasks import TASKS
from .config import Range, StudyFile, first_run, load_resolved_study, recipe_of_run, verdict_runs
from .declaration import CHANGEABLE, note, write_declaration
from .runs import STAGES, edges, read_run, read_scores, select
from .study import ENDED, Candidate, Run, Study, by_trial, metric_of_trial

STUDY_FILE, STUDY_RESULT, EXTENSIONS, JOURNAL = "study.yaml", "study.json", "extensions.json", "optuna.journal"
WIDER = 0.5
"""How much wider an interval becomes at an end, as a share of its width."""
MOST_STARTING_TRIALS = 10
"""Of TPE: as many trials, or half of them, are drawn as by `random`. Optuna's default is 10."""
End = Literal["low", "high"]


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
    drop_incomplete_line(folder / JOURNAL)
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
            f"{folder}: contains another study, in which these values differ:",
            *(f"  {line}" for line in changed),
            "Restore these values to continue, or choose another output_dir; --extend adds trials to a study",
        )
    write(folder / STUDY_FILE, dump(study.model_dump()))  # first: with it the folder is a study's
    write_declaration(folder, study, recipes)
    (folder / "candidates").mkdir(exist_ok=True)
    for name in (name for name in recipes if not files[name].is_file()):  # of a command that was killed here
        write(files[name], to_yaml(recipes[name]))


class Progress:
    """The runs of the study in a folder. `failures`: reasons of runs that this command has seen fail, by folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.study = load_resolved_study(folder / STUDY_FILE)
        first = folder / "candidates" / f"{next(iter(self.study.candidates))}.yaml"
        metrics = TASKS[load_resolved(first).task].higher_is_better
        if (metric := self.study.search.metric) not in metrics:
            raise UserError(
                f"{folder / STUDY_FILE}: search.metric: found {metric!r}, but only {' or '.join(metrics)} selects "
                "settings; "
                "restore this file, which was edited or written by another version"
            )
        self.higher_is_better = metrics[metric]
        self.trials = Trials(folder, self.study, higher_is_better=self.higher_is_better)
        self.failures: dict[str, str] = {}
        self._ended: dict[str, Run] = {}

    def update(self) -> list[Run]:
        """Record results, draw trials, and return all runs that can start, run or have ended, in their order.

        The caller holds the study's lock.
        """
        drop_incomplete_line(self.folder / JOURNAL)  # of another command, killed since `create`
        while True:
            runs = self.search()
            for name in self.study.candidates:
                for number, trial in by_trial(run for run in runs if run.candidate == name).items():
                    if all(run.status in ENDED for run in trial):
                        is_failure = any(run.status == "failed" for run in trial)
                        metric = None if is_failure else metric_of_trial(trial)
                        self.trials.record(name, number, metric, is_failure=is_failure)
            chained, is_spent, has_new = self.study.search.method == "tpe", self._is_spent(runs), False
            spaces: list[dict[str, Any]] = [{}] * self.study.search.trials  # by trial, those of its extension
            for extension in self._extensions():
                spaces += [extension.spaces] * extension.trials
            for name in self.study.candidates:
                for number in range(len(self.trials.frozen_trials(name)), len(spaces)):
                    num_recorded = sum(trial.state.is_finished() for trial in self.trials.frozen_trials(name))
                    if is_spent or (chained and num_recorded < number):
                        break  # of TPE one, once all before it have a result
                    intervals = spaces[number].get(name, {}).items()
                    self.trials.draw(name, {key: Range(**values) for key, values in intervals})
                    has_new = True
            if not has_new:
                final = [run for name in self.study.candidates for run in self.candidate(name, runs).verdict]
                # A seed of all candidates before the next: a load that changes meanwhile slows all of them alike.
                return runs + sorted(final, key=lambda run: (run.number, run.draw or 0))

    def search(self) -> list[Run]:
        """The search's runs of the drawn trials: trial 0 of every candidate, then trial 1, ...; within the budget."""
        drawn = {name: self.trials.frozen_trials(name) for name in self.study.candidates}
        seeds, runs = self.study.search.seeds, []
        for number in range(max(map(len, drawn.values()), default=0)):
            for name in (name for name, trials in drawn.items() if number < len(trials)):
                parameters = self.study.parameters(name, drawn[name][number].params)
                for seed in seeds:
                    folder = f"search/{name}/{number:02}{f'-{seed}' if len(seeds) > 1 else ''}"
                    runs.append(self._read(Run(name, "search", number, seed, folder, parameters, "waiting")))
        if self._is_spent(runs):
            started = max(run.number for run in runs if run.status != "waiting")
            runs = [run for run in runs if run.number <= started]
        return runs

    def candidate(self, name: str, runs: list[Run]) -> Candidate:
        """A candidate with the runs of its selected setting, one per fresh seed and draw; none before its search ended.

        runs: the whole search's.
        """
        section, own = self.study.candidates[name], [run for run in runs if run.candidate == name]
        selected = select(own, higher_is_better=self.higher_is_better)
        at_edge = edges(self.study, name, own, selected) if selected is not None else {}
        space = self.study.search.model_dump()["space"] | section.model_dump()["space"]
        trials, verdict = by_trial(own), []
        complete = len(trials) == self._num_trials() or self._is_spent(runs)
        if selected is not None and complete and all(run.status in ENDED for run in own):
            verdict = [self._read(run) for run in verdict_runs(self.study, name, trials[selected][0].parameters)]
        return Candidate(name, section.set, space, own, selected, at_edge, verdict)

    def num_runs(self, runs: list[Run]) -> dict[str, int]:
        """The number of runs of each stage that there will be, of which `update` has returned some."""
        num = {stage: sum(run.stage == stage for run in runs) for stage in STAGES}
        search = [run for run in runs if run.stage == "search"]
        if not self._is_spent(search):
            num["search"] = len(self.study.candidates) * self._num_trials() * len(self.study.search.seeds)
        if len(search) < num["search"] or any(run.status not in ENDED for run in search):
            num["verdict"] = sum(len(verdict_runs(self.study, name, {})) for name in self.study.candidates)
        return num

    def _num_trials(self) -> int:
        """The trials of each candidate, with those of extensions."""
        return self.study.search.trials + sum(extension.trials for extension in self._extensions())

    def extend(self) -> dict[str, dict[str, str]]:
        """Add an extension where a selected value lies at an end of its space; returns the ends by candidate.

        Half of the study's trials for every candidate, those of a widened one beyond its end. Raises UserError if the
        search has not ended, or if a recipe refuses the values beyond.
        """
        runs = self.update()
        search = [run for run in runs if run.stage == "search"]
        if any(run.status not in ENDED for run in search) or self.study.search.method == "grid":
            reason = "is a grid; write longer lists in another study" if self.study.search.method == "grid" else None
            raise UserError(f"{self.folder}: the search {reason or 'has not ended; rerun without --extend first'}")
        ends, spaces = {}, {}
        for name in self.study.candidates:
            candidate = self.candidate(name, search)
            own = candidate.trials
            for key, end in candidate.at_edge.items():
                if not isinstance(values := self.study.free(name)[key], Range):
                    continue
                for earlier in (each.spaces.get(name, {}).get(key) for each in self._extensions()):
                    if earlier:
                        low, high = min(values.low, earlier["low"]), max(values.high, earlier["high"])
                        values = values.model_copy(update={"low": low, "high": high})
                wider = beyond(values, [run.parameters[key] for run in own], end)
                # Raises UserError if the candidate's recipe refuses the outermost value.
                drawn = {each: own[0].parameters[each] for each in self.study.free(name)}
                drawn[key] = wider.low if end == "low" else wider.high
                recipe_of_run(self.study, replace(own[0], parameters=self.study.parameters(name, drawn)))
                ends.setdefault(name, {})[key] = end
                spaces.setdefault(name, {})[key] = wider.model_dump()
        if ends:
            extensions = [*self._extensions(), Extension(max(2, self.study.search.trials // 2), spaces)]
            write(self.folder / EXTENSIONS, json.dumps([asdict(each) for each in extensions], indent=2) + "\n")
            note(self.folder, "extended", ends=ends)
        return ends

    def _read(self, run: Run) -> Run:
        if run.folder in self._ended and self._ended[run.folder].parameters == run.parameters:
            return self._ended[run.folder]
        folder = RunFolder(self.folder / run.folder)
        if not self.is_own(run, folder):
            if run.stage == "verdict":
                return run  # of the setting that was selected before an extension
            raise UserError(
                f"{folder}: recipe.yaml has other values than trial {run.number + 1} of {run.candidate} in "
                f"{self.folder / JOURNAL}, because one of the two files was changed. Remove the journal to draw the "
                "same trials again, or remove this run's folder to train the trial again; then rerun the same command"
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


def read_study(folder: Path, failures: Mapping[str, str] | None = None) -> Study:
    """The study in a folder as plain data, without differences and problems. Nothing is written.

    failures: reasons of runs that ended without a record, by folder.
    """
    progress = Progress(folder)
    progress.failures |= failures or {}
    study, search = progress.study, progress.search()
    candidates = [progress.candidate(name, search) for name in study.candidates]
    scored = next((run for candidate in candidates for run in candidate.verdict if run.scores), None)
    record = next((RunFolder(folder / r.folder).read() or {} for c in candidates for r in c.trials if r.curve), {})
    declaration = ""
    with suppress(UserError):  # the audit reports it
        declaration = read_declaration(folder)["sha256"]
    return Study(
        name=study.title or folder.resolve().name,
        file=study.model_dump(),
        higher_is_better=progress.higher_is_better,
        candidates=candidates,
        base_scores=read_scores(RunFolder(folder / scored.folder))[0] if scored else None,
        command=f"soren-align compare {folder / STUDY_FILE}",
        versions=record.get("versions", {}),
        machine=", ".join(str(record[key]) for key in ("device", "platform") if key in record),
        declaration=declaration,
    )


class Trials:
    """The trials of all candidates: one Optuna study each, named like the candidate, in the folder's journal."""

    def __init__(self, folder: Path, study: StudyFile, *, higher_is_better: bool):
        """Open the journal, which may be new, and then gets a line per candidate; nothing is drawn.

        Raises UserError, with the line, if it is damaged.
        """
        self.study = study
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = folder / JOURNAL
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            _refuse_damaged(journal)
            self._storage = JournalStorage(JournalFileBackend(str(journal), _NoLock(str(journal))))
        direction = "maximize" if higher_is_better else "minimize"
        # Not load_if_exists, with which Optuna adds a line to the journal whenever it is opened.
        known = optuna.get_all_study_names(self._storage)
        self._studies = {
            name: optuna.load_study(storage=self._storage, study_name=name)
            if name in known
            else optuna.create_study(storage=self._storage, study_name=name, direction=direction)
            for name in study.candidates
        }

    def frozen_trials(self, candidate: str) -> list[FrozenTrial]:
        """The trials until now. params: the searched values, of the keys that are not equal to another one."""
        return self._studies[candidate].get_trials(deepcopy=False)

    def draw(self, candidate: str, space: Mapping[str, Range] | None = None) -> None:
        """Draw one more trial. TPE's needs the results of all before it (`record`).

        space: intervals of an extension, in the place of the study's.
        """
        search, frozen = self.study.search, self.frozen_trials(candidate)
        number, free = len(frozen), self.study.free(candidate)
        distributions: dict[str, BaseDistribution] = {
            key: FloatDistribution(each.low, each.high, log=each.log)
            if isinstance(each, Range)
            else CategoricalDistribution(each)
            for key, each in {**free, **(space or {})}.items()
        }
        if search.method == "grid":
            points = product(*(values for values in free.values() if isinstance(values, list)))
            params = dict(zip(free, next(islice(points, number, None)), strict=True))  # the last key changes fastest
        elif search.method == "random" or number < min(search.trials // 2, MOST_STARTING_TRIALS):
            params = _sobol_point(distributions, number, search.sampling_seed)
        else:
            digest = hashlib.sha256(f"{search.sampling_seed} {number}".encode()).digest()
            sampler = optuna.samplers.TPESampler(seed=int.from_bytes(digest[:4], "little"), n_startup_trials=0)
            memory = optuna.create_study(sampler=sampler, direction=self._studies[candidate].direction)
            memory.add_trials(frozen)
            params = memory.ask(distributions).params
        drawn = create_trial(state=TrialState.RUNNING, params=params, distributions=distributions)
        self._studies[candidate].add_trial(drawn)

    def record(self, candidate: str, number: int, value: float | None, *, is_failure: bool) -> None:
        """Record a trial's metric; None for a diverged trial, the worst. A recorded one is unchanged."""
        state = TrialState.FAIL if is_failure else TrialState.COMPLETE
        if value is None and not is_failure:
            value = float("-inf" if self._studies[candidate].direction.name == "MAXIMIZE" else "inf")
        self._studies[candidate].tell(number, None if is_failure else value, state=state, skip_if_finished=True)


def _sobol_point(space: dict[str, BaseDistribution], number: int, seed: int) -> dict[str, Any]:
    """The parameters at a point of a scrambled Sobol sequence, the same point of the unit cube for every candidate.

    A point is uniformly distributed, and the first few fill the space evenly: of six independent draws, none may lie in
    the middle half (1.6%), and the best setting of every candidate would be missed.
    """
    if not space:
        return {}
    sequence = qmc.Sobol(len(space), scramble=True, rng=seed)
    if number:  # scipy's fast_forward(0) raises OverflowError
        sequence.fast_forward(number)
    point: dict[str, Any] = {}
    for (key, values), quantile in zip(space.items(), sequence.random(1)[0].tolist(), strict=True):
        if isinstance(values, CategoricalDistribution):
            point[key] = values.choices[int(quantile * len(values.choices))]
            continue
        assert isinstance(values, FloatDistribution)
        low, high = values.low, values.high
        point[key] = low * (high / low) ** quantile if values.log else low + (high - low) * quantile
    return point


def beyond(values: Range, tried: Iterable[float], end: End) -> Range:
    """The interval from the outermost value that was tried to an end that is WIDER of the interval's width further out.

    On a logarithmic axis where the interval is logarithmic. An interval from 0 does not extend below 0.
    """
    if values.log:
        factor = (values.high / values.low) ** WIDER
        low, high = values.low / factor, values.high * factor
    else:
        margin = (values.high - values.low) * WIDER
        low = values.low - margin if values.low < 0 else max(values.low - margin, 0.0)
        high = values.high + margin
    if end == "low":
        return Range(low=low, high=min(tried), log=values.log)
    return Range(low=max(tried), high=high, log=values.log)


class _NoLock(JournalFileOpenLock):
    """The journal's lock: none, since callers hold the study's, which ends with a killed process; Optuna's own locks
    are files that a killed process leaves behind."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        """Nothing is held."""


class _FirstLines(BaseJournalBackend):
    """The lines of a journal up to `end`, which are only read."""

    def __init__(self, lines: list[bytes]):
        self.lines, self.end = lines, 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        return (json.loads(line) for line in self.lines[log_number_from : self.end])

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        raise NotImplementedError


def _refuse_damaged(journal: Path) -> None:
    """Raise UserError with the first line of a journal that Optuna cannot read, or whose trials are none."""
    # The lines as Optuna reads them: others would split at \r, and decode without the line's end.
    backend = _FirstLines(io.BytesIO(journal.read_bytes()).readlines() if journal.is_file() else [])
    storage = JournalStorage(backend)
    for number in range(1, len(backend.lines) + 1):
        backend.end = number
        try:
            for study in storage.get_all_studies():
                for trial in storage.get_all_trials(study._study_id, deepcopy=False):
                    trial._validate()
        except Exception as error:  # bad JSON or UTF-8, missing keys, values of other types
            raise UserError(
                f"{journal}:{number} is damaged ({type(error).__name__}). Remove this file and rerun the same "
                "command, which draws the same trials again and reads their results from the run folders"
            ) from None
