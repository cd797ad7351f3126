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
from ..core.text import print_labelled
from ..data import start_margins
from ..optim import route, routing_table, share_notices, spectral_share
from ..recipe import Recipe, batch_unit, global_batch, recipe_hash
from ..recipe.perplexities import describe_published, load_perplexities
from ..run import record
from ..run.folder import RunFolder, read_metrics
from ..run.preferences import describe_preferences, sample_changes
from ..run.provenance import fingerprint
from ..run.quantized import quantization_of, weight_numel
from ..sharding.ranks import Ranks
from ..tasks import TASKS
from .measure.measurements import CONTRAST
from .measure.progress import peak_memory
from .reference import device_name
from .setup import TrainingSetup

SMALL_CHANGE = 0.01
"""Of the matrices, relative to their norm: a training that changes less is worth a line in the
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
    recipe, stream, train, counts = setup.recipe, setup.stream, setup.splits["train"], setup.account
    optimizer, quantization = recipe.optimizer, quantization_of(trainer.model)
    size, factors = global_batch(recipe, ranks.num_ranks)
    parameters = list(trainer.model.parameters())
    routing = routing_table(route(trainer.model, **optimizer.routing))
    # task and steps of the runs that trained the start, the first one first
    earlier, start = [], Path(setup.start)
    with suppress(UserError):  # damaged or of an older version: nothing is known of it
        before = RunFolder(start.parent).read() if start.name in ("model", "merged") else None
        if before and "training" in before:
            earlier = before.get("start", {}).get("after", [])
            earlier = [*earlier, {"task": before["task"], "steps": before["training"]["steps"]}]
    examples: dict[str, Any] = {
        "num_kept": counts.num_kept,
        "dropped": train.dropped | counts.dropped,
    }
    if counts.num_kept_by_source:
        examples["num_kept_by_source"] = list(counts.num_kept_by_source)
    examples |= {
        "num_truncated": counts.num_truncated,
        "num_truncated_tokens": counts.num_truncated_tokens,
    }
    examples["num_unknown_tokens"] = counts.num_unknown_tokens
    examples |= {"packing": asdict(setup.packing)} if setup.packing else {}
    examples |= {"pairs": asdict(counts.pairs)} if counts.pairs else {}
    references = [f"ref_{answer}_logps" for answer in TASKS[recipe.task].answers]
    if references and {*references} <= {*(trainer.train_dataset.column_names or ())}:
        examples["pairs"]["start_margins"] = start_margins(
            *(trainer.train_dataset[name] for name in references)
        )
    if stream:
        examples = {"preview": {"num_examples": train.num_examples, **examples}, **stream.counts()}
    folder.update(
        start={
            "path": str(start.resolve()) if start.is_dir() else setup.start,
            "sha256_or_revision": trainer.origin["start"],
            **({"after": earlier} if earlier else {}),
            **({"perturb": recipe.run.perturb.model_dump()} if recipe.run.perturb else {}),
        },
        data={
            "train": train.source | {"layout": train.layout} | examples,
            "eval": setup.splits["eval"].source | setup.held_out if setup.held_out else None,
            **({"retention": retention} if retention else {}),
        },
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
            "spectral_share": spectral_share(routing) * (optimizer.name != "adamw"),
        },
        quantization=quantization,
        routing=routing,
        identity=identity,
    )

    for notice in (*setup.notices, *share_notices(optimizer.name, routing)):
        print_labelled(console, "notice", notice)
    dropped = (
        f", {text}" if (text := record.describe_dropped(train.dropped | counts.dropped)) else ""
    )
    if stream:
        lines = [f"{train.layout}, streamed from {train.source['path']}"]
        lines.append(
            f"the first {train.num_examples:,} examples: {counts.num_kept:,} kept{dropped}"
        )
    else:
        lines = [f"{counts.num_kept} of {train.num_examples} examples, {train.layout}{dropped}"]
        sources = zip(train.source.get("sources", ()), counts.num_kept_by_source, strict=True)
        lines += [describe_source(source, num_kept) for source, num_kept in sources]
    lines += [counts.describe_truncation()] if counts.num_truncated else []
    lines += record.describe_held_out(setup.held_out) if setup.held_out else []
    lines += setup.packing.describe() if setup.packing else []
    if margins := examples.get("pairs", {}).get("start_margins"):
        share = (
            f"{margins['share_positive']:.0%} of the pairs, mean difference {margins['mean']:.3g}"
        )
        lines.append(
            f"the starting model gives the chosen answer the higher log-probability in {share}"
        )
    print_labelled(console, "data", *lines)
    checkpoint = ", ".join(
        filter(None, ("starting checkpoint", record.describe_earlier_runs({"after": earlier})))
    )
    lines = [f"{setup.start} ({checkpoint})"]
    if perturb := recipe.run.perturb:
        lines.append(
            f"each starting weight changed by at most {perturb.size:g} of itself, seed {perturb.seed}"
        )
    if quantization:
        weights = f"{quantization['num_weights']:,} weights in {quantization['quantize']} ({quantization['type']})"
        lines.append(f"{weights}, computed in {quantization['compute_dtype']}")
    print_labelled(console, "model", *lines)
    if ranks.launched:
        print_labelled(console, "batch", f"{size} {batch_unit(recipe)} per step: {factors}")
        print_labelled(console, "parallel", recipe.run.parallel)
    num_matrices, share = sum(row["matrices"] for row in routing), spectral_share(routing)
    matrices = f"{optimizer.description}, lr {optimizer.lr:g}: {num_matrices:,} matrices"
    others = sum(row["tensors"] for row in routing if row["rule"] == "adamw")
    lines = [matrices + f", {share:.1%} of the trained parameters" * bool(others)]
    if others:
        lines.append(
            f"adamw, lr {optimizer.aux_lr:g}: {others:,} other parameters, {1 - share:.1%}"
        )
    print_labelled(console, "optimizer", *lines)


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
    steps, args, history, stream = (
        trainer.state.global_step,
        trainer.args,
        trainer.state.log_history,
        trainer.stream,
    )
    # The losses of training, and of the held-out examples: at the start, and of the saved model;
    # see run/record.py.
    logs = [log for log in history if "loss" in log]
    losses: dict[str, Any] = {"first_loss": logs[0]["loss"] if logs else None}
    losses["last_loss"] = logs[-1]["loss"] if logs else None
    if logs:
        batch = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        )
        before_last = logs[-2]["step"] if len(logs) > 1 else 0
        losses["examples_per_log"] = [
            batch * logs[0]["step"],
            batch * (logs[-1]["step"] - before_last),
        ]
    source, prefix, num_examples = (
        logs[-1] if logs else {},
        "",
        losses.get("examples_per_log", [0])[-1],
    )
    if evaluations := [log for log in history if "eval_loss" in log]:
        saved_step = result.get("best_model", {}).get("step", steps)
        source = next((log for log in evaluations if log["step"] == saved_step), evaluations[-1])
        ends = {
            log["step"]: {"step": log["step"], "loss": log["eval_loss"]}
            for log in (evaluations[0], source)
        }
        prefix, num_examples = "eval_", len(trainer.eval_dataset)
        losses["held_out"] = {"num_examples": num_examples, "evaluations": [*ends.values()]}
    if f"{prefix}rewards/accuracies" in source:
        share, margin = (source[f"{prefix}rewards/{key}"] for key in ("accuracies", "margins"))
        counted = {"num_pairs": num_examples, "held_out": bool(evaluations)}
        losses["preferences"] = {
            "share": share,
            "margin": margin,
            **counted,
            "loss_type": list(trainer.loss_types),
        }
        # which would move the reference away from the start
        if args.beta and not args.sync_ref_model:
            # A reward is beta times the change, in nats.
            losses["preferences"]["log_probability_changes"] = {
                answer: source[f"{prefix}rewards/{answer}"] / args.beta
                for answer in ("chosen", "rejected")
            }
        if folder.samples.is_file() and (changes := sample_changes(read_metrics(folder.samples))):
            losses["samples"] = changes

    if contrasts := [log for log in history if "map_contrast" in log]:
        losses["updates"] = {key.removeprefix("map_"): contrasts[-1][key] for key in CONTRAST}

    if stream:
        data = (folder.read() or {})["data"]
        folder.update(data={**data, "train": {**data["train"], **stream.counts()}})
    written = {
        "recipe_sha256": recipe_hash(recipe, with_optimizer=True),
        "metrics_sha256": file_sha256(folder.metrics),
        "held_out_sha256": file_sha256(folder.held_out) if folder.held_out.is_file() else None,
        "weights_sha256": fingerprint(str(folder.model)),
    }
    used: dict[str, Any] = {"peak_memory_bytes": peak_memory()}
    if not torch.accelerator.is_available() and hasattr(os, "getloadavg"):
        used["cpu_load"] = round(os.getloadavg()[0], 2)
    folder.update(
        status="trained", training={"steps": steps, **losses, **used, **result}, written=written
    )

    means = (log["train_loss"] for log in reversed(history) if "train_loss" in log)
    loss, mean = "", next(means, None)
    # ended early, or trainer.logging_strategy is no
    if losses["first_loss"] is None and mean is not None:
        loss = f", loss {mean:.3f} on average"
    seconds = result["seconds_since_start_or_resume"]
    resumed = f", {steps - resumed_from} of them since resuming," if resumed_from else ""
    lines = [f"{steps} step{'s' * (steps != 1)}{resumed} in {seconds:.0f} s{loss}"]
    advice = "; other maps: soren-align spectrum RUN --advise"
    lines += record.describe_losses({"steps": steps, **losses}, of_updates=advice)
    if stream:
        counts = stream.counts()
        dropped = f", {text}" if (text := record.describe_dropped(counts["dropped"])) else ""
        passes = ", ".join(map(str, counts["passes"]))
        passes = f"; complete passes over the data: {passes}" if any(counts["passes"]) else ""
        lines.append(f"{counts['num_read']:,} examples read{dropped}{passes}")
    if early := result.get("stopped_early"):
        lines.append(
            f"stopped early, before step {early['max_steps']}: {record.describe_early_stop(early)}"
        )
    if best := result.get("best_model"):
        evaluation = f"{best['metric']} {best['value']:.4g}"
        lines.append(
            f"the saved model is that of step {best['step']}, with the best evaluation: {evaluation}"
        )
    if validation := result.get("validation"):
        text = f"validation perplexity {validation['perplexity']:.2f}, on {validation['num_tokens']:,} tokens"
        lines.append(f"{text} (loss {validation['loss']:.4f})")
        if published := recipe.run.published:
            # a file that has changed since the recipe was checked
            with suppress(UserError, KeyError):
                lines += describe_published(load_perplexities(published.table), published.model)
    if result["relative_change"] < SMALL_CHANGE:
        lines.append(
            f"the weight matrices changed by {100 * result['relative_change']:.3g}% of their norm"
        )
    print_labelled(console, "trained", *lines)
    for notice in describe_preferences(losses):
        print_labelled(console, "notice", notice)
    if "matrices" not in result["change_after_saving"]:  # nothing has changed
        return
    dtype, matrices = (result["change_after_saving"][key] for key in ("dtype", "matrices"))
    projection, entries = (100 * matrices[key] for key in ("projection", "fraction_changed"))
    if min(entries, projection) < 100 * record.SURVIVAL_THRESHOLD:
        saved = f"model/ in {dtype}, which keeps {projection:.3g}% of the training's change"
        remaining = f"{entries:.3g}% of the changed entries still differ from the starting checkpoint after rounding"
        print_labelled(console, "saved", saved, remaining)
        remedy = "write run.save_dtype: float32 to keep it"
        print_labelled(console, "warning", f"rounding loses most of the change; {remedy}")


def describe_source(source: dict[str, Any], num_examples: int) -> str:
    """Return a line of a mixture: "zoo.jsonl: 30 of 120 examples (weight 0.25), 29 used, chat
    messages".
    """
    dropped = f", {record.describe_dropped(source['dropped'])}" if source["dropped"] else ""
    sampled = f"{source['num_sampled']} of {source['num_examples']} examples (weight {source['weight']:g})"
    return f"{source['path']}: {sampled}, {num_examples} used, {source['layout']}{dropped}"
