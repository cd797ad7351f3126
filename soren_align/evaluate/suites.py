"""A suite: which lm-eval tasks are asked, how, and under which column each score stands.

The tasks themselves are lm-eval's YAML files, its own or others beside the suite. A suite adds what a comparison must
hold fixed: shots, chat template, batch size, seeds, and where the data lie.
"""

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from .. import shipped
from ..errors import UserError, did_you_mean
from .yaml_sections import Section, checked, mapping, refuse_twice

LM_EVAL = "lm-eval:"
# Found, not imported: that takes 8 seconds, and a plan only counts.
_found = importlib.util.find_spec("lm_eval")
assert _found is not None
assert _found.origin is not None
LM_EVAL_TASKS = Path(_found.origin).parent / "tasks"


Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=100)]
"""A single path component: files are named by it."""
Place = Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=1000)]
"""A path or the beginning of one."""


class Seeds(Section):
    """lm-eval's four."""

    random: int
    numpy: int
    torch: int
    fewshot: int


class SuiteTask(Section):
    """One score."""

    column: Name
    """Its name in results and tables, and of its file of samples."""
    task: Name
    """lm-eval's name of the task, or of the group, whose tasks' questions all count alike."""
    file: Place
    """Its YAML file, from the suite's folder; `lm-eval:` is the folder of lm-eval's own."""
    metric: str
    """Its metric, e.g. acc: a mean over questions."""
    filter: str = "none"
    """Which of the task's filters the answers pass before they are scored."""
    num_fewshot: Annotated[int, Field(ge=0)]
    """Worked examples in front of each question."""
    questions: int | None = None
    """How many the benchmark has. On another number the result is not called by the suite's title."""
    requests: int | None = None
    """How many times a model is asked for them: once per answer to choose from. Tells a plan the cost."""
    also: list[Annotated[str, Field(pattern=r"^[\w-]+(,[\w-]+)?$")]] = Field(default_factory=list)
    """Other scores to be stored beside it: `metric`, or `metric,filter`."""


class Suite(Section):
    """What every model is asked."""

    path: Path
    """The suite.yaml."""
    title: str
    data_root: Place | None = None
    """Folder that completes the tasks' `dataset_path`; null: they are names on the Hugging Face hub."""
    apply_chat_template: bool
    batch_size: Annotated[int, Field(ge=1)]
    """Fixed, since padding changes scores in low precision."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights while they answer. In bfloat16 a small update of the weights may be rounded away."""
    seeds: Seeds
    average: bool = False
    """Whether the plain mean of the columns is a column of its own."""
    notes: list[str] = Field(default_factory=list)
    """What a reader of the numbers must know; stands under the table."""
    tasks: Annotated[list[SuiteTask], Field(min_length=1)]

    @property
    def name(self) -> str:
        """The folder's: eval/quickstart/suite.yaml is 'quickstart'."""
        return self.path.parent.name

    @model_validator(mode="after")
    def _no_name_twice(self) -> "Suite":
        for key in ("column", "task"):
            names = [getattr(task, key) for task in self.tasks]
            refuse_twice(names, f"tasks: {key} {{}} stands there twice; each must have its own")
        return self

    def file_of(self, task: SuiteTask) -> Path:
        """The task's YAML file."""
        if task.file.startswith(LM_EVAL):
            return LM_EVAL_TASKS / task.file.removeprefix(LM_EVAL)
        return (self.path.parent / task.file).resolve()

    def data_folder(self) -> Path | None:
        """The folder that `data_root` names; None for the hub."""
        if self.data_root is None:
            return None
        return (self.path.parent / shipped.resolve(self.data_root)).resolve()  # an absolute root stays as it is


def load_suite(name_or_path: str | Path) -> Suite:
    """The suite of a shipped name, of a suite.yaml or of the folder that holds one.

    Raises UserError with every mistake found.
    """
    path = _find(str(name_or_path))
    raw = mapping(path, f"a suite is a mapping ({', '.join(_keys(Suite))})")
    if "path" in raw:
        raise UserError(f"{path} path: unknown key; keys here: {', '.join(_keys(Suite))}")
    suite = checked(raw | {"path": path}, Suite, path, _hint)
    missing = [suite.file_of(task) for task in suite.tasks if not suite.file_of(task).is_file()]
    if missing:
        raise UserError(*(f"{path}: there is no task file {file}" for file in missing))
    return suite


def _find(name_or_path: str) -> Path:
    known = shipped.suites()
    if name_or_path in known:
        return known[name_or_path]
    path = shipped.resolve(name_or_path)
    path = path / "suite.yaml" if path.is_dir() else path
    if path.is_file():
        return path.resolve()
    hint = did_you_mean(name_or_path, known, f"shipped suites: {', '.join(known)}")
    raise UserError(f"{name_or_path}: neither a suite's file nor a shipped suite{hint}")


def _keys(section: type[Section]) -> list[str]:
    return [key for key in section.model_fields if key != "path"]


def _hint(loc: tuple[str | int, ...]) -> str:
    """What an unknown key was probably meant to be."""
    *sections, key = loc
    section = {"tasks": SuiteTask, "seeds": Seeds}.get(str(sections[0]) if sections else "", Suite)
    return did_you_mean(key, _keys(section), f"keys here: {', '.join(_keys(section))}")
