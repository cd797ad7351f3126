"""The runs of a study as plain data, read from the run folders."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, make_dataclass
from math import isfinite
from statistics import fmean
from typing import Any, Literal

from ..run.metrics import IN_STUDIES

Answer = Literal["better", "worse", "equivalent", "not distinguishable"]
Status = Literal["waiting", "running", "finished", "diverged", "failed"]
ENDED = ("finished", "diverged", "failed")
"""diverged: the loss was not a number, or above the start's. failed: any other error. All of them
are results."""
BASE, AVERAGE, HELD_OUT = "base", "average", "held-out"
"""The starting checkpoint, as a reference; measures that are no columns of the suite."""
MANY_EXAMPLES = 100
"""Held out, from which on their number does not limit a verdict."""


@dataclass(frozen=True)
class Evaluation:
    """The held-out examples evaluated during a run, or at its start, step 0.
    None: not measured there.
    """

    step: int
    tokens: int | None = None
    seconds: float | None = None
    metric: float | None = None
    """The study's selection metric on the held-out examples."""
    train_loss: float | None = None


_MEASURED = [(metric.key, float | None, None) for metric in IN_STUDIES]


class Point(make_dataclass("Measured", _MEASURED, bases=(Evaluation,), frozen=True)):
    """An evaluation with all measurements that a study reads, by their key."""


@dataclass(frozen=True)
class Run:
    """One run of a study: a trial of the search, or a run of the verdict with a fresh seed."""

    candidate: str
    stage: Literal["search", "verdict"]
    number: int
    """The number of the trial, from 0; in the verdict the position of its seed."""
    seed: int
    folder: str
    """Relative to the study's folder."""
    parameters: dict[str, float]
    """Recipe keys that are searched, e.g. {"optimizer.lr": 0.005}."""
    status: Status
    reason: str | None = None
    """Why a run is not finished, one sentence."""
    metric: float | None = None
    """The selection metric at the end of the run; of a final run, the mean by weight over the
    examples that judge."""
    start: float | None = None
    """The same at the start of the run."""
    curve: list[Point] = field(default_factory=list)
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    scores: dict[str, float] | None = None
    """The scores of a verdict's run, in percent, by column of the suite."""
    identity: dict[str, Any] = field(default_factory=dict)
    """Hashes of what must be equal for all candidates with this seed (docs/comparison.md); see
    audit.py."""

    @property
    def results(self) -> dict[str, float | None]:
        """The metric and the scores, by measure."""
        return {HELD_OUT: self.metric, **(self.scores or {})}


@dataclass(frozen=True)
class Candidate:
    """All runs of one optimizer."""

    name: str
    settings: dict[str, Any]
    """Recipe keys that make this candidate, e.g. {"optimizer.name": "muon"}."""
    space: dict[str, Any]
    trials: list[Run]
    selected: int | None
    """Number of the trial with the best metric; None if no trial finished."""
    at_edge: dict[str, Literal["low", "high"]]
    """Searched keys whose selected value lies at an end of the space."""
    verdict: list[Run] = field(default_factory=list)
    finer: float = 0.0
    """What a search with more values might gain in the metric, by `runs.finer_gain`."""

    @property
    def runs(self) -> list[Run]:
        """All runs, the search's first."""
        return [*self.trials, *self.verdict]

    def is_selected(self, run: Run) -> bool:
        """Whether a run is one of the trial whose setting the verdict's runs have."""
        return run.stage == "search" and run.number == self.selected

    @property
    def selected_trial(self) -> Run | None:
        """The selected trial; of one with several seeds, its first run."""
        return next(filter(self.is_selected, self.trials), None)


def finished(runs: Iterable[Run]) -> list[Run]:
    """Return the runs that have a result: they are finished, and their metric is a number."""
    return [
        run
        for run in runs
        if run.status == "finished" and run.metric is not None and isfinite(run.metric)
    ]


def mean_metric(runs: Sequence[Run]) -> float | None:
    """Return the mean metric of a trial's runs; None unless all have a result."""
    metrics = [run.metric for run in finished(runs) if run.metric is not None]
    return fmean(metrics) if runs and len(metrics) == len(runs) else None


def by_number(runs: Iterable[Run]) -> dict[int, list[Run]]:
    """Return one candidate's runs of the search by trial."""
    numbers: dict[int, list[Run]] = {}
    for run in runs:
        numbers.setdefault(run.number, []).append(run)
    return numbers


@dataclass(frozen=True)
class Difference:
    """A candidate compared with a reference on one measure, over seeds and questions."""

    candidate: str
    reference: str
    """BASE or another candidate's name."""
    measure: str
    """HELD_OUT, or a column of the suite, or AVERAGE."""
    unit: Literal["percent", "loss"]
    value: float
    """Positive: the candidate's is better, whatever the direction of the measure."""
    low: float
    high: float
    p: float
    p_holm: float
    answer: Answer
    detectable: float | None
    """The difference that this study would have found with the declared power, from its own
    variances; None: all runs gave the same, which shows no spread."""
    margin: float | None = None
    """The margin of the equivalence test, for columns that are to be retained; None: not tested."""
    retained: bool | None = None
    """Whether the candidate is shown to lose less than the margin."""
    equivalence: float | None = None
    """The declared margin of equivalence; None: not tested."""
    is_equivalent: bool | None = None
    """Whether the true difference is shown to be smaller than this margin, also of a candidate that
    is better."""
    seed_share: float = 0.0
    """The share of the variance that the seeds cause; questions or examples cause the other
    part."""
    finer: float = 0.0
    """The part of the interval, in either direction, that stands for values between those tried."""


@dataclass(frozen=True)
class Study:
    """A study with its runs, its verdict and its faults.
    `dataclasses.asdict` of it is study.json.
    """

    name: str
    file: dict[str, Any]
    """The study's file, resolved."""
    higher_is_better: bool
    candidates: list[Candidate]
    base_scores: dict[str, float] | None
    """The scores of the starting checkpoint, in percent."""
    differences: list[Difference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Faults found by the audit: with any, there is no verdict."""
    cautions: list[str] = field(default_factory=list)
    """Facts that weaken the conclusion: edges, overlaps, few seeds."""
    num_questions: dict[str, int] = field(default_factory=dict)
    """The number by measure, of the held-out examples too; empty of a study with problems, whose
    answers are not read."""
    declaration: str = ""
    """The hash of declaration.json; empty if it is missing or was changed."""
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""

    @property
    def runs(self) -> list[Run]:
        """All runs of all candidates."""
        return [run for candidate in self.candidates for run in candidate.runs]
