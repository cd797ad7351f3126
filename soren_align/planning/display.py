"""A plan for a person, 80 columns wide."""

from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from ..data import Account, show_example
from ..manifest import describe_dropped
from . import processes
from .processes import metric, tell


def show(found: dict[str, Any], counted: Account | None, console: Console) -> None:
    """Print what `plan.plan` found."""
    say = partial(console.print, markup=False, highlight=False)
    steps = found["steps"]
    for notice in found["notices"]:
        tell(console, "notice", notice)
        say("")
    model = found["model"]
    trained = "" if model["trained"] == model["parameters"] else f", {model['trained']:,} of them trained"
    say(f"{found['task']} from {model['start']} ({model['parameters']:,} parameters{trained})")
    _show_data(found["data"], counted, console)
    say(f"\nsteps     {steps['total']:,} of {steps['batch']} rows; {steps['epochs']} epochs of {steps['per_epoch']:,}")
    rates = Table("step", "matrices", "the rest", title="learning rates", title_justify="left", box=None)
    for rate in found["learning_rates"]:
        rates.add_row(str(rate["step"]), f"{rate['lr']:.3g}", f"{rate['aux_lr']:.3g}")
    console.print(rates)
    say(f"\noptimizer {found['kind']} on the matrices")
    table = Table("who steps", "why", "tensors", "parameters", title="\nrouting", title_justify="left", box=None)
    for row in found["routing"]:
        table.add_row(_who(found, row["rule"]), row["reason"], str(row["tensors"]), f"{row['numel']:,}")
    console.print(table)
    _show_updates(found, console)
    processes.show(found["processes"], console)
    _show_cost(found, console)
    say("\nwrites    " + "\n          ".join(found["files"]))


def _who(found: dict[str, Any], rule: str) -> str:
    return found["optimizer"]["name"] if rule == "spectral" else "adamw"


def _show_data(data: dict[str, Any], counted: Account | None, console: Console) -> None:
    say = partial(console.print, markup=False, highlight=False)
    if counted is None:
        say("")
        tell(console, "data", f"{data['source']['path']}: {data['rows']:,} rows, by its card")
        return
    say(f"\ndata      {data['source']['path']}: {data['layout']}")
    dropped = describe_dropped(data["dropped"]) or "none dropped"
    say(f"          {data['rows']} rows, {data['kept']} kept, {dropped}, {data['truncated']} cut to max_length")
    lengths = ", ".join(f"{name} {value}" for name, value in data["token_length_percentiles"].items())
    say(f"          tokens per row: {lengths}; {data['trained_token_share']:.0%} of them trained")
    if not data["stop_token_trained"]:
        say("          the end of the answer is NOT trained: the model will not learn to stop")
    say("\nexample   (trained tokens are marked)")
    console.print(show_example(counted, color=console.color_system is not None))


def _show_updates(found: dict[str, Any], console: Console) -> None:
    """Sizes of the steps, and what they come to; a sentence where that is next to nothing."""
    say = partial(console.print, markup=False, highlight=False)
    dtype, weight = found["weights_held_in"], found["typical_weight"]
    table = Table(title="\nhow far a step moves a weight", title_justify="left", box=None)
    for name in ("who steps", "shape", "tensors", "RMS", f"in {dtype}'s", "all steps"):
        table.add_column(name, justify="left" if name in ("who steps", "shape") else "right")
    for row in found["updates"]:
        shape = " x ".join(map(str, row["shape"])) if row["shape"] else "all others"
        sizes = (f"{row['rms']:.1e}", f"{row['in_steps_of_dtype']:.2g}", f"{row['at_most']:.2g} x")
        table.add_row(_who(found, row["rule"]), shape, str(row["tensors"]), *sizes)
    console.print(table)
    say(f"          RMS: at the peak rate. in {dtype}'s: over the distance of neighbouring")
    say(f"          numbers near {weight:g}. all steps: over a weight of {weight:g}, at most")
    lost = sum(row["tensors"] for row in found["updates"] if row["sets_bfloat16"] < 1)
    if lost and not found["processes"]["frozen"]:  # factors are no weights of the model
        of = sum(row["tensors"] for row in found["updates"])
        tell(
            console,
            "notice",
            f"all steps together cannot move a weight of {weight:g} to bfloat16's next number in {lost} of {of} "
            "tensors: run or saved in bfloat16, most of their weights are the start's. A larger learning rate moves "
            "them",
        )


def _show_cost(found: dict[str, Any], console: Console) -> None:
    say = partial(console.print, markup=False, highlight=False)
    compute, evaluation = found["compute"], found["evaluation"]
    tokens = f"{compute['tokens_per_row']:,.0f} tokens a row" + ("" if compute["tokens_counted"] else ", the most")
    if compute["training_flops_per_step"] is None:
        say("\ncompute   not known for this architecture")
    else:
        say(f"\ncompute   {metric(compute['training_flops_per_step'], 'FLOP')} per step ({tokens}),", end=" ")
        say(f"{metric(compute['training_flops'], 'FLOP')} in all")
    if compute["map_share"] is not None:
        say(f"          of a step's operations, {compute['map_share']:.2%} are the optimizer's maps")
    if evaluation:
        asked = f"the first {evaluation['limit']} questions of each task" if evaluation["limit"] else ""
        requests = evaluation["requests_per_model"]
        asked = asked or (f"{requests:,} requests" if requests else "all questions")
        say(f"\nevaluates {evaluation['suite']}: {asked} to each of {evaluation['models']} models or more")
