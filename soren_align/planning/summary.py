"""What to look at in a plan before training: half a screen or one, where the whole plan has two."""

from typing import Any

from rich.console import Console

from ..data import Account
from ..terminal import print_labelled, with_prefix
from . import display
from .display_evaluation import print_evaluation, print_problems


def print_summary(plan: dict[str, Any], account: Account | None, console: Console) -> None:
    """Print the first sections of `display.print_plan`, and of the others the totals."""
    display.print_notices(plan, console)
    display.print_model_and_data(plan, account, console)
    display.print_steps(plan, console)
    _print_learning_rate(plan, console)
    display.print_optimizer(plan, console)
    _print_change(plan, console)
    display.print_lost_updates(plan, console)
    console.print()
    if plan["processes"]["num_processes"] > 1:
        display.print_processes(plan["processes"], console)
    for location in display.locations(plan):
        _print_memory(plan["processes"]["memory_total"][location].values(), location, console)
    if plan["processes"]["is_on_cpu"]:
        print_labelled(console, "", f"not included: {plan['processes']['memory_not_included']}")
    display.print_hours(plan, console, brief=True)
    console.print()
    print_evaluation(plan["evaluation"], console)
    console.print()
    print_labelled(
        console,
        "more",
        "--full: learning rates by step, parameter groups, update sizes, memory by component, operations, files",
    )
    print_problems(plan, console)


def _print_learning_rate(plan: dict[str, Any], console: Console) -> None:
    lr, aux_lr = plan["optimizer"]["lr"], plan["optimizer"].get("aux_lr")
    others = f" ({aux_lr:g} of other parameters)" if aux_lr not in (None, lr) else ""
    print_labelled(console, "", f"learning rate {lr:g}{others}, schedule {display.schedule(plan['steps'])}")


def _print_change(plan: dict[str, Any], console: Console) -> None:
    """Print the bounds of the updates' sum over all steps, smallest and largest by kind of tensor."""
    weight = plan["typical_weight"]
    changes = sorted(size["relative_update" if weight else "update_sum"] for size in plan["update_sizes"])
    bounds = " to ".join(dict.fromkeys(f"{change:.2g}" for change in (changes[0], changes[-1])))
    relative = f" x a weight of {weight:g}" if weight else " (RMS of the factors' change)"
    print_labelled(console, "", f"all updates together: at most {bounds}{relative}")


def _print_memory(totals: Any, location: str, console: Console) -> None:
    known = [num_bytes for num_bytes in totals if num_bytes is not None]
    unknown = ", without activations, which are unknown" * (len(known) < len(totals))
    where = "in the CPU's memory" if location == "cpu" else "at the peak"
    print_labelled(console, "memory", f"{with_prefix(max(known), 'B')} per rank {where}{unknown}")
