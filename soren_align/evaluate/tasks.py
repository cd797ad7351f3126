"""From a suite to lm-eval's tasks, with their data."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from ..errors import UserError
from ..silence import silence
from .cache import default_root, digest
from .sandbox import loading
from .suites import Suite, SuiteTask

Tasks = dict[str, Task | Group]
"""By column: a task, or a group of them (MMLU and its 57 subjects)."""


def load_tasks(
    suite: Suite,
    cache: Path | None = None,
    on_column: Callable[[str], object] | None = None,
    *,
    trusted: bool = False,
) -> Tasks:
    """Every task of the suite with its data, so that what is missing is known before a training run and not after it.

    cache: where what `datasets` makes of local data is kept; None is the user's. on_column: called with each column
    before it is loaded (MMLU's 57 datasets take seconds). trusted: the suite's files may run code.
    Raises UserError, naming the task, where lm-eval or the data do not have what the suite asks for, and where a file
    would run code untrusted.
    """
    tasks: Tasks = {}
    cache = cache or default_root()
    with tempfile.TemporaryDirectory() as folder, loading(trusted, cache):
        manager = _manager(suite, Path(folder), cache)
        for task in suite.tasks:
            if on_column:
                on_column(task.column)
            with silence():
                try:
                    loaded = manager.load([_wrapper(task)])
                    found = (loaded.get("groups", {}) | loaded["tasks"])[task.task]
                    empty = [name for name, size in sizes_of(found).items() if not size]
                except UserError as error:
                    raise UserError(f"{suite.file_of(task)}: {error}") from None
                except Exception as error:  # whatever lm-eval, datasets or the hub think of
                    why = _in_short(error, task)
                    if suite.data_root is None:
                        why += ". Without a network, --data-root DIR (eval.data_root) takes downloaded datasets"
                    raise UserError(f"{suite.file_of(task)}: task {task.task} cannot be loaded: {why}") from error
            if empty:
                raise UserError(f"{suite.file_of(task)}: task {empty[0]} has no questions")
            if any(getattr(leaf, "UNSAFE_CODE", False) for leaf in leaves(found)):
                raise UserError(f"{suite.file_of(task)}: runs code that a model writes; choose another task")
            _refuse_unknown_scores(suite, task, leaves(found)[0])
            tasks[task.column] = found
    return tasks


def leaves(task: Task | Group) -> list[Any]:
    """The tasks of a group, or the task alone."""
    return task.get_all_tasks() if isinstance(task, Group) else [task]


def sizes_of(task: Task | Group) -> dict[str, int]:
    """Questions of each leaf, by its name."""
    return {leaf.task_name: len(leaf.eval_docs) for leaf in leaves(task)}


def scores_of(task: SuiteTask) -> list[str]:
    """lm-eval's keys of the scores that are kept: the headline first, `metric,filter` each."""
    return [f"{task.metric},{task.filter}", *(a if "," in a else f"{a},{task.filter}" for a in task.also)]


def _manager(suite: Suite, folder: Path, cache: Path) -> TaskManager:
    """lm-eval's tasks of this suite and no others (its own index takes half a minute).

    Each is a generated YAML file that includes the suite's: a dict in its place would inherit nothing, silently. A
    group stands in another as `group: mmlu`; with `task: mmlu`, as in lm-eval's own `openllm`, its 57 subjects would
    all get that name and be one.
    """
    members = []
    for task in suite.tasks:
        file = suite.file_of(task)
        is_group = "group" in _read(file)
        settings: dict[str, Any] = {"num_fewshot": task.num_fewshot}
        if (data := _data_of(suite, file, is_group)) is not None:
            settings |= {"dataset_path": str(data), "dataset_kwargs": {"cache_dir": str(_cache_for(data, cache))}}
        if is_group:
            members.append(str(file.parent))
            member = {"group": task.task, **settings}
        else:
            member = {"task": task.task, **settings}
            included = yaml.safe_dump({"include": str(file), "task": task.task})
            (folder / f"{task.task}.yaml").write_text(included, encoding="utf-8")
        wrapper = {"group": _wrapper(task), "task": [member]}
        (folder / f"{_wrapper(task)}.yaml").write_text(yaml.safe_dump(wrapper), encoding="utf-8")
    return TaskManager(include_path=[str(folder), *members], include_defaults=False)


def _wrapper(task: SuiteTask) -> str:
    """The name under which `_manager` files a task."""
    return f"suite_{task.task}"


def _data_of(suite: Suite, file: Path, is_group: bool) -> Path | None:
    """The folder of the data of a task's file; None where the task's own `dataset_path` stands as it is."""
    root = suite.data_folder()
    if root is None:
        return None
    files = sorted(file.parent.glob("*.yaml")) if is_group else [file]
    named = {str(y["dataset_path"]) for y in map(_read, files) if y.get("dataset_path")}
    if len(named) != 1:
        raise UserError(f"{file}: names no dataset_path for {suite.path}'s data_root to complete")
    path = root / named.pop()
    if not path.is_dir():
        raise UserError(f"{file}: there is no dataset folder {path}")
    return path


def _read(file: Path) -> dict[str, Any]:
    """A task's file with what it includes; functions are not looked up."""
    try:
        return load_yaml(file, resolve_func=False)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{file}: is no task's file: {' '.join(str(error).split())[:200]}") from None


def _in_short(error: Exception, task: SuiteTask) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, KeyError):
        return f"its data have no split or column {first}, which {task.task} reads"
    return f"{type(error).__name__}: {first}"


def _cache_for(data: Path, cache: Path) -> Path:
    """A cache of its own for what lies in the folder now.

    `datasets` knows a folder by its last name and its README: from one cache, the same layout with other rows, here or
    elsewhere, would get the rows that were read first (test_fixtures.py).
    """
    files = sorted(f for f in data.rglob("*") if f.is_file())
    there = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    return cache / "datasets" / digest([str(data), there])[:16]


def _refuse_unknown_scores(suite: Suite, task: SuiteTask, leaf: Any) -> None:
    metrics = {entry["metric"] for entry in leaf.config.metric_list or []}
    filters = {entry["name"] for entry in leaf.config.filter_list or []} or {"none"}
    for score in scores_of(task):
        metric, filter_name = score.split(",")
        for word, given, allowed in (("metric", metric, metrics), ("filter", filter_name, filters)):
            if given not in allowed:
                raise UserError(
                    f"{suite.path} {task.column}: {task.task} has no {word} {given!r};"
                    f" write {' or '.join(sorted(allowed))}"
                )
