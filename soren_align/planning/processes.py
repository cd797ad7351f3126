"""What one of several processes would do and hold, told without starting any: the plan's account of `--processes N`."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from ..optim import Route
from ..optim.map_batches import default_workspace_mb
from ..recipe import Parallel, Recipe, as_adamw, parallel, rows_per_step, trainer_value
from .compute import Compute, arithmetic
from .forecast import Forecast, forecast
from .memory import Component, Place, When

NOT_COUNTED = "weights gathered in passing, padding, what the allocator wastes"
MAPS = ("minimax", "sns", "muon")  # those whose cost spectral.num_flops knows
PLACES: tuple[Place, ...] = ("device", "cpu")
WHEN = {"always": "", "passes": "passes only", "step": "step only"}


def processes(
    recipe: Recipe, routes: Sequence[Route], frozen: tuple[int, int], num_ranks: int, costs: Compute
) -> dict[str, Any]:
    """The plan's section "processes" as plain data. Bytes, and floating-point operations.

    frozen: numbers that are held and not trained, and their bytes.
    """
    shared = parallel(recipe.run.parallel)
    found = _forecast(recipe, routes, frozen, shared, num_ranks, costs)
    flops = {"busiest_rank": found.flops_busiest, "all_ranks": found.flops_all} if found.flops_all else None
    return {
        "number": num_ranks,
        "started": _started(shared, num_ranks),
        "batch": rows_per_step(recipe, num_ranks)[1],
        "batch_is_fixed": recipe.run.global_batch_size is not None,
        "matrices": found.num_matrices,
        "frozen": frozen[0],
        "travelling": found.num_travelling,
        "max_over_mean_load": found.load and round(found.load, 4),
        "map_flops": flops,
        "bytes_sent": {"most": found.bytes_sent_most, "mean": round(found.bytes_sent_mean)},
        "memory": [part._asdict() for part in found.memory],
        "memory_total": _totals(found, costs),
        "memory_total_adamw": _totals(_forecast(_with_adamw(recipe), routes, frozen, shared, num_ranks, costs), costs),
        "memory_saved": _saved(recipe, found, costs, has_adapter=frozen[0] > 0),
        "memory_not_counted": NOT_COUNTED,
    }


def steps_per_epoch(num_rows: int, per_device: int, accumulation: int, num_ranks: int) -> int:
    """As transformers counts: the last, smaller batches of an epoch still make a step.

    accelerate deals whole batches out to the ranks, and fills the last round up from the first rows.
    """
    batches = math.ceil(math.ceil(num_rows / per_device) / num_ranks)
    return math.ceil(batches / accumulation)


def show(found: dict[str, Any], console: Console) -> None:
    """Print the section for a person."""
    say = partial(console.print, markup=False, highlight=False)
    several, matrices = found["number"] > 1, found["matrices"]
    say(f"\nprocesses {found['started']}")
    if several:
        say(f"          batch of {found['batch']}")
        if not found["batch_is_fixed"]:
            say("          more rows per step than one process takes, unless run.global_batch_size is set")
    if matrices:
        travelling = {0: "none", matrices: "all"}.get(found["travelling"], found["travelling"])
        say(f"          {matrices} matrices, each mapped once{f'; {travelling} of them travel' if several else ''}")
    uneven = f"the busiest rank {found['max_over_mean_load']:.3f} times the mean" if several and matrices else ""
    if flops := found["map_flops"]:
        said = f"{metric(flops['all_ranks'], 'FLOP')} of maps"
        say(f"          {said}; {uneven}, {metric(flops['busiest_rank'], 'FLOP')}" if uneven else f"          {said}")
    elif uneven:
        say(f"          {uneven}")
    if found["travelling"]:
        most, mean = (metric(found["bytes_sent"][which], "B") for which in ("most", "mean"))
        say(f"          sent for it per rank and step: {most}{f', {mean} in the mean' if mean != most else ''}")
    for where in ("device", "cpu"):
        if any(part["where"] == where for part in found["memory"]):
            console.print(_table(found, where))
    tell(console, "", f"not counted: {found['memory_not_counted']}")
    for setting, num_bytes in found["memory_saved"].items():
        say(f"          {setting} saves {metric(num_bytes, 'B')} of it")


def _table(found: dict[str, Any], where: str) -> Table:
    total = found["memory_total"][where]
    unit, size = ("GB", 1e9) if total["step"] >= 1e9 else ("MB", 1e6)
    title = "\nmemory per rank" + (", of the CPU" if where == "cpu" else "")
    table = Table("what", unit, "of", "when", title=title, title_justify="left", box=None)
    table.columns[1].justify = "right"
    for part in found["memory"]:
        if part["where"] == where:
            table.add_row(part["name"], f"{part['num_bytes'] / size:.2f}", part["of"], WHEN[part["when"]])
    is_known = total["passes"] is not None
    if where == "device":
        table.add_row("all in the passes", f"{total['passes'] / size:.2f}" if is_known else "not known")
    table.add_row("all in the step", f"{total['step'] / size:.2f}")
    if found["matrices"] and is_known:
        table.add_row("at most with adamw", f"{max(found['memory_total_adamw'][where].values()) / size:.2f}")
    return table


def _totals(found: Forecast, costs: Compute) -> dict[str, dict[str, int | None]]:
    """By place and time; None for a device's passes whose activations are not known."""
    times: tuple[When, ...] = ("passes", "step")
    totals: dict[str, dict[str, int | None]] = {
        where: {when: found.total(where, when) for when in times} for where in PLACES
    }
    if costs.activations is None:
        totals["device"]["passes"] = None
    return totals


def _with_adamw(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"optimizer": as_adamw(recipe.optimizer)})


def _saved(recipe: Recipe, found: Forecast, costs: Compute, has_adapter: bool) -> dict[str, int]:
    """Setting -> bytes of a process that it saves, of those that are set."""
    saved = {}
    if trainer_value(recipe, "gradient_checkpointing") and costs.activations is not None:
        saved["trainer.gradient_checkpointing"] = (costs.without_checkpointing or 0) - costs.activations
    if recipe.trainer.get("precompute_ref_log_probs") and not has_adapter:  # then there is no reference model anyway
        saved["trainer.precompute_ref_log_probs"] = next(p.num_bytes for p in found.memory if p.name == "weights")
    return saved


def _forecast(
    recipe: Recipe,
    routes: Sequence[Route],
    frozen: tuple[int, int],
    shared: Parallel,
    num_ranks: int,
    costs: Compute,
) -> Forecast:
    optimizer, trainer = recipe.optimizer, recipe.trainer
    matrices = {r.name: (r.shape[0], r.shape[1]) for r in routes if r.rule == "spectral"}
    use = "cpu" if trainer.get("use_cpu") else "elsewhere"
    batched = getattr(optimizer, "workspace_mb", 0)  # 0: one matrix at a time
    if batched is None:
        batched = default_workspace_mb(use)
    name: Any = optimizer.map_name
    found = forecast(
        matrices,
        sum(math.prod(r.shape) for r in routes if r.rule != "spectral"),
        shared,
        num_ranks,
        optimizer=optimizer.name,
        spectral_map=name if name in MAPS else None,
        ns_steps=optimizer.map_steps,
        arithmetic=arithmetic(recipe),
        # With an adapter the reference is the model without it, or with a copy of it.
        reference=recipe.task == "dpo" and not trainer.get("precompute_ref_log_probs") and not frozen[0],
        workspace_mb=batched,
        weight_bytes=2 if recipe.model.dtype == "bfloat16" and not frozen[0] else 4,
        compensation_bytes=2 if optimizer.compensation == "kahan" else 0,
        frozen=frozen,
        on_cpu=use == "cpu",
    )
    if costs.activations is None:
        return found
    of = f"{trainer_value(recipe, 'per_device_train_batch_size')} rows of {costs.length} tokens"
    return replace(found, memory=(*found.memory, Component("activations", costs.activations, of, when="passes")))


def _started(shared: Parallel, num_ranks: int) -> str:
    kinds = {"ddp": "DDP", "zero": f"ZeRO {shared.stage}", "fsdp2": "FSDP2"}
    kind = kinds[shared.kind] + (" with offload" if shared.offloads else "")
    return "1" if num_ranks == 1 and shared.kind == "ddp" else f"{num_ranks:,} by {kind}, started by torchrun"


def tell(console: Console, label: str, text: str) -> None:
    """Print a sentence beside its label, wrapped to the right of it."""
    lines = textwrap.wrap(text, console.width - 10, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        console.print(f"{'' if number else label:<10}{line}", markup=False, highlight=False, soft_wrap=True)


def metric(number: float, unit: str) -> str:
    """In three digits or more: 6.11 GB, 307 TFLOP."""
    scale, prefix = next(
        ((10.0**e, p) for e, p in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M")) if number >= 10**e), (1e3, "k")
    )
    return f"{number / scale:.{0 if number >= 100 * scale else 1 if number >= 10 * scale else 2}f} {prefix}{unit}"
