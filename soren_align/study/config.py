"""Read a study's file, and make the recipes of its runs.

All mistakes are reported together, each with its file, line and key, the finding and the remedy.
The recipes of every candidate at both ends of its space are checked before anything runs.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator
from pydantic_core import PydanticCustomError

from .. import recipe as recipes
from ..core import shipped
from ..core.document import Document, Key, Problem, Section, find, parse, place, sentences
from ..core.errors import UserError, did_you_mean
from ..core.files import local_path, read_text
from ..core.text import dotted
from ..evaluate.suite.suites import suite_of
from ..recipe import Recipe, trainer_value
from ..recipe.model import missing_extras
from ..recipe.optimizer import NonNegative, Positive
from ..tasks import TASKS
from .study import HELD_OUT, Run

METRICS = {
    metric: higher for task in TASKS.values() for metric, higher in task.higher_is_better.items()
}
"""The held-out metrics that trials may be selected by, of all tasks, and their direction."""

STUDY_SCHEMA_FILE = "study.schema.json"
"""The JSON Schema's file beside a study, for editors."""
ALL_PAIRS = "all"
"""The reference by which every candidate is compared with every other."""
MIN_SEEDS = 3
"""The fewest seeds of a verdict: with two, a 95% interval over seeds is 12.7 standard errors wide
to each side (Student's t)."""


class Range(Section):
    """An interval that values are drawn from."""

    low: Annotated[float, Field(allow_inf_nan=False)]
    """The least value."""
    high: Annotated[float, Field(allow_inf_nan=False)]
    """The largest value."""
    log: bool = True
    """Whether the logarithm is uniform, and not the value."""


Values = list[float | int | str | bool]


def _dimension(value: Any, _: object) -> "Range | Values | str":
    if isinstance(value, dict):
        interval = Range.model_validate(value)
        if not interval.low < interval.high:
            raise PydanticCustomError("interval", "low must be less than high")
        if interval.log and interval.low <= 0:
            raise PydanticCustomError("interval", "low must be more than 0, or write log: false")
        return interval
    values = value if isinstance(value, list) else []
    finite = [
        isinstance(each, str | int) or (isinstance(each, float) and math.isfinite(each))
        for each in values
    ]
    if finite and all(finite):
        return value
    if isinstance(value, str) and value.startswith("=") and len(value) > 1:
        return value
    message = (
        "write {low: 1.0e-3, high: 1.0e-1}, a list of values, or =KEY for the value of another key"
    )
    raise PydanticCustomError("dimension", message)  # pyright: ignore[reportArgumentType]


Dimension = Annotated[Range | Values | str, WrapValidator(_dimension)]
"""An interval, a list of values, or `=optimizer.lr`: equal to the value of that key."""
Space = dict[str, Dimension]
"""The searched values by key of the recipe."""
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
    """Keys of the recipe that are searched for every candidate: `optimizer.lr: {low: 1.0e-3, high:
    3.0e-2}`, whose logarithm is uniform (`log: false`: the value itself); a list of values;
    `=optimizer.lr`, equal to that key."""
    method: Literal["grid", "random"] = "random"
    """`random`: trials at the same quantiles for every candidate. `grid`: all combinations of
    lists, as many as `trials`."""
    trials: Annotated[int, Field(ge=1)]
    """The number of trials of each candidate."""
    seeds: Annotated[list[Seed], Field(min_length=1)] = [0]
    """Values of trainer.seed: the order of the examples, dropout, new adapters. With several, a
    trial is one run per seed, and its metric their mean."""
    metric: str = "eval_loss"
    """The value on held-out examples at the end of a run that selects a trial: eval_loss; for DPO
    also eval_rewards/margins. No benchmark."""
    sampling_seed: Seed = 0
    """The seed of the draws."""
    keep_models: bool = True
    """false: models and checkpoints of the search's runs are removed when these have ended, and
    their metrics stay."""


class Retention(Section):
    """The columns of the suite that are to be retained: an equivalence test against the starting
    checkpoint.
    """

    columns: Annotated[list[str], Field(min_length=1)]
    """Columns of the recipe's suite."""
    margin: Positive
    """The largest loss that counts as none, in percentage points."""


class Equivalence(Section):
    """Margins within which two optimizers count as equivalent: a fourth answer beside better, worse
    and open.
    """

    held_out: Positive | None = None
    """The margin of the held-out metric, in its unit. null: not tested."""
    benchmarks: Positive | None = None
    """The margin of every column and their average, in percentage points. null: not tested."""

    def margin(self, measure: str) -> float | None:
        """The margin of a measure."""
        return self.held_out if measure == HELD_OUT else self.benchmarks


class VerdictSection(Section):
    """The runs of each candidate's selected setting, and the questions that they answer."""

    seeds: Annotated[list[Seed], Field(json_schema_extra={"minItems": MIN_SEEDS})]
    """At least three values of trainer.seed, none of which the search used."""
    reference: str = ALL_PAIRS
    """The candidate that all others are compared with, besides the starting checkpoint. `all`:
    every pair is compared, so that the report can name the one to take; Holm's correction is for
    more comparisons then."""
    retention: Retention | None = None
    """Benchmarks on which a candidate must not lose more than a margin."""
    equivalence: Equivalence | None = None
    """Margins of equivalence to the reference. Declare them before the runs; `plan` shows which can
    be reached."""
    power: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """The power of the minimum detectable effects."""
    assume: dict[str, NonNegative] = {}
    """Assumptions about variances for the minimum detectable effects before any run
    (docs/comparison.md)."""


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
    jobs: Annotated[int, Field(ge=1)] | None = None
    """The number of runs at the same time. null: one per GPU, or 1 without any. `--jobs` takes
    precedence."""
    output_dir: Annotated[str, Field(min_length=1)]
    """The study's folder."""

    def space(self, candidate: str) -> Space:
        """All searched keys of a candidate; those of `search.space` first."""
        return {**self.search.space, **self.candidates[candidate].space}

    def free(self, candidate: str) -> dict[str, "Range | Values"]:
        """The searched keys that are not equal to another one, with their interval or values."""
        return {
            key: each for key, each in self.space(candidate).items() if not isinstance(each, str)
        }

    def parameters(self, candidate: str, drawn: dict[str, Any]) -> dict[str, Any]:
        """Values of all searched keys, from those of `free`."""
        space = self.space(candidate)
        return {
            key: drawn[each[1:]] if isinstance(each, str) else drawn[key]
            for key, each in space.items()
        }


OWN_KEYS = (
    "trainer.seed",
    "data.eval_part",
    "run.output_dir",
    "run.overwrite",
    "run.resume",
    "extends",
    "task",
)
"""Keys of the recipe that a study sets itself, or cannot change."""


def load_study(name_or_path: str, overrides: list[str] | None = None) -> StudyFile:
    """The checked study of a file, or of a shipped name such as 'quickstart/compare'.

    overrides: 'key=value' texts, as after --set: search.trials=8,
    search.space.optimizer.lr.high=0.1. Raises UserError with every mistake.
    """
    path = find(name_or_path, shipped.recipes_and_studies(), "study")
    source = _parsed(path)
    # Before the checks, so that mistakes in --set are reported with those of the file.
    for setting in source.settings(overrides or []):
        source.apply(setting, with_dots=("set", "space"))
    raw = source.content
    if "candidates" not in raw and "task" in raw:
        raise UserError(
            f"{path}: is a recipe, not a study; to train it, run soren-align {raw['task']}"
            f" {name_or_path}"
        )
    study = source.validate(StudyFile)
    if study is not None:
        source.problems += [Problem(*problem) for problem in dict.fromkeys(study_problems(study))]
    source.refuse_problems()
    assert study is not None
    # Beside the study's file first: the two are copied together.
    beside = local_path(path.parent / study.recipe)
    if beside.is_file():
        study = study.model_copy(update={"recipe": str(beside)})
    if problems := _recipe_problems(study, source.lines):
        raise UserError(*problems)
    return study


def load_resolved_study(path: Path) -> StudyFile:
    """The study in a study's folder, of this version; its recipe need not exist any more."""
    source = _parsed(path)
    study = source.validate(StudyFile)
    if study is None:
        key, message, _ = source.problems[0]
        remedy = "restore this file, which was edited or written by another version"
        raise UserError(f"{path}: {dotted(key)}: {message}; {remedy}")
    return study


def _parsed(path: Path) -> Document:
    return parse(
        read_text(path), str(path), f"a study is a mapping ({', '.join(StudyFile.model_fields)})"
    )


def recipe_of_run(study: StudyFile, run: Run) -> Recipe:
    """The recipe of one run, whose folder is below study.output_dir.
    Raises UserError as `recipe.load` does.
    """
    texts = (
        _settings(study.set)
        + _settings(study.candidates[run.candidate].set)
        + _settings(run.parameters)
    )
    own: dict[str, Any] = {
        "trainer.seed": run.seed,
        "run.output_dir": f"{study.output_dir}/{run.folder}",
    }
    own |= {
        "run.resume": "auto",
        "run.overwrite": False,
        "trainer.eval_on_start": True,
        "data.eval_part": run.stage,
    }
    # No benchmark in the search: a benchmark must not select settings, and is evaluated for final
    # runs.
    if run.stage == "search":
        own["eval"] = None
    recipe = recipes.load(study.recipe, texts + _settings(own), notify=lambda line: None)
    # it would fix the order of the examples for all seeds
    if trainer_value(recipe, "data_seed") is not None:
        recipe = recipe.model_copy(update={"trainer": {**recipe.trainer, "data_seed": run.seed}})
    # the starting weights are part of the result
    if recipe.task == "pretrain" and recipe.model.init_seed is not None:
        recipe = recipe.model_copy(
            update={"model": recipe.model.model_copy(update={"init_seed": run.seed})}
        )
    return recipe


def first_run(study: StudyFile, candidate: str, *, high: bool = False) -> Run:
    """A run of the verdict at the low ends of the candidate's space, or at the high ones: it shows
    its recipe.
    """
    drawn = {}
    for key, values in study.free(candidate).items():
        if isinstance(values, Range):
            drawn[key] = values.high if high else values.low
        elif any(isinstance(value, str | bool) for value in values):
            drawn[key] = values[-1 if high else 0]
        else:
            drawn[key] = (max if high else min)(values)
    return verdict_runs(study, candidate, study.parameters(candidate, drawn))[0]


def verdict_runs(study: StudyFile, candidate: str, parameters: dict[str, Any]) -> list[Run]:
    """The runs of a candidate's verdict with these parameters by seed; none of them is started."""
    return [
        Run(candidate, "verdict", i, seed, f"verdict/{candidate}/{seed}", parameters, "waiting")
        for i, seed in enumerate(study.verdict.seeds)
    ]


def _settings(values: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def study_problems(study: StudyFile) -> Iterator[tuple[Key, str]]:
    """What a schema cannot express, without the recipe."""
    search, verdict = study.search, study.verdict
    for section, seeds in (("search", search.seeds), ("verdict", verdict.seeds)):
        if len(set(seeds)) < len(seeds):
            yield (section, "seeds"), f"found {seeds}; write each seed once"
    if len(set(verdict.seeds)) < MIN_SEEDS:
        yield (
            ("verdict", "seeds"),
            f"found {verdict.seeds}; write at least {MIN_SEEDS} different seeds",
        )
    if common := sorted({*search.seeds} & {*verdict.seeds}):
        message = (
            f"search.seeds also has {', '.join(map(str, common))}; write seeds that the search does"
            " not use"
        )
        yield ("verdict", "seeds"), message
    for name in sorted({ALL_PAIRS, "base"} & {*study.candidates}):
        yield ("candidates", name), "is a reserved name; choose another name"
    if verdict.reference not in (*study.candidates, ALL_PAIRS):
        hint = did_you_mean(
            verdict.reference, study.candidates, f"candidates are: {', '.join(study.candidates)}"
        )
        yield ("verdict", "reference"), f"there is no candidate {verdict.reference!r}{hint}"
    for keys, at in (
        (study.set, ("set",)),
        *((c.set, ("candidates", n, "set")) for n, c in study.candidates.items()),
    ):
        yield from (
            ((*at, key), "is set by the study itself; remove this key")
            for key in keys
            if key in OWN_KEYS
        )
    for name, candidate in study.candidates.items():
        at = ("candidates", name, "space") if candidate.space else ("search", "space")
        space, free = study.space(name), study.free(name)
        for key, each in space.items():
            if isinstance(each, str) and each[1:] not in free:
                yield (
                    (*at, key),
                    (
                        f"found {each!r}, but this key is not searched; write = and one of"
                        f" {', '.join(free)}"
                    ),
                )
            if key in OWN_KEYS:
                yield (*at, key), "is set by the study itself; remove this key"
        if not free and search.trials > 1:
            message = f"no key is searched for {name}, so all its trials would be equal"
            yield at, f"{message}; write a key with its range, or search.trials: 1"
        lists = {key: values for key, values in free.items() if isinstance(values, list)}
        if search.method == "grid":
            for key in (key for key in free if key not in lists):
                yield (*at, key), "a grid needs a list of values, or write search.method: random"
            size = math.prod(map(len, lists.values()))
            if size != search.trials and len(lists) == len(free):
                message = (
                    f"the grid of {name} has {size} points, but search.trials is {search.trials};"
                    " write equal "
                )
                yield at, message + "numbers, as each point is one trial"


def _recipe_problems(study: StudyFile, lines: dict[Key, str]) -> list[str]:
    """The problems of the candidates' recipes at both ends of their spaces, at the places of the
    study's keys.
    """
    problems: dict[str, None] = {}
    for name, candidate in study.candidates.items():
        for high in (False, True):
            run = first_run(study, name, high=high)
            try:
                recipe = recipe_of_run(study, run)
            except UserError as error:
                places = {}
                # Recipes are made by --set: a problem's place is the key of the study that set the
                # value.
                for at, values in (
                    (("set",), study.set),
                    (("candidates", name, "set"), candidate.set),
                    (("candidates", name, "space"), run.parameters),
                ):
                    for key, text in zip(values, _settings(values), strict=True):
                        places[f"--set {text}"] = f"{place((*at, key), lines)} {dotted(at)}"
                for problem in error.problems:
                    start = next((text for text in places if problem.startswith(text)), None)
                    problems[
                        f"{places[start]}{problem.removeprefix(start)}" if start else problem
                    ] = None
            else:
                unlike = [Problem(*problem) for problem in _against_recipe(study, recipe)]
                problems |= dict.fromkeys(sentences(unlike, lines))
    return list(problems)


def _against_recipe(study: StudyFile, recipe: Recipe) -> Iterator[tuple[Key, str]]:
    """The problems of the study with a candidate's recipe."""
    metrics, metric = TASKS[recipe.task].higher_is_better, study.search.metric
    columns = [task.column for task in suite_of(recipe.eval).tasks] if recipe.eval else []
    if metric not in metrics:
        is_benchmark = metric.removeprefix("eval_") in columns
        kind = (
            "a benchmark, which must not select settings"
            if is_benchmark
            else "no metric of held-out examples"
        )
        remedy = f"write {' or '.join(metrics)}{did_you_mean(metric, metrics)}"
        yield ("search", "metric"), f"{metric!r} is {kind}; {remedy}"
    if recipe.data.eval is None:
        message = (
            f"{study.recipe} has no data.eval, whose held-out examples select the settings; add"
            " data.eval, or write set: {data.eval: {fraction: 0.2}} here"
        )
        yield ("recipe",), message
    steps, every = trainer_value(recipe, "max_steps"), trainer_value(recipe, "eval_steps")
    strategy = recipe.trainer.get("eval_strategy")
    if strategy in ("no", False):
        message = (
            "found trainer.eval_strategy: no, but evaluations on held-out examples select the"
            " settings"
        )
        yield ("recipe",), f"{message}; write steps"
    elif (
        strategy == "steps"
        and steps > 0
        and isinstance(every, int)
        and every >= 1
        and steps % every
    ):
        message = f"the last step, {steps}, is not evaluated with trainer.eval_steps {every}"
        yield ("set",), f"{message}; write a divisor of {steps}"
    for column in study.verdict.retention.columns if study.verdict.retention else []:
        if column not in columns:
            hint = did_you_mean(
                column, columns, f"columns are: {', '.join(columns)}" if columns else "no suite"
            )
            yield ("verdict", "retention", "columns"), f"the suite has no column {column!r}{hint}"


def missing_extras_of_runs(study: StudyFile) -> list[str]:
    """Return the problems of packages that final runs need, and that are not installed."""
    without_eval = "add --set set.eval=null to compare held-out losses alone"
    recipes = (recipe_of_run(study, first_run(study, name)) for name in study.candidates)
    problems = (problem for recipe in recipes for problem in missing_extras(recipe, without_eval))
    return [*dict.fromkeys(problems)]


def study_schema() -> dict[str, Any]:
    """JSON Schema of a study's file. The keys of a recipe in `set` and `space` are not checked."""
    schema = StudyFile.model_json_schema()
    schema["$defs"]["Search"]["properties"]["metric"]["enum"] = list(METRICS)
    return schema | {"title": "Study"}
