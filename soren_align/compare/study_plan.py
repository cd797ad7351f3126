"""The plan of a study: its runs, their cost, and the least differences that it could find.

Computed from the plan of one run of each candidate, which differs by its optimizer; learning rates change neither
FLOPs nor memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import UserError, did_you_mean
from .power import Assumed, Design, minimum_detectable, minimum_detectable_loss, num_comparisons
from .study_sections import ALL_PAIRS, StudyFile


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
