"""`soren-align plan STUDY`: plan a run of each candidate, and print the plan of the study."""

import json
import sys
from collections import Counter
from typing import Any

from ..compare.study_file import first_run, recipe_of_run
from ..compare.study_plan import ColumnSize, assumed, plan_study
from ..compare.study_plan_table import print_study_plan
from ..compare.study_sections import StudyFile
from ..errors import UserError
from ..evaluate.suites import SuiteTask, suite_of
from ..recipe import Eval, accumulation
from ..silence import quiet_libraries
from ..terminal import Terminal, stderr_console, working
from .environment import set_environment

UNKNOWN_CLUSTERS = (
    "the suite's data are not on this machine: numbers of questions are the published ones, and questions of one "
    "cluster are taken as independent, so that the effects of {} are too small"
)


def plan(study: StudyFile, *, as_json: bool = False, processes: int = 1) -> None:
    """Print what `compare` would do, its cost, and the differences that it could find. Starts no run."""
    assumed(study)
    recipes = {name: recipe_of_run(study, first_run(study, name)) for name in study.candidates}
    first = next(iter(recipes.values()))
    for recipe in recipes.values():
        accumulation(recipe, processes)  # raises before torch is imported
    set_environment(first)
    console = stderr_console()
    with console.status("Loading torch, transformers and TRL"):
        from ..planning.offline import go_offline_without_hub

        go_offline_without_hub()
        from ..planning.plan import plan_training
    with quiet_libraries(), working(console, "Planning the candidates") as show:
        plans: dict[str, dict[str, Any]] = {}
        for name, recipe in recipes.items():
            show(f"Planning {name}")
            plans[name], _ = plan_training(recipe, num_ranks=processes)
        show("Loading tasks")
        sizes, notices = _sizes(first.eval) if first.eval else ({}, [])
    result = plan_study(study, plans, sizes)
    result["notices"] += notices
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        print_study_plan(result, Terminal())


def _sizes(options: Eval) -> tuple[dict[str, ColumnSize], list[str]]:
    """Return the sizes of the suite's columns, and notices; without the data, the published numbers of questions."""
    from ..evaluate.tasks import load_tasks

    suite = suite_of(options)
    try:
        tasks = load_tasks(suite, trusted=options.trust_suite)
    except UserError:
        known = {task.column: ColumnSize(task.questions) for task in suite.tasks if task.questions}
        clustered = ", ".join(task.column for task in suite.tasks if task.cluster)
        return known, [UNKNOWN_CLUSTERS.format(clustered)] if clustered else []
    return {task.column: _size(task, tasks[task.column], options.limit) for task in suite.tasks}, []


def _size(task: SuiteTask, loaded: Any, limit: int | None) -> ColumnSize:
    from ..evaluate.scores import cluster_labels
    from ..evaluate.tasks import subtasks

    docs = [(subtask, doc) for subtask in subtasks(loaded) for doc in list(subtask.eval_docs)[:limit]]
    return ColumnSize(len(docs), list(Counter(cluster_labels(task, docs) or ()).values()))
