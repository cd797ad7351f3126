"""The search: the parameters of each trial, recorded with its result by Optuna's journal in the study's folder.

Trial i of a candidate depends on the study, on i and, for TPE, on the candidate's trials before it: not on the order in
which runs end, nor on kills. A trial is one line of the journal, so that a kill leaves none incomplete. Callers hold
the study's lock.
"""

import hashlib
import io
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial
from scipy.stats import qmc

from ..core.errors import UserError
from .config import Range, StudyFile, Values

JOURNAL = "optuna.journal"
WIDER = 0.5
"""How much wider an interval becomes at an end, as a share of its width."""
MOST_STARTING_TRIALS = 10
"""Of TPE: as many trials, or half of them, are drawn as by `random`. Optuna's default is 10."""
End = Literal["low", "high"]


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

    def drawn(self, candidate: str) -> list[dict[str, Any]]:
        """The searched values of the trials until now, of the keys that are not equal to another one."""
        return [trial.params for trial in self._frozen(candidate)]

    def draw(self, candidate: str, space: Mapping[str, Range] | None = None) -> None:
        """Draw one more trial. TPE's needs the results of all before it (`record`).

        space: intervals of an extension, in the place of the study's.
        """
        frozen = self._frozen(candidate)
        values = {**self.study.free(candidate), **(space or {})}
        distributions = {key: _distribution(each) for key, each in values.items()}
        params = self._params(candidate, distributions, frozen)
        drawn = create_trial(state=TrialState.RUNNING, params=params, distributions=distributions)
        self._studies[candidate].add_trial(drawn)

    def record(self, candidate: str, number: int, value: float | None, *, is_failure: bool) -> None:
        """Record a trial's metric; None for a diverged trial, the worst. A recorded one is unchanged."""
        state = TrialState.FAIL if is_failure else TrialState.COMPLETE
        if value is None and not is_failure:
            value = float("-inf" if self._studies[candidate].direction.name == "MAXIMIZE" else "inf")
        self._studies[candidate].tell(number, None if is_failure else value, state=state, skip_if_finished=True)

    def num_recorded(self, candidate: str) -> int:
        """The number of trials that have a result."""
        return sum(trial.state.is_finished() for trial in self._frozen(candidate))

    def _frozen(self, candidate: str) -> list[FrozenTrial]:
        return self._studies[candidate].get_trials(deepcopy=False)

    def _params(self, candidate: str, space: dict[str, BaseDistribution], frozen: list[FrozenTrial]) -> dict[str, Any]:
        search, number = self.study.search, len(frozen)
        if search.method == "grid":
            return _grid_point(self.study.free(candidate), number)
        if search.method == "random" or number < min(search.trials // 2, MOST_STARTING_TRIALS):
            return _sobol_point(space, number, search.sampling_seed)
        seed = int.from_bytes(hashlib.sha256(f"{search.sampling_seed} {number}".encode()).digest()[:4], "little")
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0)
        memory = optuna.create_study(sampler=sampler, direction=self._studies[candidate].direction)
        memory.add_trials(frozen)
        return memory.ask(space).params


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
    point = sequence.random(1)[0].tolist()
    return {key: _at_quantile(space[key], each) for key, each in zip(space, point, strict=True)}


def _at_quantile(values: BaseDistribution, quantile: float) -> Any:
    if isinstance(values, CategoricalDistribution):
        return values.choices[int(quantile * len(values.choices))]
    assert isinstance(values, FloatDistribution)
    if values.log:
        return values.low * (values.high / values.low) ** quantile
    return values.low + (values.high - values.low) * quantile


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


def _distribution(values: Range | Values) -> BaseDistribution:
    if isinstance(values, Range):
        return FloatDistribution(values.low, values.high, log=values.log)
    return CategoricalDistribution(values)


def _grid_point(free: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The combination with this number; the last key changes fastest."""
    point = {}
    for key, values in reversed(list(free.items())):
        number, place = divmod(number, len(values))
        point[key] = values[place]
    return {key: point[key] for key in free}


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
                "command: it draws the same trials again, reads their results from their run folders, and repeats none"
            ) from None


def drop_incomplete_line(folder: Path) -> None:
    """Remove the line that a process was writing when it was killed: Optuna could read no line after it."""
    journal = folder / JOURNAL
    content = journal.read_bytes() if journal.is_file() else b""
    if content and not content.endswith(b"\n"):
        with journal.open("r+b") as stream:
            stream.truncate(content.rfind(b"\n") + 1)
