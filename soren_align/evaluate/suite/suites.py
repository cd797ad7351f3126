"""A suite: lm-eval tasks, each with the column of its score, and the settings that must be equal for all models.

The tasks are YAML files of lm-eval, or of the same form beside the suite. The suite adds few-shot examples, chat
template, batch size, seeds, and the folder of the data. The keys are listed in docs/evaluation.md. A suite is read
without torch.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...core import shipped
from ...core.document import Key, dotted, place
from ...core.errors import UserError, did_you_mean
from ...core.files import read_text
from ...core.yaml import parse_yaml
from ...recipe import Eval

# ---
# The strict reading of a suite's YAML files: an unknown key is an error, and all errors are reported at once.


class YamlSection(BaseModel):
    """One mapping in such a file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


Form = TypeVar("Form", bound=YamlSection)
Hint = Callable[[Key], str]
"""From the location of an unknown key to the remedy in its message."""
Lines = dict[Key, str]
"""The place of each key: ('tasks', 0, 'metric') -> 'suite.yaml:12'."""


def read_mapping(path: Path, remedy: str) -> tuple[dict[str, Any], Lines]:
    """Return a file's content and the places of its keys. Raises UserError with the remedy if it is not a mapping."""
    raw, lines = parse_yaml(read_text(path), str(path))
    if not isinstance(raw, dict):
        raise UserError(f"{path}: {remedy}")
    return raw, lines


def validate(raw: dict[str, Any], form: type[Form], lines: Lines, hint: Hint = lambda loc: "", end: str = "") -> Form:
    """Return a file's content as a `form`. Raises UserError with a sentence per error, and `end` after them."""
    try:
        return form.model_validate(raw)
    except ValidationError as error:
        # A default that is made of another key, such as a column of its task, is no error of its own.
        errors = [e for e in error.errors(include_url=False) if e["type"] != "default_factory_not_called"]
        places = [place(e["loc"], lines) for e in errors]
        ordered = sorted(zip(places, errors, strict=True), key=lambda each: int(each[0].rpartition(":")[2]))
        sentences = [f"{where} {_sentence(e, hint)}" for where, e in ordered]
        raise UserError(*sentences, *([end] if end else [])) from None


def refuse_duplicates(names: list[str], problem: str) -> None:
    """Raises ValueError if a name is there twice. problem: its message, with {} for the name."""
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(problem.format(repr(duplicates[0])))


def _sentence(error: Any, hint: Hint) -> str:
    """Return a pydantic error as a sentence: key, finding, remedy."""
    key = dotted(error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key{hint(error['loc'])}"
    if error["type"] == "missing":
        return f"{key}: is required"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{key}: found {error['input']!r}; {error['msg'][0].lower()}{error['msg'][1:]}"


LM_EVAL = "lm-eval:"
# Not imported: that takes 8 seconds, and `plan` needs only the numbers of requests.
_spec = importlib.util.find_spec("lm_eval")
assert _spec is not None
assert _spec.origin is not None
LM_EVAL_TASKS = Path(_spec.origin).parent / "tasks"

_PAGE = "All keys of a suite and their defaults: `soren-align docs evaluation` (docs/evaluation.md)"
Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=100)]
"""A single path component, since files are named after it."""
Place = Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=1000)]
"""A path, or the first part of one."""


class Seeds(YamlSection):
    """The four seeds of lm-eval, with its defaults."""

    random: int = 0
    numpy: int = 1234
    torch: int = 1234
    fewshot: int = 1234


class SuiteTask(YamlSection):
    """A task, and its score's column."""

    task: Name
    """lm-eval's name of the task or group. In a group all questions have equal weight."""
    metric: str
    """The metric, e.g. acc; it must be a mean over questions."""
    column: Name = Field(default_factory=lambda values: values.get("task", ""))
    """The name of its score in results and tables, and of its file of samples."""
    file: Place = Field(default_factory=lambda values: f"{values.get('task', '')}.yaml")
    """Its YAML file, relative to the suite's folder; `lm-eval:` stands for the folder of lm-eval's tasks."""
    filter: str = "none"
    """The task's filter for responses before they are scored."""
    cluster: str | None = None
    """The field of a question that names its cluster, such as its source text; `task`: a group's subjects. Questions of
    one cluster are not independent, which makes the intervals of differences wider."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Few-shot examples in each prompt. null: the number in the task's file, which is 0 if it has none."""
    questions: int | None = None
    """The benchmark's number of questions. With another number the table's title reports other data."""
    requests: int | None = None
    """The number of lm-eval's requests: one per answer choice. `plan` computes the cost from it."""
    also: list[Annotated[str, Field(pattern=r"^[\w-]+(,[\w-]+)?$")]] = Field(default_factory=list)
    """Other scores to report: `metric`, or `metric,filter`."""


class Suite(YamlSection):
    """A suite.yaml."""

    path: Path
    """Of the file."""
    title: str
    data_root: Place | None = None
    """The folder that the tasks' `dataset_path` is relative to; null: it is a name on the Hugging Face hub."""
    apply_chat_template: bool = False
    """Whether prompts are rendered by each model's chat template."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Prompts in a forward pass. Fixed, because padding changes the last digits of scores."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights during evaluation. In bfloat16 a small update of the weights may be rounded away."""
    seeds: Seeds = Seeds()
    average: bool = False
    """Whether to add a column with the plain mean of the others."""
    notes: list[str] = Field(default_factory=list)
    """Notes under the table."""
    tasks: Annotated[list[SuiteTask], Field(min_length=1)]

    @property
    def name(self) -> str:
        """The folder's name: 'quickstart' for eval/quickstart/suite.yaml."""
        return self.path.parent.name

    @model_validator(mode="after")
    def _refuse_duplicate_names(self) -> "Suite":
        for key in ("column", "task"):
            names = [getattr(task, key) for task in self.tasks]
            refuse_duplicates(names, f"tasks: {key} {{}} is there twice; each task needs its own")
        return self

    def file_of(self, task: SuiteTask) -> Path:
        """Return the task's YAML file."""
        if task.file.startswith(LM_EVAL):
            return LM_EVAL_TASKS / task.file.removeprefix(LM_EVAL)
        return (self.path.parent / task.file).resolve()

    def data_folder(self) -> Path | None:
        """Return the folder `data_root`; None for the hub."""
        if self.data_root is None:
            return None
        return (self.path.parent / shipped.resolve(self.data_root)).resolve()  # an absolute data_root stays unchanged


def load_suite(name_or_path: str | Path) -> Suite:
    """Return the suite of a shipped name, a suite.yaml or a folder with one. Raises UserError with all errors in it."""
    path = _find(str(name_or_path))
    raw, lines = read_mapping(path, f"a suite is a mapping ({', '.join(_keys(Suite))}). {_PAGE}")
    if "path" in raw:
        raise UserError(f"{lines[('path',)]} path: unknown key; keys here: {', '.join(_keys(Suite))}", _PAGE)
    suite = validate(raw | {"path": path}, Suite, lines, _hint, _PAGE)
    files = {i: suite.file_of(task) for i, task in enumerate(suite.tasks)}
    missing = {("tasks", i, "file"): file for i, file in files.items() if not file.is_file()}
    if missing:
        raise UserError(
            *(f"{place(key, lines)} {dotted(key)}: there is no task file {file}" for key, file in missing.items())
        )
    return suite


def check_suite(options: Eval) -> None:
    """Raise UserError if the suite of an evaluation section, or a table of published scores, cannot be read."""
    suite = suite_of(options)
    for name in options.published:
        load_published(name, suite.name)


def suite_of(options: Eval) -> Suite:
    """Return the suite of a recipe's evaluation section, with the changes in that section.

    Raises UserError if the section omits a column that the suite does not have, or all columns.
    """
    suite = load_suite(options.suite)
    overrides = {"batch_size": options.batch_size, "dtype": options.dtype}
    changes: dict[str, Any] = {key: value for key, value in overrides.items() if value is not None}
    if options.data_root is not None:
        changes["data_root"] = str(Path(options.data_root).expanduser().absolute())
    columns = [task.column for task in suite.tasks]
    for column in options.omit:
        if column not in columns:
            hint = did_you_mean(column, columns, f"columns are: {', '.join(columns)}")
            raise UserError(f"eval.omit: suite {suite.name} has no column {column!r}{hint}")
    if options.omit:
        changes["tasks"] = [task for task in suite.tasks if task.column not in options.omit]
        if not changes["tasks"]:
            raise UserError(f"eval.omit: nothing is left of suite {suite.name}; keep a column")
    return suite.model_copy(update=changes)


def _find(name_or_path: str) -> Path:
    known = shipped.suites()
    if name_or_path in known:
        return known[name_or_path]
    path = shipped.resolve(name_or_path)
    path = path / "suite.yaml" if path.is_dir() else path
    if path.is_file():
        return path.resolve()
    hint = did_you_mean(name_or_path, known, f"shipped suites: {', '.join(known)}")
    raise UserError(f"{name_or_path}: neither a suite.yaml nor a shipped suite{hint}")


def _keys(section: type[YamlSection]) -> list[str]:
    return [key for key in section.model_fields if key != "path"]


def _hint(loc: tuple[str | int, ...]) -> str:
    """Return the known key that is closest to an unknown one, or all known keys."""
    *sections, key = loc
    section = {"tasks": SuiteTask, "seeds": Seeds}.get(str(sections[0]) if sections else "", Suite)
    return did_you_mean(key, _keys(section), f"keys here: {', '.join(_keys(section))}")


# ---
# Published scores of other authors, shown under the table's own rows and never compared.
#
# They come from other prompts and other software, and the points of single questions are not known.


class PublishedScore(YamlSection):
    """In percent."""

    value: Annotated[float, Field(ge=0, le=100)]
    stderr: Annotated[float, Field(ge=0, le=100)] | None = None
    """Null if it was not published."""


class PublishedRow(YamlSection):
    """One model."""

    name: Annotated[str, Field(min_length=1)]
    scores: Annotated[dict[str, PublishedScore], Field(min_length=1)]
    """By column of the suite, and "average"; some may be missing."""


class PublishedTable(YamlSection):
    """One published table."""

    source: str
    """Authors and publication."""
    model: str
    """The model that was evaluated."""
    suite: str
    """The suite with the same columns."""
    rows: Annotated[list[PublishedRow], Field(min_length=1)]

    @model_validator(mode="after")
    def _refuse_duplicate_names(self) -> "PublishedTable":
        refuse_duplicates([row.name for row in self.rows], "rows: {} is there twice; each row needs its own name")
        return self


def load_published(name_or_path: str, suite_name: str) -> list[dict[str, Any]]:
    """Return the rows of a shipped table ('paper/sft') or of a YAML file of the same form.

    A row is {"name", "source", "scores": {column: {"value", "stderr" if published}}}, in percent.
    Raises UserError with all errors in the file, or if the scores belong to another suite.
    """
    known = shipped.published()
    path = known.get(name_or_path) or shipped.resolve(name_or_path)
    if not path.is_file():
        hint = did_you_mean(name_or_path, known, f"shipped: {', '.join(known)}")
        raise UserError(f"{name_or_path}: neither a file nor a shipped table of published scores{hint}")
    raw, lines = read_mapping(path, f"published scores are a mapping ({', '.join(PublishedTable.model_fields)})")
    table = validate(raw, PublishedTable, lines)
    if table.suite != suite_name:
        raise UserError(
            f"{name_or_path}: has published scores for suite {table.suite}, not for {suite_name}; choose another table"
        )
    source = f"{table.source} ({table.model})"
    return [{"name": row.name, "source": source} | row.model_dump(exclude_none=True) for row in table.rows]
