"""The record of a training run in run.json, and the lines about it in the terminal."""

import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..core.errors import UserError
from ..core.files import file_sha256
from ..core.text import count, print_labelled
from ..data import auc_error
from ..optim import route, routing_table, share_notices, spectral_share
from ..recipe import Recipe, batch_unit, global_batch, left_out, recipe_hash
from ..run import record
from ..run.folder import RunFolder, read_metrics
from ..run.preferences import describe_preferences, sample_changes
from ..run.provenance import fingerprint
from ..run.quantized import quantization_of, weight_numel
from ..sharding.ranks import Ranks
from .measure.measurements import CONTRAST
from .measure.progress import peak_memory
from .reference import device_name
from .setup import TrainingSetup

SMALL_CHANGE = 0.01
"""Relative change of the matrices: a training that changes less is worth a line in the
terminal."""


def report_setup(
    folder: RunFolder,
    console: Console,
    setup: TrainingSetup,
    trainer: Any,
    ranks: Ranks,
    identity: dict[str, Any],
    retention: dict[str, Any] | None,
) -> None:
    """Write data, starting checkpoint, batch, parameters, routing and identity into run.json; print
    them and the notices. retention: the source of the examples of `data.retention`.
    """
    # Gather what identifies the run, from the loaded model and not from the recipe: libraries may
    # decide otherwise.
    recipe, train = setup.recipe, setup.splits.train
    quantization = quantization_of(trainer.model)
    size, factors = global_batch(recipe, ranks.num_ranks)
    parameters = list(trainer.model.parameters())
    routing = routing_table(route(trainer.model, **recipe.optimizer.routing))
    # DPO usually starts from a run's model: what trained that model belongs to the record.
    earlier = _earlier_runs(Path(setup.start))
    examples = _examples_record(setup)
    held_out = None
    if setup.splits.eval and setup.held_out:
        held_out = setup.splits.eval.source | asdict(setup.held_out)
    start = {
        "path": str(Path(setup.start).resolve()) if Path(setup.start).is_dir() else setup.start,
        "sha256_or_revision": trainer.origin["start"],
    }
    if earlier:
        start["after"] = earlier
    data = {"train": train.source | {"layout": train.layout} | examples, "eval": held_out}
    if retention:
        data["retention"] = retention
    # Record before the first step: a killed run shows what it was.
    folder.update(
        start=start,
        data=data,
        parallel=recipe.run.parallel,
        global_batch_size=size,
        gradient_accumulation_steps=trainer.args.gradient_accumulation_steps,
        seeds={"trainer": trainer.args.seed, "init": recipe.model.init_seed},
        device=device_name(trainer.args.device),
        num_threads=torch.get_num_threads(),
        parameters={
            "dtype": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
            "total": sum(map(weight_numel, parameters)),
            "trainable": sum(weight_numel(p) for p in parameters if p.requires_grad),
            "spectral_share": 0.0 if recipe.optimizer.name == "adamw" else spectral_share(routing),
        },
        quantization=quantization,
        routing=routing,
        identity=identity,
    )

    # Print the notices first: they are what a user may want to act on.
    num_sequences = setup.packing.num_sequences if setup.packing else setup.account.num_kept
    unused = None if setup.stream else left_out(recipe, num_sequences, ranks.num_ranks)
    notices = [*setup.notices, *share_notices(recipe.optimizer.name, routing)]
    for notice in [unused, *notices] if unused else notices:
        print_labelled(console, "notice", notice)
    print_labelled(console, "data", *_data_lines(setup))
    print_labelled(console, "model", *_model_lines(setup, earlier, quantization))
    if ranks.launched:
        print_labelled(console, "batch", f"{size} {batch_unit(recipe)} per step: {factors}")
        print_labelled(console, "parallel", recipe.run.parallel)
    print_labelled(console, "optimizer", *_optimizer_lines(recipe, routing))


def _earlier_runs(start: Path) -> list[dict[str, Any]]:
    """Return task and steps of the runs that trained the start, the first one first."""
    if start.name not in ("model", "merged"):
        return []
    with suppress(UserError):  # damaged or of an older version: nothing is known of it
        before = RunFolder(start.parent).read()
        if before and "training" in before:
            own = {"task": before["task"], "steps": before["training"]["steps"]}
            return [*before.get("start", {}).get("after", []), own]
    return []


def _examples_record(setup: TrainingSetup) -> dict[str, Any]:
    """Return the numbers of training examples for run.json: used, dropped, truncated, packed."""
    train, counts = setup.splits.train, setup.account
    examples: dict[str, Any] = {
        "num_kept": counts.num_kept,
        "dropped": train.dropped | counts.dropped,
    }
    if counts.num_kept_by_source:
        examples["num_kept_by_source"] = list(counts.num_kept_by_source)
    for key in ("num_truncated", "num_truncated_tokens", "num_unknown_tokens"):
        examples[key] = getattr(counts, key)
    if setup.packing:
        examples["packing"] = asdict(setup.packing)
    for key in ("pairs", "labels"):
        if numbers := getattr(counts, key):
            examples[key] = asdict(numbers)
    if setup.stream:
        preview = {"num_examples": train.num_examples, **examples}
        return {"preview": preview, **setup.stream.counts()}
    return examples


def _data_lines(setup: TrainingSetup) -> list[str]:
    train, counts = setup.splits.train, setup.account
    dropped = record.describe_dropped(train.dropped | counts.dropped)
    dropped = f", {dropped}" if dropped else ""
    if setup.stream:
        lines = [
            f"{train.layout}, streamed from {train.source['path']}",
            f"the first {train.num_examples:,} examples: {counts.num_kept:,} kept{dropped}",
        ]
    else:
        lines = [f"{counts.num_kept} of {train.num_examples} examples, {train.layout}{dropped}"]
        sources = zip(train.source.get("sources", ()), counts.num_kept_by_source, strict=True)
        lines += [describe_source(source, num_kept) for source, num_kept in sources]
    if counts.num_truncated:
        lines.append(counts.describe_truncation())
    if setup.held_out:
        lines += record.describe_held_out(asdict(setup.held_out))
    if setup.packing:
        lines += setup.packing.describe()
    return lines


def _model_lines(
    setup: TrainingSetup, earlier: list[dict[str, Any]], quantization: dict[str, Any] | None
) -> list[str]:
    if earlier:
        after = record.describe_earlier_runs({"after": earlier})
        lines = [f"{setup.start} (starting checkpoint, {after})"]
    else:
        lines = [f"{setup.start} (starting checkpoint)"]
    if quantization:
        lines.append(
            f"{quantization['num_weights']:,} weights in {quantization['quantize']} "
            f"({quantization['type']}), computed in {quantization['compute_dtype']}"
        )
    return lines


def _optimizer_lines(recipe: Recipe, routing: list[dict[str, Any]]) -> list[str]:
    optimizer, share = recipe.optimizer, spectral_share(routing)
    num_matrices = sum(row["matrices"] for row in routing)
    num_others = sum(row["tensors"] for row in routing if row["rule"] == "adamw")
    matrices = f"{optimizer.description}, lr {optimizer.lr:g}: {num_matrices:,} matrices"
    if not num_others:
        return [matrices]
    return [
        f"{matrices}, {share:.1%} of the trained parameters",
        f"adamw, lr {optimizer.aux_lr:g}: {num_others:,} other parameters, {1 - share:.1%}",
    ]


def describe_source(source: dict[str, Any], num_examples: int) -> str:
    """Return a line of a mixture: "zoo.jsonl: 30 of 120 examples (weight 0.25), 29 used, chat
    messages".
    """
    text = (
        f"{source['path']}: {source['num_sampled']} of {source['num_examples']} examples (weight "
        f"{source['weight']:g}), {num_examples} used, {source['layout']}"
    )
    if source["dropped"]:
        return f"{text}, {record.describe_dropped(source['dropped'])}"
    return text


def report_first_step(
    folder: RunFolder, console: Console, ranks: Ranks, groups: dict[str, Any], warnings: list[str]
) -> None:
    """Write the measurements of the first step into run.json and print the warnings, on the first
    rank.
    """
    if ranks.is_first:
        folder.update(first_step=groups)
        for warning in warnings:
            print_labelled(console, "warning", warning)


def report_result(
    folder: RunFolder,
    console: Console,
    recipe: Recipe,
    trainer: Any,
    result: dict[str, Any],
    resumed_from: int,
) -> None:
    """Write status "trained", losses, the peak of the memory and `result` into run.json, and print
    them.

    result: seconds, relative changes, `change_after_saving`, `stopped_early`, `best_model` and
    `validation`.
    resumed_from: the step of the checkpoint; 0 for a new run.
    """
    training = {"steps": trainer.state.global_step}
    training |= _losses(folder, trainer, result.get("best_model", {}).get("step"))
    training["peak_memory_bytes"] = peak_memory()
    # On a CPU that other processes share, times mean little without the load.
    if not torch.accelerator.is_available() and hasattr(os, "getloadavg"):
        training["cpu_load"] = round(os.getloadavg()[0], 2)
    training |= result
    if trainer.stream:
        data = (folder.read() or {})["data"]
        folder.update(data={**data, "train": {**data["train"], **trainer.stream.counts()}})
    # The hashes of what the training has left: a study's audit compares them with the files, and
    # the last one with the model that was evaluated.
    written = {
        "recipe_sha256": recipe_hash(recipe, with_optimizer=True),
        "metrics_sha256": file_sha256(folder.metrics),
        "held_out_sha256": file_sha256(folder.held_out) if folder.held_out.is_file() else None,
        "weights_sha256": fingerprint(str(folder.model)),
    }
    folder.update(status="trained", training=training, written=written)

    print_labelled(console, "trained", *_result_lines(recipe, trainer, training, resumed_from))
    for notice in describe_preferences(training):
        print_labelled(console, "notice", notice)
    _warn_of_rounding(console, result["change_after_saving"])


def _losses(folder: RunFolder, trainer: Any, saved_step: int | None) -> dict[str, Any]:
    """Return the losses of training and of the held-out examples, at the start and of the saved
    model, with the preferences of DPO. saved_step: None: the last one.
    """
    args, history = trainer.args, trainer.state.log_history
    # The history is the checkpoint's as well: a resumed run reports the whole training.
    logs = [log for log in history if "loss" in log]
    evaluations = [log for log in history if "eval_loss" in log]
    losses: dict[str, Any] = {"first_loss": None, "last_loss": None}
    num_averaged = [0]
    if logs:
        losses = {"first_loss": logs[0]["loss"], "last_loss": logs[-1]["loss"]}
        # The numbers of examples that both average. Fewer where an epoch's last batch is smaller,
        # and in the first log after resuming.
        batch = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        )
        before_last = logs[-2]["step"] if len(logs) > 1 else 0
        num_averaged = [batch * logs[0]["step"], batch * (logs[-1]["step"] - before_last)]
        losses["examples_per_log"] = num_averaged
    source, prefix, num_examples = logs[-1] if logs else {}, "", num_averaged[-1]
    if evaluations:
        # The first one, and that of the saved model: one evaluation if these are the same.
        saved_step = trainer.state.global_step if saved_step is None else saved_step
        source = next((log for log in evaluations if log["step"] == saved_step), evaluations[-1])
        prefix, num_examples = "eval_", len(trainer.eval_dataset)
        ends = {log["step"]: log["eval_loss"] for log in (evaluations[0], source)}
        losses["held_out"] = {
            "num_examples": num_examples,
            "evaluations": [{"step": step, "loss": loss} for step, loss in ends.items()],
        }
    if f"{prefix}rewards/accuracies" in source:
        losses["preferences"] = {
            "share": source[f"{prefix}rewards/accuracies"],
            "margin": source[f"{prefix}rewards/margins"],
            "num_pairs": num_examples,
            "held_out": bool(evaluations),
            "loss_type": list(trainer.loss_types),
        }
        # A reward is beta times the change since the start, in nats, unless TRL moves the
        # reference away from it.
        if args.beta and not args.sync_ref_model:
            losses["preferences"]["log_probability_changes"] = {
                answer: source[f"{prefix}rewards/{answer}"] / args.beta
                for answer in ("chosen", "rejected")
            }
        if folder.samples.is_file() and (changes := sample_changes(read_metrics(folder.samples))):
            losses["samples"] = changes
    if "eval_thumbs_accuracy" in source:
        good = sum(trainer.eval_dataset["label"][:])
        losses["thumbs"] = {
            "num_good": good,
            "num_bad": num_examples - good,
            "evaluations": [
                {"step": log["step"], "accuracy": log["eval_thumbs_accuracy"]}
                for log in (evaluations[0], source)
            ],
            "error": auc_error(good, num_examples - good),
        }
    if contrasts := [log for log in history if "map_contrast" in log]:
        losses["updates"] = {key.removeprefix("map_"): contrasts[-1][key] for key in CONTRAST}
    return losses


def _result_lines(
    recipe: Recipe, trainer: Any, training: dict[str, Any], resumed_from: int
) -> list[str]:
    steps, seconds = training["steps"], training["seconds_since_start_or_resume"]
    first = count(steps, "step")
    if resumed_from:
        first += f", {steps - resumed_from} of them since resuming,"
    first += f" in {seconds:.0f} s"
    if training["first_loss"] is None:  # ended early, or trainer.logging_strategy is no
        logs = [log for log in trainer.state.log_history if "train_loss" in log]
        first += f", loss {logs[-1]['train_loss']:.3f} on average" if logs else ""
    lines = [first, *record.describe_losses(training)]
    if trainer.stream:
        lines.append(_stream_line(trainer.stream.counts()))
    if early := training.get("stopped_early"):
        reason = record.describe_early_stop(early)
        lines.append(f"stopped early, before step {early['max_steps']}: {reason}")
    if best := training.get("best_model"):
        lines.append(
            f"the saved model is that of step {best['step']}, with the best evaluation: "
            f"{best['metric']} {best['value']:.4g}"
        )
    if validation := training.get("validation"):
        lines.append(
            f"validation perplexity {validation['perplexity']:.2f}, on "
            f"{validation['num_tokens']:,} tokens (loss {validation['loss']:.4f})"
        )
    if training["relative_change"] < SMALL_CHANGE:
        change = f"{100 * training['relative_change']:.3g}%"
        lines.append(f"the weight matrices changed by {change} of their norm")
    return lines


def _stream_line(counts: dict[str, Any]) -> str:
    line = f"{counts['num_read']:,} examples read"
    if counts["dropped"]:
        line += f", {record.describe_dropped(counts['dropped'])}"
    if any(counts["passes"]):
        line += f"; complete passes over the data: {', '.join(map(str, counts['passes']))}"
    return line


def _warn_of_rounding(console: Console, change: dict[str, Any]) -> None:
    """Print how much of the training's change the saved model has, if it is little."""
    if "matrices" not in change:  # nothing has changed
        return
    projection, entries = (change["matrices"][key] for key in ("projection", "fraction_changed"))
    if min(entries, projection) >= record.SURVIVAL_THRESHOLD:
        return
    print_labelled(
        console,
        "saved",
        f"model/ in {change['dtype']}, which keeps {100 * projection:.3g}% of the training's "
        "change",
        f"{100 * entries:.3g}% of the changed entries still differ from the starting checkpoint "
        "after rounding",
    )
    print_labelled(
        console,
        "warning",
        "rounding loses most of the change; write run.save_dtype: float32 to keep it",
    )
