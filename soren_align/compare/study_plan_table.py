"""The plan of a study in text, 80 columns wide."""

from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from ..terminal import print_labelled, short_hours, with_prefix
from .study_sections import ALL_PAIRS

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
