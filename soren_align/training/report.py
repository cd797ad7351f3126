"""The record of a training run in run.json, and the lines about it in the terminal."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from ..core.errors import UserError
from ..core.text import print_labelled
from ..optim import route, routing_table, share_notices, spectral_share
from ..recipe import batch_unit, global_batch
from ..run.folder import RunFolder
from ..run.quantized import quantization_of, weight_numel
from ..run.record import (
    SURVIVAL_THRESHOLD,
    describe_dropped,
    describe_earlier_runs,
    describe_early_stop,
    describe_held_out,
    describe_losses,
)
from ..sharding.ranks import Ranks
from .measure.progress import peak_memory
from .setup import TrainingSetup


def record_setup(folder: RunFolder, setup: TrainingSetup, trainer: Any, ranks: Ranks) -> None:
    """Write data, starting checkpoint, batch, parameters and routing into run.json."""
    recipe, train = setup.recipe, setup.splits["train"]
    examples = _counts(setup)
    if setup.stream:
        examples = {"preview": {"num_examples": train.num_examples, **examples}, **setup.stream.counts()}
    parameters, table = list(trainer.model.parameters()), _routing_table(setup, trainer)
    folder.update(
        start={
            "path": str(Path(setup.start).resolve()) if Path(setup.start).is_dir() else setup.start,
            "sha256_or_revision": trainer.origin["start"],
            **({"after": earlier} if (earlier := earlier_runs(setup.start)) else {}),
        },
        data={
            "train": train.source | {"layout": train.layout} | examples,
            "eval": setup.splits["eval"].source | setup.held_out if setup.held_out else None,
            **({"retention": trainer.displacement.probes.source} if trainer.displacement else {}),
        },
        parallel=recipe.run.parallel,
        global_batch_size=global_batch(recipe, ranks.num_ranks)[0],
        gradient_accumulation_steps=trainer.args.gradient_accumulation_steps,
        seeds={"trainer": trainer.args.seed, "init": recipe.model.init_seed},
        device=str(trainer.args.device),
        parameters={
            "dtype": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
            "total": sum(map(weight_numel, parameters)),
            "trainable": sum(weight_numel(p) for p in parameters if p.requires_grad),
            "spectral_share": spectral_share(table) * (recipe.optimizer.name != "adamw"),
        },
        quantization=quantization_of(trainer.model),
        routing=table,
    )


def _routing_table(setup: TrainingSetup, trainer: Any) -> list[dict[str, Any]]:
    optimizer = setup.recipe.optimizer
    return routing_table(route(trainer.model, optimizer.aux, optimizer.matrices))


def _counts(setup: TrainingSetup) -> dict[str, Any]:
    counts = setup.account
    examples: dict[str, Any] = {"num_kept": counts.num_kept, "dropped": setup.splits["train"].dropped | counts.dropped}
    if counts.num_kept_by_source:
        examples["num_kept_by_source"] = list(counts.num_kept_by_source)
    examples |= {"num_truncated": counts.num_truncated, "num_truncated_tokens": counts.num_truncated_tokens}
    examples["num_unknown_tokens"] = counts.num_unknown_tokens
    return examples | ({"packing": setup.packing.as_json()} if setup.packing else {})


def print_setup(console: Console, setup: TrainingSetup, trainer: Any, ranks: Ranks) -> None:
    """Print notices, data, starting checkpoint, batch and optimizer."""
    table = _routing_table(setup, trainer)
    for notice in (*setup.notices, *share_notices(setup.recipe.optimizer.name, table)):
        print_labelled(console, "notice", notice)
    _print_data(console, setup)
    earlier = describe_earlier_runs({"after": earlier_runs(setup.start)})
    print_labelled(console, "model", f"{setup.start} ({', '.join(filter(None, ('starting checkpoint', earlier)))})")
    if quantized := quantization_of(trainer.model):
        weights = f"{quantized['num_weights']:,} weights in {quantized['quantize']} ({quantized['type']})"
        print_labelled(console, "", f"{weights}, computed in {quantized['compute_dtype']}")
    if ranks.launched:
        size, factors = global_batch(setup.recipe, ranks.num_ranks)
        print_labelled(console, "batch", f"{size} {batch_unit(setup.recipe)} per step: {factors}")
        print_labelled(console, "parallel", setup.recipe.run.parallel)
    optimizer = setup.recipe.optimizer
    num_matrices, share = sum(row["matrices"] for row in table), spectral_share(table)
    matrices = f"{optimizer.description}, lr {optimizer.lr:g}: {num_matrices:,} matrices"
    others = sum(row["tensors"] for row in table if row["rule"] == "adamw")
    print_labelled(console, "optimizer", matrices + f", {share:.1%} of the trained parameters" * bool(others))
    if others:
        print_labelled(console, "", f"adamw, lr {optimizer.aux_lr:g}: {others:,} other parameters, {1 - share:.1%}")


def _print_data(console: Console, setup: TrainingSetup) -> None:
    """Print the examples; of a stream, those of its preview."""
    counts, train = setup.account, setup.splits["train"]
    dropped = describe_dropped(train.dropped | counts.dropped)
    dropped = f", {dropped}" if dropped else ""
    if setup.stream:
        print_labelled(console, "data", f"streamed, {train.layout}; of {train.source['path']}")
        print_labelled(console, "", f"the first {train.num_examples:,} examples: {counts.num_kept:,} kept{dropped}")
    else:
        print_labelled(console, "data", f"{counts.num_kept} of {train.num_examples} examples, {train.layout}{dropped}")
        for num_examples, source in zip(counts.num_kept_by_source, train.source.get("sources", ()), strict=True):
            print_labelled(console, "", describe_source(source, num_examples))
    if counts.num_truncated:
        print_labelled(console, "", counts.describe_truncation())
    for line in describe_held_out(setup.held_out) if setup.held_out else ():
        print_labelled(console, "", line)
    for line in setup.packing.describe() if setup.packing else ():
        print_labelled(console, "", line)


def earlier_runs(start: str) -> list[dict[str, Any]]:
    """Return task and steps of the runs that trained the checkpoint in the folder `start`, the first one first."""
    folder = Path(start)
    with suppress(UserError):  # damaged or of an older version: nothing is known of it
        record = RunFolder(folder.parent).read() if folder.name in ("model", "merged") else None
        if record and "training" in record:
            earlier = record.get("start", {}).get("after", [])
            return [*earlier, {"task": record["task"], "steps": record["training"]["steps"]}]
    return []


def report_first_step(
    folder: RunFolder, console: Console, ranks: Ranks, groups: dict[str, Any], warnings: list[str]
) -> None:
    """Write the measurements of the first step into run.json and print the warnings, on the first rank."""
    if ranks.is_first:
        folder.update(first_step=groups)
        for warning in warnings:
            print_labelled(console, "warning", warning)


def record_result(folder: RunFolder, trainer: Any, result: dict[str, Any], seconds: float) -> None:
    """Write status "trained", losses, the peak of the memory and `result` into run.json.

    result: relative changes, `change_after_saving`, `stopped_early`, `best_model` and `validation`.
    """
    if trainer.stream:
        data = (folder.read() or {})["data"]
        folder.update(data={**data, "train": {**data["train"], **trainer.stream.counts()}})
    folder.update(
        status="trained",
        training={
            "steps": trainer.state.global_step,
            "seconds_since_start_or_resume": round(seconds, 1),
            **losses_of(trainer, result),
            "peak_memory_bytes": peak_memory(),
            **result,
        },
    )


def print_result(console: Console, trainer: Any, result: dict[str, Any], seconds: float, resumed_from: int) -> None:
    """Print steps, time, losses, and how much the weights changed, also after rounding to the saved dtype.

    resumed_from: the step of the checkpoint; 0 for a new run.
    """
    steps, losses = trainer.state.global_step, losses_of(trainer, result)
    loss, mean = (
        "",
        next((log["train_loss"] for log in reversed(trainer.state.log_history) if "train_loss" in log), None),
    )
    if losses["first_loss"] is None and mean is not None:  # ended early, or trainer.logging_strategy is no
        loss = f", loss {mean:.3f} on average"
    resumed = f", {steps - resumed_from} of them since resuming," if resumed_from else ""
    print_labelled(console, "trained", f"{steps} step{'s' * (steps != 1)}{resumed} in {seconds:.0f} s{loss}")
    for text in describe_losses({"steps": steps, **losses}):
        print_labelled(console, "", text)
    if trainer.stream:
        print_labelled(console, "", _describe_stream(trainer.stream.counts()))
    if early := result.get("stopped_early"):
        print_labelled(console, "", f"early, of {early['max_steps']} steps: {describe_early_stop(early)}")
    if best := result.get("best_model"):
        evaluation = f"{best['metric']} {best['value']:.4g}"
        print_labelled(console, "", f"the model is that of step {best['step']}, the best evaluation: {evaluation}")
    if validation := result.get("validation"):
        text = f"validation perplexity {validation['perplexity']:.2f}, of {validation['num_tokens']:,} tokens"
        print_labelled(console, "", f"{text} (loss {validation['loss']:.4f})")
    print_labelled(console, "", f"the matrices changed by {100 * result['relative_change']:.3g}% of their norm")
    if "matrices" not in result["change_after_saving"]:  # nothing has changed
        return
    dtype, matrices = (result["change_after_saving"][key] for key in ("dtype", "matrices"))
    projection, entries = (100 * matrices[key] for key in ("projection", "fraction_changed"))
    print_labelled(console, "saved", f"model/ in {dtype}, which preserves {projection:.3g}% of the change")
    if entries < 99.95:
        print_labelled(
            console,
            "",
            f"{entries:.3g}% of the changed entries still differ from the starting checkpoint after rounding",
        )
    if min(entries, projection) < 100 * SURVIVAL_THRESHOLD:
        print_labelled(console, "warning", "most of the change is lost to rounding; run.save_dtype: float32 saves all")


def describe_source(source: dict[str, Any], num_examples: int) -> str:
    """Return a line of a mixture: "zoo.jsonl: 30 of 120 examples (weight 0.25), 29 used, chat messages"."""
    dropped = f", {describe_dropped(source['dropped'])}" if source["dropped"] else ""
    sampled = f"{source['num_sampled']} of {source['num_examples']} examples (weight {source['weight']:g})"
    return f"{source['path']}: {sampled}, {num_examples} used, {source['layout']}{dropped}"


def _describe_stream(counts: dict[str, Any]) -> str:
    """Return "12,000 examples read, 3 dropped (...); 2 complete passes"."""
    dropped = f", {describe_dropped(counts['dropped'])}" if counts["dropped"] else ""
    passes = (
        f"; complete passes over the data: {', '.join(map(str, counts['passes']))}" if any(counts["passes"]) else ""
    )
    return f"{counts['num_read']:,} examples read{dropped}{passes}"


def losses_of(trainer: Any, result: dict[str, Any]) -> dict[str, Any]:
    """Return the losses of run.json (run/record.py), from the logs: of training, and of the held-out examples.

    result: with `best_model`, whose evaluation is that of the saved model, if a checkpoint was loaded at the end.
    """
    history, args, steps = trainer.state.log_history, trainer.args, trainer.state.global_step
    logs = [log for log in history if "loss" in log]
    losses: dict[str, Any] = {"first_loss": logs[0]["loss"] if logs else None}
    losses["last_loss"] = logs[-1]["loss"] if logs else None
    if logs:
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        before_last = logs[-2]["step"] if len(logs) > 1 else 0
        losses["examples_per_log"] = [batch * logs[0]["step"], batch * (logs[-1]["step"] - before_last)]
    evaluations = [log for log in history if "eval_loss" in log]
    if evaluations:
        saved_step = result.get("best_model", {}).get("step", steps)
        of_saved = next((log for log in evaluations if log["step"] == saved_step), evaluations[-1])
        ends = {log["step"]: {"step": log["step"], "loss": log["eval_loss"]} for log in (evaluations[0], of_saved)}
        num_examples = len(trainer.eval_dataset)
        losses["held_out"] = {"num_examples": num_examples, "evaluations": [*ends.values()]}
        source, prefix = of_saved, "eval_"
    else:
        source, prefix, num_examples = logs[-1] if logs else {}, "", losses.get("examples_per_log", [0])[-1]
    if f"{prefix}rewards/accuracies" in source:
        share, margin = (source[f"{prefix}rewards/{key}"] for key in ("accuracies", "margins"))
        counted = {"num_pairs": num_examples, "held_out": bool(evaluations)}
        losses["preferences"] = {"share": share, "margin": margin, **counted}
    return losses
