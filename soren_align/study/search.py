"""Choose the trials of a study, and list the runs that can start and the runs that have ended.

A trial's parameters are a line of TRIALS in the folder; its result is that of its runs. Trial i of
a candidate depends on the study, on i and, for TPE, on the candidate's trials before it: not on the
order in which runs end, nor on kills. Callers hold the study's lock.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from math import inf
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from scipy.stats import qmc

from ..core.document import dump
from ..core.errors import UserError
from ..core.files import append, drop_incomplete_line, read_json, write
from ..recipe import Recipe, differences, load_resolved, to_yaml
from ..run.folder import RunFolder
from ..run.provenance import DECLARATION, read_declaration
from .config import (
    METRICS,
    Range,
    StudyFile,
    Values,
    first_run,
    load_resolved_study,
    recipe_of_run,
    verdict_runs,
)
from .declaration import declare
from .runs import STAGES, edges, read_run, read_scores, select
from .study import ENDED, Candidate, Run, Study, by_number, mean_metric

STUDY_FILE, STUDY_RESULT, EXTENSIONS, TRIALS = (
    "study.yaml",
    "study.json",
    "extensions.json",
    "trials.jsonl",
)
WIDER = 0.5
"""How much wider an interval becomes at an end, as a share of its width."""
MOST_EXTENSIONS = 3
"""The most extensions of a study: a loss that falls with every larger value must not extend it
forever."""
MOST_STARTING_TRIALS = 10
"""The most trials of TPE that are drawn as by `random`; at most half of them are. Optuna's default
is 10."""
Free = Mapping[str, Range | Values]
"""The keys that are searched, and what their values are drawn from."""
End = Literal["low", "high"]


@dataclass(frozen=True)
class Extension:
    """Further trials of every candidate, after those of the study's file and of earlier
    extensions.
    """

    trials: int
    spaces: dict[str, dict[str, dict[str, Any]]]
    """The interval, by candidate and key, beyond the end at which the best value lay."""


def create(folder: Path, study: StudyFile) -> None:
    """Create a study's folder, or compare it with the study. The caller holds the study's lock.

    Raises UserError, with the differences, if the folder is another study's, or if a file of its
    examples or of its suite has changed.
    """
    recipes = {name: recipe_of_run(study, first_run(study, name)) for name in study.candidates}
    declared, file = declare(study, recipes), folder / DECLARATION
    # The declaration is written last: without it, a command was killed here, and no run started.
    if file.is_file():
        before, after = (
            {key: value for key, value in each.items() if key not in ("sha256", "commit")}
            for each in (read_declaration(folder), declared)
        )
        if changed := differences(before, after):
            raise UserError(
                f"{folder}: contains another study, in which these values differ:",
                *(f"  {line}" for line in changed[:20]),
                "Restore these values to continue, or choose another output_dir",
            )
    write(folder / STUDY_FILE, dump(study.model_dump()))  # first: with it the folder is a study's
    (folder / "candidates").mkdir(exist_ok=True)
    for name, recipe in recipes.items():
        write(folder / "candidates" / f"{name}.yaml", to_yaml(recipe))
    if not file.is_file():
        write(file, json.dumps(declared, indent=1) + "\n")


class Progress:
    """The runs of the study in a folder.
    `failures`: reasons of runs that this command has seen fail, by folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.study = load_resolved_study(folder / STUDY_FILE)
        self.higher_is_better = METRICS[self.study.search.metric]
        self.trials = Trials(folder, self.study)
        self.failures: dict[str, str] = {}
        self._ended: dict[str, Run] = {}

    def update(self) -> list[Run]:
        """Draw trials, and return all runs that can start, run or have ended, in their order.

        The caller holds the study's lock.
        """
        self.trials.read()  # another command may have drawn some
        while self._draw(runs := self.search()):
            pass
        final = [
            run for name in self.study.candidates for run in self.candidate(name, runs).verdict
        ]
        # A seed of all candidates before the next: a load that changes meanwhile slows all of them
        # alike.
        return runs + sorted(final, key=lambda run: run.number)

    def _draw(self, runs: list[Run]) -> bool:
        """Draw the trials that can be drawn, and return whether there were any; runs: the
        search's.
        """
        if self._is_spent(runs):
            return False
        # By trial, the intervals of its extension.
        spaces: list[dict[str, Any]] = [{}] * self.study.search.trials
        for extension in self._extensions():
            spaces += [extension.spaces] * extension.trials
        has_new = False
        for name in self.study.candidates:
            results = self._results([run for run in runs if run.candidate == name])
            free: list[Free] = []
            for space in spaces:
                intervals = space.get(name, {}).items()
                wider = {key: Range(**values) for key, values in intervals}
                free.append(self.study.free(name) | wider)
            for number in range(len(self.trials.parameters[name]), len(spaces)):
                if self.study.search.method == "tpe" and len(results) < number:
                    break  # of TPE one, once all before it have a result
                self.trials.draw(name, free[: number + 1], results)
                has_new = True
        return has_new

    def _results(self, runs: list[Run]) -> list[float | None]:
        """Return the metrics of a candidate's trials before the first one that has not ended: None
        of one that failed, the worst of one that diverged. TPE draws the next trial by them.
        """
        worst = -inf if self.higher_is_better else inf
        results: list[float | None] = []
        for trial in by_number(runs).values():
            if any(run.status not in ENDED for run in trial):
                break
            metric = mean_metric(trial)
            is_failure = any(run.status == "failed" for run in trial)
            results.append(None if is_failure else worst if metric is None else metric)
        return results

    def search(self) -> list[Run]:
        """The search's runs of the drawn trials: trial 0 of every candidate, then trial 1, ...;
        within the budget.
        """
        drawn = self.trials.parameters
        seeds, runs = self.study.search.seeds, []
        # A trial of every candidate before the next one: a budget that is spent early gives each as
        # many.
        for number in range(max(map(len, drawn.values()), default=0)):
            for name in (name for name, trials in drawn.items() if number < len(trials)):
                parameters = self.study.parameters(name, drawn[name][number])
                for seed in seeds:
                    folder = f"search/{name}/{number:02}{f'-{seed}' if len(seeds) > 1 else ''}"
                    runs.append(
                        self._read(Run(name, "search", number, seed, folder, parameters, "waiting"))
                    )
        if self._is_spent(runs):
            started = max(run.number for run in runs if run.status != "waiting")
            runs = [run for run in runs if run.number <= started]
        return runs

    def candidate(self, name: str, runs: list[Run]) -> Candidate:
        """A candidate with the runs of its selected setting, one per fresh seed; none before its
        search ended.

        runs: the whole search's.
        """
        section, own = self.study.candidates[name], [run for run in runs if run.candidate == name]
        selected = select(own, higher_is_better=self.higher_is_better)
        at_edge = edges(self.study, name, own, selected) if selected is not None else {}
        space = self.study.search.model_dump()["space"] | section.model_dump()["space"]
        trials, verdict = by_number(own), []
        complete = len(trials) == self._num_trials() or self._is_spent(runs)
        if selected is not None and complete and all(run.status in ENDED for run in own):
            verdict = [
                self._read(run)
                for run in verdict_runs(self.study, name, trials[selected][0].parameters)
            ]
        return Candidate(name, section.set, space, own, selected, at_edge, verdict)

    def num_runs(self, runs: list[Run]) -> dict[str, int]:
        """The number of runs of each stage that there will be, of which `update` has returned
        some.
        """
        num = {stage: sum(run.stage == stage for run in runs) for stage in STAGES}
        search = [run for run in runs if run.stage == "search"]
        if not self._is_spent(search):
            num["search"] = (
                len(self.study.candidates) * self._num_trials() * len(self.study.search.seeds)
            )
        # Which setting wins is not known yet, but the number of its runs is: one for each declared
        # seed.
        if len(search) < num["search"] or any(run.status not in ENDED for run in search):
            num["verdict"] = sum(
                len(verdict_runs(self.study, name, {})) for name in self.study.candidates
            )
        return num

    def _num_trials(self) -> int:
        """The trials of each candidate, with those of extensions."""
        return self.study.search.trials + sum(extension.trials for extension in self._extensions())

    def extension(self, runs: list[Run]) -> "Extension | None":
        """Return the extension that would try values beyond the ends at which selected ones lie:
        half of the study's trials for every candidate. None if there is nothing to extend.

        runs: all of the study. A list of values and a spent budget cannot be extended, and neither
        can an interval that has been extended MOST_EXTENSIONS times, or whose recipe refuses the
        values beyond.
        """
        search = [run for run in runs if run.stage == "search"]
        has_ended = all(run.status in ENDED for run in search)
        if not has_ended or self._is_spent(search) or len(self._extensions()) >= MOST_EXTENSIONS:
            return None
        spaces: dict[str, dict[str, dict[str, Any]]] = {}
        for name in self.study.candidates:
            candidate = self.candidate(name, search)
            for key, end in candidate.at_edge.items():
                values = self.study.free(name)[key]
                if not isinstance(values, Range):
                    continue
                for earlier in (each.spaces.get(name, {}).get(key) for each in self._extensions()):
                    if earlier:
                        low, high = (
                            min(values.low, earlier["low"]),
                            max(values.high, earlier["high"]),
                        )
                        values = values.model_copy(update={"low": low, "high": high})
                first = candidate.trials[0]
                wider = beyond(values, [run.parameters[key] for run in candidate.trials], end)
                drawn = {each: first.parameters[each] for each in self.study.free(name)}
                drawn[key] = wider.low if end == "low" else wider.high
                outermost = replace(first, parameters=self.study.parameters(name, drawn))
                with suppress(UserError):  # such as a momentum of more than 1
                    recipe_of_run(self.study, outermost)
                    spaces.setdefault(name, {})[key] = wider.model_dump()
        return Extension(max(2, self.study.search.trials // 2), spaces) if spaces else None

    def extend(self, extension: "Extension") -> None:
        """Add an extension: its trials are drawn by the next `update`."""
        extensions = [asdict(each) for each in (*self._extensions(), extension)]
        write(self.folder / EXTENSIONS, json.dumps(extensions, indent=2) + "\n")

    def _read(self, run: Run) -> Run:
        # A run that has ended no longer changes, unless another setting was selected: it is read
        # once.
        if run.folder in self._ended and self._ended[run.folder].parameters == run.parameters:
            return self._ended[run.folder]
        folder = RunFolder(self.folder / run.folder)
        if not self.is_own(run, folder):
            if run.stage == "verdict":
                return run  # of the setting that was selected before an extension
            raise UserError(
                f"{folder}: recipe.yaml has other values than trial {run.number + 1} of "
                f"{run.candidate} in {self.folder / TRIALS}, because one of the two files was "
                f"changed. Remove {TRIALS} to draw the same trials again, or remove this run's "
                "folder to train the trial again; then rerun the same command"
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
    scored = next(
        (run for candidate in candidates for run in candidate.verdict if run.scores), None
    )
    record = next(
        (
            RunFolder(folder / r.folder).read() or {}
            for c in candidates
            for r in c.trials
            if r.curve
        ),
        {},
    )
    declaration = ""
    with suppress(UserError):  # the report then shows no hash
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
    """The parameters of all trials, in the order in which they were drawn: a line of TRIALS
    each.
    """

    def __init__(self, folder: Path, study: StudyFile):
        """Read the trials that were drawn. Raises UserError as `read` does."""
        self.study, self.file = study, folder / TRIALS
        self.parameters: dict[str, list[dict[str, Any]]] = {}
        """The searched values by candidate and trial, of the keys that are not equal to another
        one."""
        self.read()

    def read(self) -> None:
        """Read the file again. Raises UserError, with the line, if it is damaged."""
        self.parameters = {name: [] for name in self.study.candidates}
        lines = self.file.read_bytes().split(b"\n") if self.file.is_file() else [b""]
        # the last one is empty, or a killed command has left it
        for number, line in enumerate(lines[:-1], 1):
            try:
                trial = json.loads(line)
                name, parameters = trial["candidate"], trial["parameters"]
                free = self.study.free(name)
                # The interval of an extension is another one, so that any number is valid.
                is_valid = {
                    key: value in free[key] if isinstance(free[key], list) else type(value) is float
                    for key, value in parameters.items()
                }
                if is_valid.keys() != free.keys() or not all(is_valid.values()):
                    raise ValueError(parameters)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                raise UserError(
                    f"{self.file}:{number} is damaged ({type(error).__name__}). Remove this file "
                    "and rerun the same command, which draws the same trials again and reads "
                    "their results from the run folders"
                ) from None
            self.parameters[name].append(parameters)

    def draw(self, candidate: str, free: Sequence[Free], results: Sequence[float | None]) -> None:
        """Draw one more trial, and append it to the file.

        free: of each trial, this one last; of an extension, with its intervals. results: of all
        trials before, for TPE;
        None: failed.
        """
        search, number = self.study.search, len(self.parameters[candidate])
        if search.method == "grid":
            points = product(*(values for values in free[-1].values() if isinstance(values, list)))
            # The last key changes fastest.
            params = dict(zip(free[-1], next(islice(points, number, None)), strict=True))
        elif search.method == "random" or number < min(search.trials // 2, MOST_STARTING_TRIALS):
            params = _sobol_point(free[-1], number, search.sampling_seed)
        else:
            digest = hashlib.sha256(f"{search.sampling_seed} {number}".encode()).digest()
            higher_is_better = METRICS[search.metric]
            params = _tpe_point(free, self.parameters[candidate], results, higher_is_better, digest)
        drop_incomplete_line(self.file)
        append(self.file, json.dumps({"candidate": candidate, "parameters": params}) + "\n")
        self.parameters[candidate].append(params)


def _tpe_point(
    free: Sequence[Free],
    parameters: Sequence[Mapping[str, Any]],
    results: Sequence[float | None],
    higher_is_better: bool,
    digest: bytes,
) -> dict[str, Any]:
    """The parameters that Optuna's TPE draws after these trials."""
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces: list[dict[str, BaseDistribution]] = [
        {
            key: (
                FloatDistribution(values.low, values.high, log=values.log)
                if isinstance(values, Range)
                else CategoricalDistribution(values)
            )
            for key, values in each.items()
        }
        for each in free
    ]
    sampler = optuna.samplers.TPESampler(
        seed=int.from_bytes(digest[:4], "little"), n_startup_trials=0
    )
    memory = optuna.create_study(
        sampler=sampler, direction="maximize" if higher_is_better else "minimize"
    )
    for params, space, result in zip(parameters, spaces[:-1], results, strict=True):
        state = TrialState.FAIL if result is None else TrialState.COMPLETE
        memory.add_trial(
            create_trial(state=state, value=result, params=dict(params), distributions=space)
        )
    return memory.ask(spaces[-1]).params


def _sobol_point(free: Free, number: int, seed: int) -> dict[str, Any]:
    """The parameters at a point of a scrambled Sobol sequence, the same point of the unit cube for
    every candidate.

    A point is uniformly distributed, and the first few fill the space evenly: of six independent
    draws, none may lie in the middle half (1.6%), and the best setting of every candidate would be
    missed.
    """
    if not free:
        return {}
    sequence = qmc.Sobol(len(free), scramble=True, rng=seed)
    if number:  # scipy's fast_forward(0) raises OverflowError
        sequence.fast_forward(number)
    point: dict[str, Any] = {}
    for (key, values), quantile in zip(free.items(), sequence.random(1)[0].tolist(), strict=True):
        if isinstance(values, list):
            point[key] = values[int(quantile * len(values))]
            continue
        low, high = values.low, values.high
        point[key] = low * (high / low) ** quantile if values.log else low + (high - low) * quantile
    return point


def beyond(values: Range, tried: Iterable[float], end: End) -> Range:
    """The interval from the outermost value that was tried to an end that is WIDER of the
    interval's width further out.

    On a logarithmic axis where the interval is logarithmic. An interval from 0 does not extend
    below 0.
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
