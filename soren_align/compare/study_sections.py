"""The sections of a study's file, as pydantic models: every key, its meaning and its default."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator
from pydantic_core import PydanticCustomError

from ..recipe.base import NonNegative, Positive, Section

HIGHER_IS_BETTER = {
    "sft": {"eval_loss": False, "eval_mean_token_accuracy": True},
    "pretrain": {"eval_loss": False},
    "dpo": {"eval_loss": False, "eval_rewards/margins": True, "eval_rewards/accuracies": True},
}
"""By task: the held-out metrics that trials may be selected by, and their direction."""
METRICS = {metric: higher for metrics in HIGHER_IS_BETTER.values() for metric, higher in metrics.items()}
"""Those of all tasks."""

ALL_PAIRS = "all"
"""In the place of a reference: every candidate is compared with every other."""
MIN_SEEDS = 3
"""Of a verdict: with two, a 95% interval over seeds is 12.7 standard errors wide to each side (Student's t)."""


class Range(Section):
    """An interval that values are drawn from."""

    low: Annotated[float, Field(allow_inf_nan=False)]
    """The least value."""
    high: Annotated[float, Field(allow_inf_nan=False)]
    """The largest value."""
    log: bool = True
    """Whether the logarithm is uniform, and not the value."""


Values = list[float | int | str | bool]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))


def _dimension(value: Any) -> "Range | Values | str":
    if isinstance(value, dict):
        interval = Range.model_validate(value)
        if not interval.low < interval.high:
            raise PydanticCustomError("interval", "low must be less than high")
        if interval.log and interval.low <= 0:
            raise PydanticCustomError("interval", "low must be more than 0, or write log: false")
        return interval
    if isinstance(value, list) and value and all(_is_scalar(each) for each in value):
        return value
    if isinstance(value, str) and value.startswith("=") and len(value) > 1:
        return value
    message = "write {low: 1.0e-3, high: 1.0e-1}, a list of values, or =KEY for the value of another key"
    raise PydanticCustomError("dimension", message)  # pyright: ignore[reportArgumentType]


Dimension = Annotated[Range | Values | str, WrapValidator(lambda value, _: _dimension(value))]
"""An interval, a list of values, or `=optimizer.lr`: equal to the value of that key."""
Space = dict[str, Dimension]
"""By key of the recipe."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w+-]*$", max_length=60)]
"""Part of a path, since run folders are named after it."""


class CandidateSection(Section):
    """One optimizer."""

    set: dict[str, Any] = {}
    """Keys of the recipe and their values: `{optimizer.name: muon}`."""
    space: Space = {}
    """Keys that are searched for this candidate, in the place of those in `search.space`."""


class Search(Section):
    """The search of each candidate's setting."""

    space: Space = {}
    """Keys of the recipe that are searched for every candidate: `optimizer.lr: {low: 1.0e-3, high: 3.0e-2}`, whose
    logarithm is uniform (`log: false`: the value itself); a list of values; `=optimizer.lr`, equal to that key."""
    method: Literal["grid", "random", "tpe"] = "random"
    """`random`: all trials are drawn when the study is created, at the same quantiles for every candidate. `grid`: all
    combinations of lists, as many as `trials`. `tpe`: Optuna's TPE, each trial after those before it."""
    trials: Annotated[int, Field(ge=1)]
    """Of each candidate."""
    seeds: Annotated[list[Seed], Field(min_length=1)] = [0]
    """Values of trainer.seed: the order of the examples, dropout, new adapters. With several, a trial is one run per
    seed, and its metric their mean."""
    metric: str = "eval_loss"
    """The value on held-out examples at the end of a run that selects a trial: eval_loss; for DPO also
    eval_rewards/margins. No benchmark."""
    sampling_seed: Seed = 0
    """The seed of the draws."""
    keep_models: bool = True
    """false: models and checkpoints of the search's runs are removed when these have ended, and their metrics stay."""


class Retention(Section):
    """The columns of the suite that are to be retained: an equivalence test against the starting checkpoint."""

    columns: Annotated[list[str], Field(min_length=1)]
    """Columns of the recipe's suite."""
    margin: Positive
    """The largest loss that counts as none, in percentage points."""


class VerdictSection(Section):
    """The runs of each candidate's selected setting, and the questions that they answer."""

    seeds: Annotated[list[Seed], Field(json_schema_extra={"minItems": MIN_SEEDS})]
    """At least three values of trainer.seed, none of which the search used."""
    reference: str = "adamw"
    """The candidate that all others are compared with, besides the starting checkpoint. `all`: every pair is compared,
    with Holm's correction for more comparisons."""
    retention: Retention | None = None
    """Benchmarks on which a candidate must not lose more than a margin."""
    power: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Of the minimum detectable effects."""
    assume: dict[str, NonNegative] = {}
    """Assumptions about variances for the minimum detectable effects before any run (docs/comparison.md)."""


class StudyFile(Section):
    """A comparison of optimizers."""

    title: str | None = None
    """The report's title. null: the name of the study's folder."""
    recipe: Annotated[str, Field(min_length=1)]
    """The recipe of all runs: a file, relative to the study's, or a shipped name."""
    set: dict[str, Any] = {}
    """Keys of the recipe and their values, for all runs: `{trainer.max_steps: 150}`."""
    candidates: Annotated[dict[Name, CandidateSection], Field(min_length=1)]
    """The optimizers by name."""
    search: Search
    verdict: VerdictSection
    budget_hours: Positive | None = None
    """No candidate starts another trial after so many hours of training in all; those started by one are started by
    all. null: no limit."""
    jobs: Annotated[int, Field(ge=1)] | None = None
    """Runs at a time. null: one per GPU, or 1 without any. `--jobs` takes precedence."""
    output_dir: Annotated[str, Field(min_length=1)]
    """The study's folder."""

    def space(self, candidate: str) -> Space:
        """All searched keys of a candidate; those of `search.space` first."""
        return {**self.search.space, **self.candidates[candidate].space}

    def free(self, candidate: str) -> dict[str, "Range | Values"]:
        """The searched keys that are not equal to another one, with their interval or values."""
        return {key: each for key, each in self.space(candidate).items() if not isinstance(each, str)}

    def parameters(self, candidate: str, drawn: dict[str, Any]) -> dict[str, Any]:
        """Values of all searched keys, from those of `free`."""
        space = self.space(candidate)
        return {key: drawn[each[1:]] if isinstance(each, str) else drawn[key] for key, each in space.items()}
