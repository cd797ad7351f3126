"""`soren-align plan STUDY`: runs, cost and smallest detectable differences of a study.

Computed from the plan of one run of each candidate, which differs by its optimizer; learning rates
change neither FLOPs nor memory. The search space and the verdict's rules stand in the study's file
and are not repeated.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from rich.console import Console

from ..core.errors import UserError, did_you_mean
from ..core.extras import require
from ..core.silence import quiet_libraries
from ..core.text import (
    Table,
    Terminal,
    estimated_time,
    print_labelled,
    stderr_console,
    with_prefix,
    working,
)
from ..evaluate.suite.suites import suite_of
from ..launch.environment import set_environment
from ..recipe import accumulation
from ..run.provenance import DIGITS
from .config import ALL_PAIRS, StudyFile, first_run, missing_extras_of_runs, recipe_of_run
from .declaration import declare
from .estimates import Assumed, Design, detectable_loss, detectable_score
from .stats import num_declared_tests
from .study import AVERAGE, HELD_OUT

ASSUMPTIONS = {
    "changed_by_training": "answers that differ from the base's",
    "changed_by_optimizer": "between two optimizers",
    "changed_by_seed": "between two seeds",
}
"""The labels of the shares among the assumptions."""


@dataclass(frozen=True)
class ColumnSize:
    """A column of the suite."""

    questions: int
    clusters: Sequence[int] = ()
    """The number of questions of each cluster; empty: they are independent, or their clusters are
    not known."""


def plan_study(
    study: StudyFile,
    plans: Mapping[str, dict[str, Any]],
    sizes: Mapping[str, ColumnSize],
    declaration: str,
) -> dict[str, Any]:
    """Return the plan of a study as plain data.

    plans: of a run of the verdict, by candidate, see planning.plan. sizes: of the suite's columns
    whose number of questions is known. declaration: its hash. Raises UserError for an unknown key
    of verdict.assume.
    """
    first = next(iter(plans.values()))
    num_search = study.search.trials * len(study.search.seeds)
    num_verdict = len(study.verdict.seeds)
    num_runs = num_search + num_verdict

    # The cost of a candidate is that of one run, times its runs.
    candidates: dict[str, dict[str, Any]] = {}
    for name, plan in plans.items():
        training, maps = plan["compute"]["training_flops"], plan["processes"]["map_flops"]
        of_maps = maps["all_ranks"] * plan["steps"]["total"] if maps else 0  # an SVD's are unknown
        per_run = None if training is None else training + of_maps
        phases = plan["processes"]["memory_total"]["device"].values()
        candidates[name] = {
            "runs": num_runs,
            "flops_per_run": per_run,
            "maps_are_counted": plan["compute"]["maps_are_counted"],
            "flops": per_run and per_run * num_runs,
            "memory_bytes": max((each for each in phases if each is not None), default=None),
        }
    flops = [each["flops"] for each in candidates.values()]
    total = None if None in flops else sum(flops)
    hours = [plan["compute"]["hours"] for plan in plans.values()]

    # The models of the search's runs may be removed as these end. A run that writes a checkpoint
    # has one more than at its end.
    disks, jobs = [plan["disk"] for plan in plans.values()], study.jobs or 1
    per_run = [
        disk["model_bytes"]
        + disk["num_checkpoints"] * disk["checkpoint_bytes"]
        + disk["start_bytes"]
        for disk in disks
    ]
    searched = num_search * sum(per_run) if study.search.keep_models else jobs * max(per_run)
    checkpoint = max(disk["checkpoint_bytes"] for disk in disks)

    evaluation = first["evaluation"]
    # of the verdict's runs, and of their starting checkpoint, which is evaluated once
    if evaluation is not None:
        num_models, requests = len(plans) * num_verdict + 1, evaluation["num_requests_per_model"]
        evaluation = {
            "suite": evaluation["suite"],
            "num_models": num_models,
            "num_requests": requests and requests * num_models,
        }
    return {
        "title": study.title,
        "declaration": declaration,
        "recipe": study.recipe,
        "task": first["task"],
        "model": first["model"],
        "steps": first["steps"]["total"],
        "runs": {
            "search": len(plans) * num_search,
            "verdict": len(plans) * num_verdict,
            "total": len(plans) * num_runs,
        },
        "trials": study.search.trials,
        "search_seeds": len(study.search.seeds),
        "verdict_seeds": num_verdict,
        "candidates": candidates,
        "flops": total,
        "flops_are_upper_bound": not first["compute"]["tokens_are_measured"],
        "hours": (
            {name: sum(of[name] for of in hours) * num_runs for name in hours[0]} if total else None
        ),
        "hours_assume": first["compute"]["hours_assume"],
        "disk_bytes": num_verdict * sum(per_run) + searched + jobs * checkpoint,
        "evaluation": evaluation,
        "detectable": _detectable(
            study, sizes, first["evaluation"], (first["data"].get("eval") or {}).get("num_kept")
        ),
        "notices": list(
            dict.fromkeys(
                each for plan in plans.values() for each in plan["notices"] + plan["problems"]
            )
        ),
    }


def assumed(study: StudyFile) -> Assumed:
    """Return the assumptions about variances, with those of verdict.assume.
    Raises UserError for an unknown key.
    """
    known = [field.name for field in fields(Assumed)]
    for key in study.verdict.assume:
        if key not in known:
            hint = did_you_mean(key, known, f"write one of {', '.join(known)}")
            raise UserError(f"verdict.assume.{key}: unknown key{hint}")
    return Assumed(**study.verdict.assume)


def _detectable(
    study: StudyFile,
    sizes: Mapping[str, ColumnSize],
    evaluation: dict[str, Any] | None,
    examples: int | None,
) -> dict[str, Any]:
    """Return the minimum detectable effects of each column, in percentage points, and of the
    held-out metric.

    examples: held-out ones that judge. With declared margins of equivalence, also the smallest that
    can be shown.
    """
    verdict = study.verdict
    columns = evaluation["columns"] if evaluation else []
    measures = [
        HELD_OUT,
        *columns,
        *([AVERAGE] if evaluation and evaluation["has_average"] else []),
    ]
    # The same count of tests as the verdict's own correction: a smaller one would promise too much.
    num_tests = num_declared_tests(verdict, len(study.candidates), measures)
    design = Design(seeds=len(verdict.seeds), num_tests=num_tests, power=verdict.power)
    assumptions = assumed(study)
    kinds: dict[str, dict[str, bool]] = {
        "to_base": {"to_base": True},
        "to_reference": {"to_base": False},
    }
    if verdict.equivalence:
        kinds["equivalence"] = {"to_base": False, "equivalence": True}
    return {
        "power": verdict.power,
        "comparisons": num_tests,
        "reference": verdict.reference,
        "assumed": asdict(assumptions),
        "margins": verdict.equivalence and verdict.equivalence.model_dump(),
        "columns": {
            column: {
                "questions": size.questions,
                "num_clusters": len(size.clusters) or None,
                **{
                    kind: detectable_score(
                        design, assumptions, size.questions, size.clusters, **options
                    )
                    for kind, options in kinds.items()
                },
            }
            for column, size in sizes.items()
        },
        "held_out": {
            "metric": study.search.metric,
            "examples": examples,
            **{
                kind: detectable_loss(design, assumptions, examples, **options)
                for kind, options in kinds.items()
            },
        },
    }


def plan(study: StudyFile, next_command: str, *, as_json: bool = False, processes: int = 1) -> None:
    """Print what `compare` would do, its cost, the differences that it could find, and its command.
    Starts no run.
    """
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
    with (
        quiet_libraries(),
        working(console, "Planning the candidates") as show,
        offline_without_hub(),
    ):
        plans: dict[str, dict[str, Any]] = {}
        for name, recipe in recipes.items():
            show(f"Planning {name}")
            plans[name], _ = plan_training(recipe, num_ranks=processes)
        show("Loading tasks")
        sizes: dict[str, ColumnSize] = {}
        notices = [
            f"compare would not start on this machine: {problem}"
            for problem in missing_extras_of_runs(study)
        ]
        if options := first.eval:
            suite = suite_of(options)
            try:
                require("lm_eval", "eval")
                from ..evaluate.stats.scores import cluster_labels
                from ..evaluate.suite.tasks import load_tasks, subtasks

                tasks = load_tasks(suite, trusted=options.trust_suite)
            except UserError:
                # A plan without data or network is better than none: published sizes stand in for
                # the suite's own.
                tasks = None
                clustered = [task.column for task in suite.tasks if task.cluster]
                notices += [
                    "lm-eval or the suite's data are not on this machine, so the plan uses"
                    " published numbers of questions and ignores clusters of questions: the minimum"
                    f" detectable effects of {', '.join(clustered)} are too small"
                ] * bool(clustered)
            for task in suite.tasks:
                if tasks is not None:
                    parts = subtasks(tasks[task.column])
                    docs = [
                        (part, doc)
                        for part in parts
                        for doc in list(part.eval_docs)[: options.limit]
                    ]
                    clusters = [*Counter(cluster_labels(task, docs) or ()).values()]
                    sizes[task.column] = ColumnSize(len(docs), clusters)
                elif task.questions:
                    sizes[task.column] = ColumnSize(task.questions)
    result = plan_study(study, plans, sizes, declare(study, recipes)["sha256"])
    result["notices"] += notices
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        print_study_plan(result, terminal := Terminal())
        print_labelled(terminal, "next", next_command, wrap=False)


def print_study_plan(plan: dict[str, Any], console: Console) -> None:
    """Print the return value of `plan_study`."""
    write = partial(print_labelled, console)
    for notice in plan["notices"]:
        write("notice", notice)
        console.print()
    runs = plan["runs"]
    if plan["title"]:
        write("study", plan["title"])
    write(
        "declares",
        f"{plan['declaration'][:DIGITS]}; publish this hash before the runs to prove the plan",
    )
    write(
        "recipe",
        f"{plan['recipe']}: {plan['task']} of {plan['model']['name_or_path']}, {plan['steps']:,}"
        " steps",
    )
    times = f" x {plan['search_seeds']} seeds" if plan["search_seeds"] > 1 else ""
    candidates = f"{len(plan['candidates'])} candidates"
    write("runs", f"{runs['total']:,}")
    write("", f"{runs['search']:,} of the search: {candidates} x {plan['trials']} trials{times}")
    fresh = f"{candidates} x {plan['verdict_seeds']} fresh seeds"
    write("", f"{runs['verdict']:,} of the verdict: {fresh}")
    console.print()
    _print_cost(plan, console)
    write("disk", f"{with_prefix(plan['disk_bytes'], 'B')} at most")
    if section := plan["evaluation"]:
        number = section["num_requests"]
        requests = f": {number:,} requests in all" if number else ""
        write("eval", f"{section['suite']}, of {section['num_models']} models{requests}")
    else:
        write("eval", "none: the verdict uses only the held-out examples")
    console.print()
    _print_detectable(plan, console)


def _print_cost(plan: dict[str, Any], console: Console) -> None:
    """Print runs, FLOPs and memory of each candidate, and the hours of all."""
    write = partial(print_labelled, console)
    runs, candidates = plan["runs"], plan["candidates"]
    units = {"flops_per_run": "", "flops": "", "memory_bytes": "B"}
    rows = [
        (name, f"{each['runs']:,}", *(with_prefix(each[key], unit) for key, unit in units.items()))
        for name, each in candidates.items()
    ]
    rows.append(("total", f"{runs['total']:,}", "", with_prefix(plan["flops"], ""), ""))
    head = ["candidate", "runs", "FLOP per run", "FLOP", "peak memory per rank"]
    console.print(Table(head, rows, title="cost").rich(pad_edge=True))
    if hours := plan["hours"]:
        times = ", ".join(
            f"{estimated_time(number)} of one {name}" for name, number in hours.items()
        )
        write("", f"{times}, at {plan['hours_assume']}")
    if plan["flops_are_upper_bound"]:
        write("", "an upper bound, with all examples at max_length")
    if unknown := [name for name, each in candidates.items() if not each["maps_are_counted"]]:
        write(
            "",
            f"the maps of {', '.join(unknown)} are not included, because their operations are not"
            " counted",
        )
    write("", "not included: evaluations on benchmarks and on held-out examples")


def _print_detectable(plan: dict[str, Any], console: Console) -> None:
    """Print the smallest differences that the study can find, and what this assumes."""
    write = partial(print_labelled, console)
    section = plan["detectable"]
    title = (
        f"minimum detectable effect: {section['power']:.0%} power, Holm over"
        f" {section['comparisons']} tests"
    )
    reference = (
        "to each other" if section["reference"] == ALL_PAIRS else f"to {section['reference']}"
    )
    kinds = {"to_base": "to the base", "to_reference": reference}
    kinds |= {"equivalence": "equivalent within"} if section["margins"] else {}
    held_out, rows = section["held_out"], []
    for column, each in section["columns"].items():
        clusters = f"{each['num_clusters']:,}" if each["num_clusters"] else ""
        rows.append(
            (
                column,
                f"{each['questions']:,}",
                clusters,
                *(f"{each[kind]:.1f} points" for kind in kinds),
            )
        )
    examples = f"{held_out['examples']:,}" if held_out["examples"] else ""
    rows.append((held_out["metric"], examples, "", *(f"{held_out[kind]:.3f}" for kind in kinds)))
    table = Table(["measure", "questions", "clusters", *kinds.values()], rows, title=title)
    console.print(table.rich(pad_edge=True))
    for name, margin in (section["margins"] or {}).items():
        sizes = [held_out] if name == "held_out" else section["columns"].values()
        reached = [each["equivalence"] for each in sizes]
        if margin is not None and reached and max(reached) > margin:
            text = f"verdict.equivalence.{name}: the margin {margin:g} is too small for this study"
            write(
                "notice", f"{text}; use more seeds, more examples or questions, or a larger margin"
            )
    values = section["assumed"]
    deviation = f"standard deviation over seeds: {values['loss_sd']:g} of {held_out['metric']}"
    deviation += f", over examples: {values['example_sd']:g}" if held_out["examples"] else ""
    assumptions = [deviation]
    if section["columns"]:
        shares = ", ".join(f"{100 * values[key]:g}% {label}" for key, label in ASSUMPTIONS.items())
        correlation = (
            f"correlation: {values['cluster_correlation']:g} between changes in one cluster"
        )
        assumptions = [shares, f"{deviation}, {values['seed_sd']:g} points of a score", correlation]
    write("", f"assumed (verdict.assume): {'; '.join(assumptions)}")
