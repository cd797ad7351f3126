"""Choose the trials of a study, and list the runs that can start and the runs that have ended.

Trial i of a candidate depends on the study and on i alone: not on the order in which runs end, nor
on kills. So nothing of the search has to be stored but its extensions; what has ended is read from
the run folders. Callers hold the study's lock.
"""

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from scipy.stats import qmc

from ..core.document import dump
from ..core.errors import UserError
from ..core.files import read_json, write
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
from .runs import STAGES, edges, finer_gain, read_run, read_scores, select
from .study import ENDED, Candidate, Run, Study, by_number

STUDY_FILE, STUDY_RESULT, EXTENSIONS = "study.yaml", "study.json", "extensions.json"
WIDER = 0.5
"""How much wider an interval becomes at an end, as a share of its width."""
MOST_EXTENSIONS = 3
"""The most extensions of a study: a loss that falls with every larger value must not extend it
forever."""
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
    """The interval, by candidate and key: beyond the end at which the best value lay, or around the
    best value, as wide."""


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
        self.failures: dict[str, str] = {}
        self._ended: dict[str, Run] = {}

    def update(self) -> list[Run]:
        """Return all runs that can start, run or have ended, in their order.

        The caller holds the study's lock.
        """
        runs = self.search()
        final = [
            run for name in self.study.candidates for run in self.candidate(name, runs).verdict
        ]
        # A seed of all candidates before the next: a load that changes meanwhile slows all of them
        # alike.
        return runs + sorted(final, key=lambda run: run.number)

    def trials(self, name: str) -> list[dict[str, Any]]:
        """Return the searched values of a candidate's trials, those of extensions last."""
        # Extended trials continue the same sequence of points, in the wider intervals.
        spaces: list[dict[str, Any]] = [{}] * self.study.search.trials
        for extension in self._extensions():
            spaces += [extension.spaces.get(name, {})] * extension.trials
        drawn = []
        for number, wider in enumerate(spaces):
            free = self.study.free(name) | {key: Range(**own) for key, own in wider.items()}
            drawn.append(self.study.parameters(name, draw(self.study, free, number)))
        return drawn

    def search(self) -> list[Run]:
        """Return the search's runs: trial 0 of every candidate, then trial 1, ..."""
        trials = {name: self.trials(name) for name in self.study.candidates}
        seeds, runs = self.study.search.seeds, []
        for number in range(max(map(len, trials.values()))):
            for name, parameters in trials.items():
                for seed in seeds:
                    folder = f"search/{name}/{number:02}{f'-{seed}' if len(seeds) > 1 else ''}"
                    run = Run(name, "search", number, seed, folder, parameters[number], "waiting")
                    runs.append(self._read(run))
        return runs

    def candidate(self, name: str, runs: list[Run]) -> Candidate:
        """A candidate with the runs of its selected setting, one per fresh seed; none before its
        search ended.

        runs: the whole search's.
        """
        section, own = self.study.candidates[name], [run for run in runs if run.candidate == name]
        selected = select(own, higher_is_better=self.higher_is_better)
        at_edge = edges(self.study, name, own, selected) if selected is not None else {}
        finer = finer_gain(self.study, own, selected) if selected is not None else 0.0
        space = self.study.search.model_dump()["space"] | section.model_dump()["space"]
        trials, verdict = by_number(own), []
        if selected is not None and all(run.status in ENDED for run in own):
            verdict = [
                self._read(run)
                for run in verdict_runs(self.study, name, trials[selected][0].parameters)
            ]
        return Candidate(name, section.set, space, own, selected, at_edge, verdict, finer)

    def num_runs(self, runs: list[Run]) -> dict[str, int]:
        """Return the number of runs of each stage that there will be. runs: those of `update`."""
        num = {stage: sum(run.stage == stage for run in runs) for stage in STAGES}
        # Which setting wins is not known yet, but the number of its runs is: one for each declared
        # seed.
        if any(run.stage == "search" and run.status not in ENDED for run in runs):
            num["verdict"] = len(self.study.candidates) * len(self.study.verdict.seeds)
        return num

    def extension(self, runs: list[Run]) -> "Extension | None":
        """Return the extension that would try values beyond the ends at which selected ones lie:
        half of the study's trials for every candidate. None if there is nothing to extend.

        The others try values around their best one, as densely: drawn from their whole intervals,
        the same number of trials would refine theirs less.
        runs: all of the study. A list of values cannot be extended, and neither can an interval
        that has been extended MOST_EXTENSIONS times, or whose recipe refuses the values beyond.
        """
        search = [run for run in runs if run.stage == "search"]
        has_ended = all(run.status in ENDED for run in search)
        if not has_ended or len(self._extensions()) >= MOST_EXTENSIONS:
            return None
        spaces: dict[str, dict[str, dict[str, Any]]] = {}
        extends = False
        for name in self.study.candidates:
            candidate = self.candidate(name, search)
            if candidate.selected is None:
                continue
            best = by_number(candidate.trials)[candidate.selected][0].parameters
            for key, values in self.study.free(name).items():
                if not isinstance(values, Range):
                    continue
                for earlier in (each.spaces.get(name, {}).get(key) for each in self._extensions()):
                    if earlier:
                        low = min(values.low, earlier["low"])
                        high = max(values.high, earlier["high"])
                        values = values.model_copy(update={"low": low, "high": high})
                spaces.setdefault(name, {})[key] = around(values, best[key]).model_dump()
                if (end := candidate.at_edge.get(key)) is None:
                    continue
                first = candidate.trials[0]
                wider = beyond(values, [run.parameters[key] for run in candidate.trials], end)
                drawn = {each: first.parameters[each] for each in self.study.free(name)}
                drawn[key] = wider.low if end == "low" else wider.high
                outermost = replace(first, parameters=self.study.parameters(name, drawn))
                with suppress(UserError):  # such as a momentum of more than 1
                    recipe_of_run(self.study, outermost)
                    spaces[name][key], extends = wider.model_dump(), True
        return Extension(max(2, self.study.search.trials // 2), spaces) if extends else None

    def extend(self, extension: "Extension") -> None:
        """Add an extension: its trials are in the next `update`."""
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
                f"{run.candidate}, because this file or {EXTENSIONS} was changed. Restore the file, "
                "or remove this run's folder to train the trial again; then rerun the same command"
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


def draw(study: StudyFile, free: Free, number: int) -> dict[str, Any]:
    """Return the values of the searched keys in a trial: a point of the grid, or of a scrambled
    Sobol sequence, the same point of the unit cube for every candidate.

    A point is uniformly distributed, and the first few fill the space evenly: of six independent
    draws, none may lie in the middle half (1.6%), and the best setting of every candidate would be
    missed.
    """
    if not free:
        return {}
    if study.search.method == "grid":
        # The last key changes fastest.
        points = [*product(*(values for values in free.values() if isinstance(values, list)))]
        return dict(zip(free, points[number], strict=True))
    sequence = qmc.Sobol(len(free), scramble=True, rng=study.search.sampling_seed)
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


def around(values: Range, best: float) -> Range:
    """The interval around the best value that is WIDER of the interval's width, and in it."""
    to_axis, to_value = (math.log, math.exp) if values.log else (float, float)
    low, high, middle = (to_axis(value) for value in (values.low, values.high, best))
    width = (high - low) * WIDER
    start = min(max(middle - width / 2, low), high - width)
    return Range(low=to_value(start), high=to_value(start + width), log=values.log)
