"""Two models on the same questions: the scores of each question, and paired differences.
Neither torch nor lm-eval.

Questions differ in difficulty more than models do, so models are compared question by question:
with standard errors, clustered or not, and p-values of many tests. The scores of each question lie
beside the results of an evaluation, so that runs can be compared later:

    points.json    {"format": 1, "rows": {row: {column: {"points": [1.0, 0.0, ...], "clusters": [0, 0, 1, ...],
                   "prompts": hash of the questions and prompts}}}}

Points lie in [0, 1], unless the score is normalized (`points.py`).

results.json has the hash of this file, so that points of another evaluation are not read.
"""

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import numpy as np
from pydantic import Field, TypeAdapter
from scipy.special import stdtrit
from typing_extensions import TypedDict

from ...core.errors import UserError
from ...core.files import file_sha256, read_checked
from ..report.results import NAME as RESULTS
from ..report.results import POINTS, read_results

Z95 = statistics.NormalDist().inv_cdf(0.975)
EQUAL = 1e-12
"""A smaller relative difference of two numbers is rounding."""
MODELS_OWN = {
    "generation_config": "its generation config is {1}, but the first model's is {0}",
    "chat_template": "only one of the two models was prompted with a chat template",
    "bos": "only one of the two models got prompts with a BOS token",
}
"""Settings that come with a model, with the reason if they differ. All others are equal for all
rows of a table."""


@dataclass
class ModelAnswers:
    """The points of one model's answers, by column, in the order of the questions."""

    settings: dict[str, Any]
    """All that is needed to reproduce the scores; equal for all rows of a table."""
    points: dict[str, Sequence[float]] = field(default_factory=dict)
    """The points of each question; a score is 100 times their mean."""
    clusters: dict[str, Sequence[Any]] = field(default_factory=dict)
    """The cluster of each question, in columns that have clusters."""
    prompt_hashes: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Hashes of each question and its prompt: two models are compared only if these are equal."""
    truncated: dict[str, int] = field(default_factory=dict)
    """The number of prompts that were longer than the model's context and lost their beginning."""


class Paired(NamedTuple):
    """The differences of a column's points, later - first, and the cluster of each question; None:
    independent.
    """

    each: np.ndarray
    clusters: np.ndarray | None = None
    weights: np.ndarray | None = None
    """By which the questions were scaled (`read_held_out`); None: they count alike."""

    @property
    def is_right_or_wrong(self) -> bool:
        """Whether these are differences of points that are 0 or 1."""
        return bool(np.isin(self.each, (-1.0, 0.0, 1.0)).all())

    @property
    def is_discrete(self) -> bool:
        """Whether observations have too few values for their spread to be an error: right and
        wrong, or all alike.
        """
        return self.is_right_or_wrong or bool(np.ptp(self.each) <= EQUAL)

    @property
    def num_changed(self) -> int:
        """The number of independent observations that are not 0: clusters, or questions."""
        if self.clusters is not None and self.clusters.max() > 0:
            return int(np.count_nonzero(np.bincount(self.clusters, self.each)))
        return int(np.count_nonzero(self.each))

    def clustered_error(self) -> tuple[float, float] | None:
        """Return the standard error of a mean over questions in clusters or with unequal weights,
        and its degrees of freedom; None without either.

        The sum of a cluster's deviations counts as one observation (Miller 2024, "Adding error bars
        to evals"), with the factor that corrects the bias of few clusters (Bell and McCaffrey 2002,
        CR2). The degrees of freedom are Kish's effective number of clusters less one: with one less
        than their number, an interval on MMLU's sizes covers 94.2%, and one on 12 answers with
        log-normal lengths (sigma 1.5) 80%.
        """
        if self.clusters is None and self.weights is None:
            return None
        n = len(self.each)
        # A question with a weight and no cluster is a cluster of its own.
        numbers = np.arange(n) if self.clusters is None else self.clusters
        sizes = np.bincount(numbers, self.weights)
        # One cluster has no spread between clusters, so that no error can be estimated from it.
        if len(sizes) == 1:
            return None
        shares = sizes / sizes.sum()
        sums = np.bincount(numbers, self.each - self.each.mean())
        error = sqrt((sums**2 / (1 - shares)).sum()) / n
        return error, 1 / (shares**2).sum() - 1

    def without_equal_clusters(self) -> "Paired":
        """Return a column whose clusters all changed alike as one observation per cluster; any
        other column unchanged.

        The spread between such clusters, 0, is no estimate of an error; counted as questions they
        would be too certain.
        """
        result, mean = self.clustered_error(), float(self.each.mean())
        if result is None or result[0] > EQUAL * abs(mean) or mean == 0:
            return self
        num = len(self.each) if self.clusters is None else int(self.clusters.max()) + 1
        return Paired(np.full(num, mean))


def cluster_numbers(labels: Sequence[Any]) -> np.ndarray:
    """Return the number of each question's cluster, from 0 in the order of their first
    questions.
    """
    # a dictionary of millions of labels would need 100 bytes each
    if isinstance(labels, np.ndarray):
        _, firsts, numbers = np.unique(labels, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(firsts))[numbers]
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return np.array([numbers[label] for label in labels])


def t95(degrees: float) -> float:
    """Return Student's quantile for a two-sided 95% interval: 12.7 for 1 degree of freedom, 1.963
    for 816 (Z95).
    """
    return float(stdtrit(degrees, 0.975)) if degrees > 0 else Z95


def holm(p: list[float]) -> list[float]:
    """Return the p-values after Holm's correction, in the same order."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = largest
    return corrected


def least_p(num_changed: int) -> float:
    """The least p of a sign-flip test on so many observations that changed.
    Other tests' are too small for very few.
    """
    return min(1.0, 2.0 ** (1 - num_changed))


MAX_BYTES = 64 << 20
"""The largest points.json that is read. The leaderboard's 28,659 questions are 0.3 MB a row."""


@dataclass(frozen=True)
class ColumnPoints:
    """The points of one model on one column, in the order of the questions."""

    each: np.ndarray
    """The score is 100 times their mean."""
    clusters: np.ndarray | None
    """Numbers from 0; None: the questions are independent."""
    prompts: str
    """Hash of all questions, prompts and settings of the model's own: models are compared only if
    it is equal."""
    weights: np.ndarray | None = None
    """By which `each` was scaled, of held-out examples; None: questions count alike."""


Points = Mapping[str, ColumnPoints]
"""The points of one model, by column."""


class _Column(TypedDict):
    points: Annotated[list[float], Field(min_length=1)]
    clusters: NotRequired[list[int] | None]
    prompts: str


class _File(TypedDict):
    format: Literal[1]
    rows: dict[str, dict[str, _Column]]


_FILE = TypeAdapter(_File)


def points_json(rows: Mapping[str, Any]) -> str:
    """Return the content of points.json. rows: the harness's ModelResults by row."""
    content: dict[str, Any] = {}
    for row, results in rows.items():
        own = [results.settings.get(key) for key in MODELS_OWN]
        content[row] = {}
        for column, points in results.points.items():
            labels = results.clusters.get(column)
            # Questions, prompts and the model's own settings go into one hash: whoever reads
            # points.json can refuse an unfair comparison without the prompts and without lm-eval.
            prompts = [results.prompt_hashes[column], results.truncated.get(column, 0), own]
            content[row][column] = {
                "points": points,
                "clusters": None if labels is None else cluster_numbers(labels).tolist(),
                "prompts": (
                    hashlib.sha256(
                        json.dumps(prompts, sort_keys=True, default=str).encode()
                    ).hexdigest()
                ),
            }
    return json.dumps({"format": 1, "rows": content}) + "\n"


def read_points(folder: Path) -> dict[str, Points]:
    """Return the points by row, in the order of the table. folder: of an evaluation's results.

    Raises UserError if there are none, if the file has another form, or if it is not the one that
    belongs to results.json.
    """
    file, remedy = folder / POINTS, "evaluate the run again"
    results = read_results(folder)
    if results is None:
        raise UserError(f"{folder}: has no {RESULTS}; evaluate the run first")
    content = read_checked(file, _FILE, remedy, MAX_BYTES)
    # Points of another evaluation would be compared in its name: a copy that was interrupted, or
    # two commands that wrote into one folder.
    if results.get("points_sha256") not in (None, file_sha256(file)):
        raise UserError(f"{file}: differs from the file that belongs to {RESULTS}; {remedy}")
    rows: dict[str, Points] = {}
    for name in (row["name"] for row in results["rows"]):
        columns = {}
        for column, entry in content["rows"].get(name, {}).items():
            labels = entry.get("clusters")
            clusters = None if labels is None else np.array(labels)
            columns[column] = ColumnPoints(
                np.array(entry["points"], float), clusters, entry["prompts"]
            )
        rows[name] = columns
    return rows
