"""What a recipe would do, told without training: rows, an example, steps, rates, routing, processes, files.

The model is built on the meta device from its config, so that this costs no memory for weights, and needs none of the
machine that would train.
"""

import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler

from ..data import Account, show_example
from ..optim import build_optimizer, route, routing_table
from ..recipe import Recipe, accumulation, rows_per_step
from ..report import RunFolder
from ..sharding.ranks import Ranks
from . import build, processes
from .run import get_ready, kind_of

NO_GPU = "no GPU here: training on this machine needs trainer.use_cpu: true"


def plan(
    recipe: Recipe, on_rows: Callable[[int], object] | None = None, num_ranks: int = 1
) -> tuple[dict[str, Any], Account]:
    """Everything `show` prints, as plain data and with the account that holds the example."""
    here = _as_seen_here(recipe)
    with tempfile.TemporaryDirectory() as scratch:  # not the run's folder: nothing is to be left there
        ready = get_ready(here, RunFolder(scratch), on_rows)
        args: Any = build.trl_config(here, Path(scratch), Ranks())
    with torch.device("meta"), build.the_users(f"model {recipe.model.name_or_path}"):
        config = AutoConfig.from_pretrained(ready.start, trust_remote_code=False, revision=recipe.model.revision)
        model = AutoModelForCausalLM.from_config(config)
    with build.the_users("optimizer", ValueError):
        routes = route(model, recipe.optimizer.aux)
        build_optimizer(model, **build.optimizer_settings(recipe))
    counted, split = ready.account, ready.splits["train"]
    batch, _ = rows_per_step(recipe, num_ranks)
    per_epoch = processes.steps_per_epoch(
        counted.num_kept, args.per_device_train_batch_size, accumulation(recipe, num_ranks), num_ranks
    )
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    found = {
        "task": recipe.task,
        "model": {"start": recipe.model.name_or_path, "parameters": sum(p.numel() for p in model.parameters())},
        "data": {
            "source": split.source,
            "layout": split.layout,
            "rows": split.num_rows,
            "kept": counted.num_kept,
            "dropped": split.dropped | counted.dropped,
            "truncated": counted.num_truncated,
            "token_length_percentiles": counted.lengths,
            "trained_token_share": counted.trained_share,
            "stop_token_trained": counted.stop_token_trained,
            "example": [{"text": text, "trained": trained} for text, trained in counted.example],
        },
        "steps": {"batch": batch, "per_epoch": per_epoch, "total": steps, "epochs": round(steps / per_epoch, 2)},
        "learning_rates": _rates(recipe, args, steps),
        "kind": kind_of(recipe.optimizer),
        "optimizer": recipe.optimizer.model_dump(exclude_none=True),
        "routing": routing_table(routes),
        "processes": processes.processes(recipe, routes, num_ranks),
        "files": _files(recipe, args, steps),
        "notices": [] if here.trainer.get("use_cpu") == recipe.trainer.get("use_cpu") else [NO_GPU],
    }
    return found, counted


def _as_seen_here(recipe: Recipe) -> Recipe:
    """The recipe for one process on this machine, with or without a GPU, and without random weights to be made."""
    trainer = recipe.trainer
    if not (trainer.get("use_cpu") or torch.accelerator.is_available()):
        trainer = {**trainer, "use_cpu": True, "bf16": False, "fp16": False, "tf32": None}
    model, run = recipe.model, recipe.run
    return recipe.model_copy(
        update={
            "model": model.model_copy(update={"init_seed": None}),
            "trainer": trainer,
            "run": run.model_copy(update={"parallel": "ddp"}),
        }
    )


def _rates(recipe: Recipe, args: Any, steps: int) -> list[dict[str, float]]:
    """Both learning rates at the start, the end of the warm-up, the middle and the last step."""
    peaks = [recipe.optimizer.lr, recipe.optimizer.aux_lr or recipe.optimizer.lr]
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in peaks], lr=peaks[0])
    warmup = args.get_warmup_steps(steps)
    schedule = get_scheduler(
        args.lr_scheduler_type, optimizer, warmup, steps, scheduler_specific_kwargs=args.lr_scheduler_kwargs or {}
    )
    shown = sorted({1, warmup + 1, steps // 2, steps} & set(range(1, steps + 1)))
    rates = []
    for step in range(1, shown[-1] + 1):
        if step in shown:
            lr, aux_lr = (group["lr"] for group in optimizer.param_groups)
            rates.append({"step": step, "lr": lr, "aux_lr": aux_lr})
        optimizer.step()
        schedule.step()
    return rates


def _files(recipe: Recipe, args: Any, steps: int) -> list[str]:
    folder = RunFolder(recipe.run.output_dir)
    kept = f", the last {args.save_total_limit} kept" if args.save_total_limit else ""
    every = f"every {args.save_steps:g} steps{kept}" if args.save_strategy == "steps" else f"{args.save_strategy}"
    files = [str(folder.recipe), str(folder.path / "run.json"), str(folder.metrics)]
    files += [f"{folder.start} (random starting weights)"] if recipe.model.init_seed is not None else []
    files += [f"{folder.checkpoints} ({every})", str(folder.model)]
    files += [str(folder.evaluation(recipe.eval.name))] if recipe.eval else []
    return files


def show(found: dict[str, Any], counted: Account, console: Console) -> None:
    """Print a plan for a person."""
    data, steps = found["data"], found["steps"]
    say = partial(console.print, markup=False, highlight=False)
    say(f"{found['task']} from {found['model']['start']} ({found['model']['parameters']:,} parameters)")
    say(f"\ndata      {data['source']['path']}: {data['layout']}")
    dropped = ", ".join(f"{n} dropped ({why})" for why, n in data["dropped"].items()) or "none dropped"
    say(f"          {data['rows']} rows, {data['kept']} kept, {dropped}, {data['truncated']} cut to max_length")
    lengths = ", ".join(f"{name} {value}" for name, value in data["token_length_percentiles"].items())
    say(f"          tokens per row: {lengths}; {data['trained_token_share']:.0%} of them trained")
    if not data["stop_token_trained"]:
        say("          the end of the answer is NOT trained: the model will not learn to stop")
    say("\nexample   (trained tokens are marked)")
    console.print(show_example(counted, color=console.color_system is not None))
    say(f"\nsteps     {steps['total']} of {steps['batch']} rows; {steps['epochs']} epochs of {steps['per_epoch']}")
    rates = Table("step", "matrices", "the rest", title="learning rates", title_justify="left", box=None)
    for rate in found["learning_rates"]:
        rates.add_row(str(rate["step"]), f"{rate['lr']:.3g}", f"{rate['aux_lr']:.3g}")
    console.print(rates)
    say(f"\noptimizer {found['kind']} on the matrices")
    table = Table("who steps", "why", "tensors", "parameters", title="\nrouting", title_justify="left", box=None)
    for row in found["routing"]:
        who = found["optimizer"]["name"] if row["rule"] == "spectral" else "adamw"
        table.add_row(who, row["reason"], str(row["tensors"]), f"{row['numel']:,}")
    console.print(table)
    processes.show(found["processes"], console)
    say("\nwrites    " + "\n          ".join(found["files"]))
    for notice in found["notices"]:
        say(f"\nnotice    {notice}")
