"""A suite: which lm-eval tasks are asked, how, and under which column each score stands.

The tasks themselves are lm-eval's own YAML files. A suite adds what a comparison must hold fixed: shots, chat
template, batch size, seeds, and where the data lie.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from .. import shipped
from ..recipe import UserError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Seeds(_Section):
    """lm-eval's four."""

    random: int
    numpy: int
    torch: int
    fewshot: int


class SuiteTask(_Section):
    """One score."""

    column: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Its name in results and tables, and of its file of samples."""
    task: str
    """lm-eval's name of the task."""
    file: str
    """Its YAML file, from the suite's folder."""
    metric: str
    """Its metric, e.g. acc: a mean over questions."""
    filter: str = "none"
    """Which of the task's filters the answers pass before they are scored."""
    num_fewshot: Annotated[int, Field(ge=0)]
    """Worked examples in front of each question."""


class Suite(_Section):
    """What every model is asked."""

    path: Path
    """The suite.yaml."""
    title: str
    data_root: str | None = None
    """Folder that completes the tasks' `dataset_path`; null: they are names on the Hugging Face hub."""
    apply_chat_template: bool
    batch_size: Annotated[int, Field(ge=1)]
    """Fixed, since padding changes scores in low precision."""
    seeds: Seeds
    tasks: Annotated[list[SuiteTask], Field(min_length=1)]

    @property
    def name(self) -> str:
        """The folder's: eval/quickstart/suite.yaml is 'quickstart'."""
        return self.path.parent.name

    @model_validator(mode="after")
    def _no_name_twice(self) -> "Suite":
        for key in ("column", "task"):
            names = [getattr(task, key) for task in self.tasks]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"tasks: {key} {twice[0]!r} stands there twice; each must have its own")
        return self

    def file_of(self, task: SuiteTask) -> Path:
        """The task's YAML file."""
        return (self.path.parent / task.file).resolve()

    def dataset_path(self, task: SuiteTask) -> str | None:
        """The folder of the task's data; None where the task's own `dataset_path` stands as it is."""
        if self.data_root is None:
            return None
        given = YAML(typ="rt", pure=True).load(self.file_of(task).read_text(encoding="utf-8")).get("dataset_path")
        if given is None:
            raise UserError(f"{self.file_of(task)}: names no dataset_path for {self.path}'s data_root to complete")
        root = shipped.resolve(self.data_root)
        return str((self.path.parent / root / given).resolve())  # an absolute root stays as it is


def load_suite(name_or_path: str | Path) -> Suite:
    """The suite of a shipped name, of a suite.yaml or of the folder that holds one.

    Raises UserError with every mistake found.
    """
    path = _find(str(name_or_path))
    try:
        raw = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a suite is a mapping ({', '.join(_keys(Suite))})")
    if "path" in raw:
        raise UserError(f"{path} path: unknown key; keys here: {', '.join(_keys(Suite))}")
    try:
        suite = Suite.model_validate(raw | {"path": path})
    except ValidationError as error:
        raise UserError(*(f"{path} {_say(e)}" for e in error.errors(include_url=False))) from None
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
    close = difflib.get_close_matches(name_or_path, known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'?" if close else f"shipped suites: {', '.join(known)}"
    raise UserError(f"{name_or_path}: neither a suite's file nor a shipped suite; {hint}")


def _keys(section: type[BaseModel]) -> list[str]:
    return [key for key in section.model_fields if key != "path"]


def _say(error: Any) -> str:
    """One pydantic error as a sentence: key, finding, remedy."""
    loc = error["loc"]
    where = ".".join(str(part) for part in loc)
    if error["type"] == "extra_forbidden":
        section = {"tasks": SuiteTask, "seeds": Seeds}.get(loc[0] if len(loc) > 1 else "", Suite)
        close = difflib.get_close_matches(str(loc[-1]), _keys(section), n=1, cutoff=0.6)
        hint = f"did you mean '{close[0]}'?" if close else f"keys here: {', '.join(_keys(section))}"
        return f"{where}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{where}: is required"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{where}: found {error['input']!r}; {error['msg'][0].lower()}{error['msg'][1:]}"
