"""`soren-align plan STUDY`: plan a run of each candidate, and print the plan of the study."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from ..core.errors import UserError, did_you_mean
from ..core.silence import quiet_libraries
from ..core.text import Terminal, print_labelled, short_hours, stderr_console, with_prefix, working
from ..evaluate.suite.suites import SuiteTask, suite_of
from ..launch.environment import set_environment
from ..recipe import Eval, accumulation
from .config import ALL_PAIRS, StudyFile, first_run, recipe_of_run
from .stats.estimates import Assumed, Design, minimum_detectable, minimum_detectable_loss, num_comparisons

# ---
# The plan of a study: its runs, their cost, and the least differences that it could find.
#
# Computed from the plan of one run of each candidate, which differs by its optimizer; learning rates change neither
# FLOPs nor memory.


@dataclass(frozen=True)
class ColumnSize:
    """A column of the suite."""

    questions: int
    clusters: Sequence[int] = ()
    """The number of questions of each cluster; empty: they are independent, or their clusters are not known."""


def plan_study(
    study: StudyFile, plans: Mapping[str, dict[str, Any]], sizes: Mapping[str, ColumnSize]
) -> dict[str, Any]:
    """Return the plan of a study as plain data.

    plans: of a run of the verdict, by candidate, see planning.plan. sizes: of the suite's columns whose number of
    questions is known. Raises UserError for an unknown key of verdict.assume.
    """
    first = next(iter(plans.values()))
    num_search, num_verdict = study.search.trials * len(study.search.seeds), len(study.verdict.seeds)
    num_runs = num_search + num_verdict
    candidates = {name: _candidate(plan, num_runs) for name, plan in plans.items()}
    flops = [each["flops"] for each in candidates.values()]
    total = None if None in flops else sum(flops)
    hours = [plan["compute"]["hours"] for plan in plans.values()]
    largest = max(candidates, key=lambda name: candidates[name]["memory_bytes"] or 0)
    return {
        "title": study.title,
        "recipe": study.recipe,
        "task": first["task"],
        "model": first["model"],
        "steps": first["steps"]["total"],
        "runs": {
            "search": len(plans) * num_search,
            "verdict": len(plans) * num_verdict,
            "total": len(plans) * num_runs,
        },
        "search": study.search.model_dump(exclude={"space"}),
        "space": {name: {key: _plain(each) for key, each in study.space(name).items()} for name in plans},
        "verdict": study.verdict.model_dump(exclude={"assume"}),
        "budget_hours": study.budget_hours,
        "candidates": candidates,
        "flops": total,
        "flops_are_upper_bound": not first["compute"]["tokens_are_measured"],
        "hours": {name: sum(of[name] for of in hours) * num_runs for name in hours[0]} if total else None,
        "hours_assume": first["compute"]["hours_assume"],
        "largest_memory": {"candidate": largest, "bytes_per_rank": candidates[largest]["memory_bytes"]},
        "disk": _disk(study, [plan["disk"] for plan in plans.values()], num_search, num_verdict),
        "evaluation": _evaluation(first["evaluation"], len(plans) * num_verdict),
        "detectable": _detectable(study, sizes, first["evaluation"]),
        "notices": list(dict.fromkeys(each for plan in plans.values() for each in plan["notices"] + plan["problems"])),
    }


def assumed(study: StudyFile) -> Assumed:
    """Return the assumptions about variances, with those of verdict.assume. Raises UserError for an unknown key."""
    known = [field.name for field in fields(Assumed)]
    for key in study.verdict.assume:
        if key not in known:
            raise UserError(f"verdict.assume.{key}: unknown key{did_you_mean(key, known, ', '.join(known))}")
    return Assumed(**study.verdict.assume)


def _candidate(plan: dict[str, Any], num_runs: int) -> dict[str, Any]:
    """Return FLOPs and memory of a candidate's runs."""
    training, maps = plan["compute"]["training_flops"], plan["processes"]["map_flops"]
    of_maps = maps["all_ranks"] * plan["steps"]["total"] if maps else 0  # an SVD's are unknown
    per_run = None if training is None else training + of_maps
    phases = [each for each in plan["processes"]["memory_total"]["device"].values() if each is not None]
    return {
        "optimizer": plan["optimizer_description"],
        "runs": num_runs,
        "flops_per_run": per_run,
        "maps_are_counted": plan["compute"]["maps_are_counted"],
        "flops": per_run and per_run * num_runs,
        "memory_bytes": max(phases, default=None),
    }


def _disk(study: StudyFile, disks: Sequence[dict[str, int]], num_search: int, num_verdict: int) -> dict[str, Any]:
    """Return the bytes of all run folders, and without the models and checkpoints of the search's runs.

    disks: of a run of each candidate, see planning.disk. A run that writes a checkpoint has one more than at its end.
    """
    jobs = study.jobs or 1
    largest = {key: max(each[key] for each in disks) for key in disks[0]}
    per_run = [d["model_bytes"] + d["num_checkpoints"] * d["checkpoint_bytes"] + d["start_bytes"] for d in disks]
    of_verdict = num_verdict * sum(per_run) + jobs * largest["checkpoint_bytes"]
    fewer, all_models = of_verdict + jobs * max(per_run), of_verdict + num_search * sum(per_run)
    total = all_models if study.search.keep_models else fewer
    return {"bytes": total, "bytes_without_models_of_the_search": fewer, **largest}


def _evaluation(section: dict[str, Any] | None, num_runs: int) -> dict[str, Any] | None:
    """Return the evaluation of the verdict's runs and of their starting checkpoint, which is evaluated once."""
    if section is None:
        return None
    requests = section["num_requests_per_model"]
    return {
        "suite": section["suite"],
        "num_models": num_runs + 1,
        "num_requests_per_model": requests,
        "num_requests": requests and requests * (num_runs + 1),
        "contamination": section["contamination"],
    }


def _detectable(study: StudyFile, sizes: Mapping[str, ColumnSize], evaluation: dict[str, Any] | None) -> dict[str, Any]:
    """Return the minimum detectable effects of each column, in percentage points, and of the held-out metric."""
    verdict = study.verdict
    columns = evaluation["columns"] if evaluation else []
    num_measures = len(columns) + 1 + bool(evaluation and evaluation["has_average"])
    retention = len(verdict.retention.columns) if verdict.retention else 0
    all_pairs = verdict.reference == ALL_PAIRS
    comparisons = num_comparisons(len(study.candidates), num_measures, retention, all_pairs=all_pairs)
    design = Design(
        candidates=len(study.candidates), seeds=len(verdict.seeds), comparisons=comparisons, power=verdict.power
    )
    assumptions = assumed(study)
    kinds = {"to_base": True, "to_reference": False}
    return {
        "power": verdict.power,
        "comparisons": comparisons,
        "reference": verdict.reference,
        "assumed": asdict(assumptions),
        "columns": {
            column: {
                "questions": size.questions,
                "num_clusters": len(size.clusters) or None,
                **{
                    kind: minimum_detectable(design, assumptions, size.questions, size.clusters, to_base=to_base)
                    for kind, to_base in kinds.items()
                },
            }
            for column, size in sizes.items()
        },
        "held_out": {
            "metric": study.search.metric,
            **{kind: minimum_detectable_loss(design, assumptions, to_base=to_base) for kind, to_base in kinds.items()},
        },
    }


def _plain(dimension: Any) -> Any:
    return dimension if isinstance(dimension, list | str) else dimension.model_dump()


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
        from ..planning.offline import offline_without_hub
        from ..planning.plan import plan_training
    with quiet_libraries(), working(console, "Planning the candidates") as show, offline_without_hub():
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
    from ..evaluate.suite.tasks import load_tasks

    suite = suite_of(options)
    try:
        tasks = load_tasks(suite, trusted=options.trust_suite)
    except UserError:
        known = {task.column: ColumnSize(task.questions) for task in suite.tasks if task.questions}
        clustered = ", ".join(task.column for task in suite.tasks if task.cluster)
        return known, [UNKNOWN_CLUSTERS.format(clustered)] if clustered else []
    return {task.column: _size(task, tasks[task.column], options.limit) for task in suite.tasks}, []


def _size(task: SuiteTask, loaded: Any, limit: int | None) -> ColumnSize:
    from ..evaluate.stats.scores import cluster_labels
    from ..evaluate.suite.tasks import subtasks

    docs = [(subtask, doc) for subtask in subtasks(loaded) for doc in list(subtask.eval_docs)[:limit]]
    return ColumnSize(len(docs), list(Counter(cluster_labels(task, docs) or ()).values()))


# ---
# The plan of a study in text, 80 columns wide.

ASSUMPTIONS = {
    "changed_by_training": "answers that differ from the base's",
    "changed_by_optimizer": "between two optimizers",
    "changed_by_seed": "between two seeds",
}
"""The labels of the shares among the assumptions."""


def print_study_plan(plan: dict[str, Any], console: Console) -> None:
    """Print the return value of `study_plan.plan_study`."""
    for notice in plan["notices"]:
        print_labelled(console, "notice", notice)
        console.print()
    _print_runs(plan, console)
    _print_space(plan, console)
    _print_cost(plan, console)
    _print_disk(plan, console)
    _print_evaluation(plan["evaluation"], console)
    _print_detectable(plan["detectable"], console)


def _print_runs(plan: dict[str, Any], console: Console) -> None:
    write = partial(print_labelled, console)
    search, verdict, runs = plan["search"], plan["verdict"], plan["runs"]
    if plan["title"]:
        write("study", plan["title"])
    write("recipe", f"{plan['recipe']}: {plan['task']} of {plan['model']['name_or_path']}, {plan['steps']:,} steps")
    num_candidates, num_seeds = len(plan["candidates"]), len(search["seeds"])
    times = f" x {num_seeds} seeds" if num_seeds > 1 else ""
    write("runs", f"{runs['total']:,}")
    write("", f"{runs['search']:,} of the search: {num_candidates} candidates x {search['trials']} trials{times}")
    write("", f"{runs['verdict']:,} of the verdict: {num_candidates} candidates x {len(verdict['seeds'])} fresh seeds")
    write("selection", f"by {search['metric']} of the held-out examples at the end of a run")
    if plan["budget_hours"]:
        write("budget", f"no trial starts after {plan['budget_hours']:g} hours of training")


def _print_space(plan: dict[str, Any], console: Console) -> None:
    """Print the searched keys, those with one space for all candidates once."""
    table = _table(f"\nsearch space, {plan['search']['method']}", "key", "candidate", "values", num_text=3)
    keys = dict.fromkeys(key for space in plan["space"].values() for key in space)
    for key in keys:
        by_values: dict[str, list[str]] = {}
        for name, space in plan["space"].items():
            by_values.setdefault(_describe(space.get(key)), []).append(name)
        for values, names in by_values.items():
            table.add_row(key, "all" if len(by_values) == 1 else ", ".join(names), values)
    console.print(table if keys else "")


def _describe(dimension: Any) -> str:
    if dimension is None:
        return "as in the recipe"
    if isinstance(dimension, dict):
        return f"{dimension['low']:g} to {dimension['high']:g}, {'log-' if dimension['log'] else ''}uniform"
    if isinstance(dimension, list):
        return ", ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in dimension)
    return f"that of {dimension.removeprefix('=')}"


def _print_cost(plan: dict[str, Any], console: Console) -> None:
    table = _table("\ncost", "candidate", "runs", "FLOP per run", "FLOP", "peak memory per rank", num_text=1)
    for name, each in plan["candidates"].items():
        flops = (_prefixed(each[key], "") for key in ("flops_per_run", "flops"))
        table.add_row(name, f"{each['runs']:,}", *flops, _prefixed(each["memory_bytes"], "B"))
    table.add_row("total", f"{plan['runs']['total']:,}", "", _prefixed(plan["flops"], ""), "")
    console.print(table)
    if hours := plan["hours"]:
        times = ", ".join(f"{short_hours(number)} hours of one {name}" for name, number in hours.items())
        print_labelled(console, "", f"{times}, at {plan['hours_assume']}")
        if "CPU core" in hours:
            print_labelled(
                console, "", "a model of less than 100 million parameters takes longer: its operations are short"
            )
    if plan["flops_are_upper_bound"]:
        print_labelled(console, "", "an upper bound, with all examples at max_length")
    if unknown := [name for name, each in plan["candidates"].items() if not each["maps_are_counted"]]:
        print_labelled(console, "", f"without the maps of {', '.join(unknown)}, whose operations are not counted")
    print_labelled(console, "", "without the evaluations, and those of the held-out examples")


def _print_disk(plan: dict[str, Any], console: Console) -> None:
    section, keeps = plan["disk"], plan["search"]["keep_models"]
    number = section["num_checkpoints"]
    checkpoints = f"{number} checkpoint{'s' * (number != 1)} of {_prefixed(section['checkpoint_bytes'], 'B')}"
    runs = f"{plan['runs']['total' if keeps else 'verdict']:,} runs"
    per_run = f"a model of {_prefixed(section['model_bytes'], 'B')} and {checkpoints} each at most"
    console.print()
    print_labelled(console, "disk", f"{_prefixed(section['bytes'], 'B')}: {runs} with {per_run}")
    fewer = _prefixed(section["bytes_without_models_of_the_search"], "B")
    text = f"{fewer} with search.keep_models: false, which removes them from the search's runs when they have ended"
    print_labelled(console, "", text if keeps else "those of the search's runs are removed when they have ended")


def _print_evaluation(section: dict[str, Any] | None, console: Console) -> None:
    console.print()
    if section is None:
        print_labelled(console, "eval", "none: the verdict is on the held-out examples alone")
        return
    number = section["num_requests"]
    requests = f": {section['num_requests_per_model']:,} requests each, {number:,} in all" if number else ""
    print_labelled(console, "eval", f"{section['suite']}, of {section['num_models']} models, the base once{requests}")
    for column, each in (section["contamination"] or {}).items():
        if each["overlapping"]:
            counts = f"{each['overlapping']:,} of {each['questions']:,} questions"
            print_labelled(console, "", f"{column}: {counts} are in the training examples")


def _print_detectable(section: dict[str, Any], console: Console) -> None:
    power, comparisons = section["power"], section["comparisons"]
    title = f"minimum detectable effect: {power:.0%} power, Holm over {comparisons} comparisons"
    console.print(f"\n{title}", style="italic", highlight=False)
    reference = "to each other" if section["reference"] == ALL_PAIRS else f"to {section['reference']}"
    table = _table(None, "measure", "questions", "clusters", "to the base", reference, num_text=1)
    for column, each in section["columns"].items():
        clusters = f"{each['num_clusters']:,}" if each["num_clusters"] else ""
        effects = (f"{each[kind]:.1f} points" for kind in ("to_base", "to_reference"))
        table.add_row(column, f"{each['questions']:,}", clusters, *effects)
    held_out = section["held_out"]
    table.add_row(held_out["metric"], "", "", *(f"{held_out[kind]:.3f}" for kind in ("to_base", "to_reference")))
    console.print(table)
    values = section["assumed"]
    deviation = f"standard deviation over seeds: {values['loss_sd']:g} of {held_out['metric']}"
    assumptions = [deviation]
    if section["columns"]:
        shares = ", ".join(f"{100 * values[key]:g}% {label}" for key, label in ASSUMPTIONS.items())
        correlation = f"correlation: {values['cluster_correlation']:g} between changes in one cluster"
        assumptions = [shares, f"{deviation}, {values['seed_sd']:g} points of a score", correlation]
    print_labelled(console, "", f"assumed (verdict.assume): {'; '.join(assumptions)}")


def _prefixed(number: float | None, unit: str) -> str:
    return "unknown" if number is None else with_prefix(number, unit)


def _table(title: str | None, *columns: str, num_text: int) -> Table:
    """A table without lines; columns after the first `num_text` are numbers."""
    table = Table(title=title, title_justify="left", box=None)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_text else "right", overflow="fold")
    return table
