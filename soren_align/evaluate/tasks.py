"""From a suite to lm-eval's tasks, with their data."""

import tempfile
from pathlib import Path

import yaml
from lm_eval.tasks import TaskManager

from ..recipe import UserError
from .quiet import quiet
from .suites import Suite


def preflight(suite: Suite) -> None:
    """Load all tasks and their data, so that what is missing is known before a training run and not after it."""
    with quiet(), tempfile.TemporaryDirectory() as folder:
        manager = task_manager(suite, Path(folder))
        for task in suite.tasks:
            try:
                loaded = manager.load([task.task])["tasks"][task.task]
                questions = len(loaded.eval_docs)
            except Exception as error:  # whatever lm-eval, datasets or the hub think of
                problem = str(error).strip().splitlines() or [""]
                raise UserError(
                    f"{suite.file_of(task)}: task {task.task} cannot be loaded: {type(error).__name__}: {problem[0]}"
                ) from error
            if not questions:
                raise UserError(f"{suite.file_of(task)}: task {task.task} has no questions")
            known = {entry["metric"] for entry in loaded.config.metric_list or []}
            filters = {entry["name"] for entry in loaded.config.filter_list or []} or {"none"}
            for word, given, allowed in (("metric", task.metric, known), ("filter", task.filter, filters)):
                if given not in allowed:
                    raise UserError(
                        f"{suite.path} {task.column}: {task.task} has no {word} {given!r};"
                        f" write {' or '.join(sorted(allowed))}"
                    )


def task_manager(suite: Suite, folder: Path) -> TaskManager:
    """lm-eval's tasks of this suite and no others (its own index takes half a minute).

    Each is a generated YAML file that includes the suite's: a dict in its place would inherit nothing, silently.
    """
    for task in suite.tasks:
        content = {"include": str(suite.file_of(task)), "task": task.task, "num_fewshot": task.num_fewshot}
        data = suite.dataset_path(task)
        if data is not None:
            if not Path(data).is_dir():
                raise UserError(f"{suite.file_of(task)}: there is no dataset folder {data}")
            content["dataset_path"] = data
        (folder / f"{task.task}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)
