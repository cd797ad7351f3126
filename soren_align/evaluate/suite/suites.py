"""A suite: tasks of lm-eval, the column of each score, and the settings for all models.

The tasks are YAML files of lm-eval, or of the same form beside the suite. The suite adds few-shot
examples, chat template, batch size, seeds, and the folder of the data. The keys are listed in
docs/evaluation.md. A suite is read without torch. Scores that other authors published are read here
too: they stand under the table's own rows and are never compared, because they come from other
prompts and other software, and the scores of single questions are not known.
"""

import importlib.util
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from ...core import shipped
from ...core.document import Section, parse
from ...core.errors import UserError, did_you_mean
from ...core.extras import install_command
from ...core.files import read_text, resolve_path
from ...core.text import join_words
from ...recipe import Eval

LM_EVAL = "lm-eval:"
# Not imported: that takes 8 seconds, and `plan` needs only the numbers of requests.
_spec = importlib.util.find_spec("lm_eval")
LM_EVAL_TASKS = Path(_spec.origin if _spec and _spec.origin else LM_EVAL).parent / "tasks"
"""The folder of lm-eval's tasks; without lm-eval one that does not exist."""

_PAGE = (
    "`soren-align docs evaluation` lists all keys of a suite and their defaults"
    " (docs/evaluation.md)"
)
Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=100)]
"""A single path component, since files are named after it."""
Place = Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=1000)]
"""A path, or the first part of one."""


_Choices = Annotated[int, Field(ge=2)]


class Seeds(Section):
    """The four seeds of lm-eval, with its defaults."""

    random: int = 0
    numpy: int = 1234
    torch: int = 1234
    fewshot: int = 1234


def _distinct(key: str) -> AfterValidator:
    """Return the check of a list in which no two entries have the same `key`."""

    def check(entries: list[Any]) -> list[Any]:
        counts = Counter(getattr(entry, key) for entry in entries)
        if repeated := min((name for name, count in counts.items() if count > 1), default=None):
            raise ValueError(f"{key} {repeated!r} occurs twice; give every entry its own {key}")
        return entries

    return AfterValidator(check)


class SuiteTask(Section):
    """A task, and its score's column."""

    task: Name
    """lm-eval's name of the task or group. In a group all questions have equal weight."""
    metric: Annotated[str, Field(pattern=r"^[\w-]+(\+[\w-]+)*$")]
    """The metric, e.g. acc; it must be a mean over questions, or over the outcomes of all
    questions. a+b: the mean of two."""
    column: Name = Field(default_factory=lambda values: values.get("task", ""))
    """The name of its score in results and tables, and of its file of samples."""
    file: Place = Field(default_factory=lambda values: f"{values.get('task', '')}.yaml")
    """Its YAML file, relative to the suite's folder; `lm-eval:` stands for the folder of lm-eval's
    tasks."""
    about: str = ""
    """What the column's questions are, for a line under the table."""
    filter: str = "none"
    """The task's filter for responses before they are scored."""
    cluster: str | None = None
    """The field of a question that names its cluster, such as its source text; `task`: a group's
    subjects. Questions of one cluster are not independent, which makes the intervals of differences
    wider."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Few-shot examples in each prompt. null: the number in the task's file, which is 0 if it has
    none."""
    questions: int | None = None
    """The benchmark's number of questions. With another number the table's title reports other
    data."""
    requests: int | None = None
    """The number of lm-eval's requests: one per answer choice. `plan` computes the cost from it."""
    also: list[Annotated[str, Field(pattern=r"^[\w-]+(,[\w-]+)?$")]] = Field(default_factory=list)
    """Other scores to report: `metric`, or `metric,filter`; they are not normalized."""
    num_choices: _Choices | dict[str, _Choices] | None = None
    """Choices of a question: the score is (metric - 1/n) / (1 - 1/n), 0 for answers at random. By
    subtask: the plain mean of the subtasks' scores."""
    imports: list[Annotated[str, Field(pattern=r"^[a-zA-Z_]\w*$")]] = Field(default_factory=list)
    """Python packages that lm-eval's code of this task imports, and that soren-align does not
    require."""
    nltk_data: list[Annotated[str, Field(pattern=r"^\w+/\w+$")]] = Field(default_factory=list)
    """Files of nltk that this code reads, e.g. tokenizers/punkt_tab."""


class Suite(Section):
    """A suite.yaml."""

    _path: Path = PrivateAttr(default=Path())
    title: str
    data_root: Place | None = None
    """The folder that the tasks' `dataset_path` is relative to; null: it is a name on the Hugging
    Face hub."""
    apply_chat_template: bool = False
    """Whether prompts are rendered by each model's chat template."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Prompts in a forward pass. Fixed, because padding changes the last digits of scores."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the weights during evaluation. In bfloat16 a small update of the weights may be
    rounded away."""
    seeds: Seeds = Seeds()
    average: bool = False
    """Whether to add a column with the plain mean of the others."""
    extra: Name | None = None
    """The extra of soren-align that installs the tasks' `imports`."""
    notes: list[str] = Field(default_factory=list)
    """Notes under the table."""
    tasks: Annotated[list[SuiteTask], Field(min_length=1), _distinct("column"), _distinct("task")]

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def name(self) -> str:
        """The folder's name: 'quickstart' for eval/quickstart/suite.yaml."""
        return self.path.parent.name

    def file_of(self, task: SuiteTask) -> Path:
        """Return the task's YAML file."""
        if task.file.startswith(LM_EVAL):
            return LM_EVAL_TASKS / task.file.removeprefix(LM_EVAL)
        return (self.path.parent / task.file).resolve()

    def data_folder(self) -> Path | None:
        """Return the folder `data_root`; None for the hub."""
        if self.data_root is None:
            return None
        # an absolute data_root stays unchanged
        return (self.path.parent / resolve_path(self.data_root)).resolve()


def load_suite(name_or_path: str | Path) -> Suite:
    """Return the suite of a shipped name, a suite.yaml or a folder with one.
    Raises UserError with all errors in it.
    """
    known = shipped.suites()
    path = known.get(str(name_or_path)) or resolve_path(str(name_or_path))
    path = path / "suite.yaml" if path.is_dir() else path
    if not path.is_file():
        hint = shipped.suite_hint(str(name_or_path), path)
        raise UserError(f"{name_or_path}: is neither a suite.yaml nor a shipped suite{hint}")
    path = path.resolve()
    document = parse(
        read_text(path),
        str(path),
        f"is no mapping; write the keys {', '.join(Suite.model_fields)}. {_PAGE}",
    )
    suite = document.validated(Suite, _PAGE)
    suite._path = path
    for i, file in enumerate(map(suite.file_of, suite.tasks)):
        # Without lm-eval, a suite of its tasks can be listed and planned.
        if not file.is_file() and (_spec or LM_EVAL_TASKS not in file.parents):
            document.report(("tasks", i, "file"), f"there is no task file {file}; correct the path")
    document.refuse_problems()
    return suite


def check_suite(options: Eval) -> Suite:
    """Return `suite_of`. Raises UserError also if a table of published scores cannot be read."""
    suite = suite_of(options)
    for name in options.published:
        load_published(name, suite.name)
    return suite


def suite_of(options: Eval) -> Suite:
    """Return the suite of a recipe's evaluation section, with the changes in that section.

    Raises UserError if the section omits a column that the suite does not have, or all columns.
    """
    suite = load_suite(options.suite)
    changes = options.model_dump(include={"batch_size", "dtype"}, exclude_none=True)
    # Absolute: a suite's own paths are relative to its folder, and this one to the working
    # directory.
    if options.data_root is not None:
        changes["data_root"] = str(Path(options.data_root).expanduser().absolute())
    _refuse_unknown(options.omit, suite, "eval.omit")
    if options.omit:
        changes["tasks"] = [task for task in suite.tasks if task.column not in options.omit]
        if not changes["tasks"]:
            raise UserError(
                f"eval.omit: all columns of suite {suite.name} are omitted; keep at least one"
                " column"
            )
    return suite.model_copy(update=changes)


def _refuse_unknown(chosen: Sequence[str], suite: Suite, place: str) -> None:
    """Raise UserError if a column that the recipe names at `place` is none of the suite's."""
    columns = [task.column for task in suite.tasks]
    for column in chosen:
        if column not in columns:
            hint = did_you_mean(column, columns, f"write one of {', '.join(columns)}")
            raise UserError(f"{place}: suite {suite.name} has no column {column!r}{hint}")


def refuse_missing_packages(suite: Suite) -> None:
    """Raise UserError if packages or files that the code of tasks needs are not installed.
    Runs nothing of them.
    """
    problems = []
    for task in suite.tasks:
        # Looked for, not imported: an import would run the code of a package.
        missing = [package for package in task.imports if importlib.util.find_spec(package) is None]
        omit = f"leave the column out (eval.omit: [{task.column}]; --omit {task.column})"
        if missing:
            command = (
                install_command(suite.extra)
                if suite.extra
                else f"`pip install {' '.join(missing)}`"
            )
            problems.append(
                f"{task.column}: lm-eval's task {task.task} needs {join_words(missing)}, not"
                f" installed here; run {command}, or {omit}"
            )
        elif task.nltk_data:
            import nltk

            for file in task.nltk_data:
                try:
                    nltk.data.find(file)
                except LookupError:
                    name = file.rpartition("/")[2]
                    problems.append(
                        f"{task.column}: lm-eval's task {task.task} needs nltk's data {name}, which"
                        f" no folder of nltk contains; run `python -m nltk.downloader {name}`, or"
                        f" copy its folder from another machine to DIR/{file} and set"
                        f" NLTK_DATA=DIR, or {omit}"
                    )
    if problems:
        raise UserError(*problems)


class PublishedScore(Section):
    """The score in percent."""

    value: Annotated[float, Field(ge=0, le=100)]
    stderr: Annotated[float, Field(ge=0, le=100)] | None = None
    """Null if it was not published."""


class PublishedRow(Section):
    """One model."""

    name: Annotated[str, Field(min_length=1)]
    scores: Annotated[dict[str, PublishedScore], Field(min_length=1)]
    """Scores by column of the suite, and "average"; some may be missing."""


class PublishedTable(Section):
    """One published table."""

    source: str
    """Authors and publication."""
    model: str
    """The model that was evaluated."""
    suite: str
    """The suite with the same columns."""
    rows: Annotated[list[PublishedRow], Field(min_length=1), _distinct("name")]


def load_published(name_or_path: str, suite_name: str) -> list[Any]:
    """Return the rows of a shipped table ('paper/sft') or of a YAML file of the same form.

    A row is {"name", "source", "scores": {column: {"value", "stderr" if published}}}, in percent.
    Raises UserError with all errors in the file, or if the scores belong to another suite.
    """
    known = shipped.published()
    path = known.get(name_or_path) or resolve_path(name_or_path)
    if not path.is_file():
        hint = did_you_mean(name_or_path, known, f"write one of {', '.join(known)}")
        raise UserError(
            f"{name_or_path}: is neither a file nor a shipped table of published scores{hint}"
        )
    form = f"is no mapping; write the keys {', '.join(PublishedTable.model_fields)}"
    table = parse(read_text(path), str(path), form).validated(PublishedTable)
    # Columns of two suites may share a name: scores of another suite would stand in the table
    # unnoticed.
    if table.suite != suite_name:
        raise UserError(
            f"{name_or_path}: has published scores for suite {table.suite}, not for {suite_name};"
            " choose another table"
        )
    source = f"{table.source} ({table.model})"
    return [
        {"name": row.name, "source": source} | row.model_dump(exclude_none=True)
        for row in table.rows
    ]
