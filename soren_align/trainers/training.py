"""Training one recipe to its model folder: the middle of the worker's work, resumable at any moment."""

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, PrinterCallback, get_scheduler
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.optimization import GreedyLR

from ..data import account, check_template
from ..errors import UserError
from ..files import remove
from ..manifest import SURVIVAL_THRESHOLD, describe_dropped
from ..optim import route, routing_table
from ..recipe import Recipe, refuse_no_batch, rows_per_step
from ..run_folder import RunFolder
from ..sharding import is_universal
from ..sharding.ranks import Ranks
from . import adapters, build, checkpoints
from .lost_updates import Resolution, survival
from .progress import ProgressBar
from .signals import StopOnSignal


@dataclass
class Ready:
    """Everything that training needs, looked at and found good."""

    recipe: Recipe
    start: str
    tokenizer: Any
    splits: dict[str, Any]
    account: Any
    """What TRL will make of the training rows: data.preview.Account. None on all ranks but the first."""
    notices: tuple[str, ...] = ()
    """What a person should know of data and template, and nothing stops for."""


def get_ready(
    recipe: Recipe,
    folder: RunFolder,
    on_rows: Callable[[int], object] | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> Ready:
    """Check all that can be checked before a model is loaded. UserError says what is wrong.

    Rows are counted on the first rank only; it goes first (Ranks.first_goes_first), the others find its files.
    """
    unset_hf_deepspeed_config()  # of an earlier run in this process: models would load cut into parts
    start = build.starting_checkpoint(recipe, folder)
    tokenizer = build.load_tokenizer(recipe, start)
    splits = build.load_splits(recipe)
    config = build.trl_config(recipe, folder.checkpoints, ranks)
    _check_schedule(config)
    if not ranks.is_first:
        return Ready(recipe, start, tokenizer, splits, None)
    assistant_only = bool(recipe.trainer.get("assistant_only_loss"))
    train = splits["train"].dataset
    completion_only = recipe.trainer.get("completion_only_loss")
    notices = check_template(tokenizer, recipe.task, assistant_only, train, completion_only)
    counted = account(
        train,
        recipe.task,
        tokenizer,
        max_length=None if recipe.trainer.get("packing") else config.max_length,  # packing neither cuts nor drops
        assistant_only_loss=assistant_only,
        completion_only_loss=completion_only is not False,
        parts=splits["train"].parts,
        on_rows=on_rows,
    )
    if counted.num_kept == 0:
        raise UserError(
            f"{splits['train'].source['path']}: none of {counted.num_rows} rows can be trained on: "
            f"{describe_dropped(counted.dropped)}. trainer.max_length is {config.max_length}"
        )
    refuse_no_batch(recipe, counted.num_kept, ranks.num_ranks)
    if not counted.stop_token_trained and not notices:
        notices = [f"no answer is trained to its end: all are cut at trainer.max_length {config.max_length}"]
    notices += _beyond_positions(recipe, start, counted.lengths["max"], config.max_length)
    return Ready(recipe, start, tokenizer, splits, counted, (*splits["train"].notices, *notices))


def _check_schedule(config: Any) -> None:
    """UserError for lr_scheduler_kwargs that transformers would refuse, or fail on, when the first step is near."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    settings = config.lr_scheduler_kwargs or {}
    with build.the_users("trainer.lr_scheduler_type and lr_scheduler_kwargs", ValueError, TypeError, ArithmeticError):
        schedule = get_scheduler(config.lr_scheduler_type, optimizer, 1, 10, scheduler_specific_kwargs=settings)
        if not isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR):  # they step by a loss
            optimizer.step()
            schedule.step()


def _beyond_positions(recipe: Recipe, start: str, longest: int, max_length: int | None) -> list[str]:
    """A notice where rows have more tokens than the model has positions."""
    base, revision = adapters.base_of(start, recipe.model.revision)
    with build.the_users(f"model {recipe.model.name_or_path}"):
        config = AutoConfig.from_pretrained(base, trust_remote_code=False, revision=revision)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = max_length or longest
    length = length if recipe.trainer.get("packing") else min(longest, length)
    if not isinstance(positions, int) or length <= positions:
        return []
    return [f"rows of {length:,} tokens are trained, and the model has {positions:,} positions; see trainer.max_length"]


def train(ready: Ready, folder: RunFolder, console: Console, ranks: Ranks = Ranks()) -> bool:  # noqa: B008 (frozen)
    """Train to `folder.model`, from the last checkpoint if there is one. False if a signal stopped it.

    Collective; the first rank alone writes and speaks.
    """
    recipe = ready.recipe
    with console.status("Loading the model"):
        trainer = build.build_trainer(recipe, folder, ready.start, ready.tokenizer, ready.splits, ranks)
        found = _checkpoint(recipe, folder, trainer.origin, console) if ranks.is_first else None
        resume = ranks.of_first(found)
    if resume and is_universal(resume):
        trainer.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {"load_universal": True}
    stop = StopOnSignal(ranks)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(stop)
    if ranks.is_first:
        trainer.add_callback(ProgressBar(console, recipe.task))
        _record_before(folder, ready, trainer)
        _say_before(console, ready, trainer, ranks)
        folder.drop_metrics_after(checkpoints.step_of(resume) if resume else 0)
    trainer.add_callback(
        Resolution(trainer.watch, recipe.run.lost_updates, partial(_say_resolution, folder, console, ranks))
    )

    began = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    except FloatingPointError as error:
        raise UserError(f"step {trainer.state.global_step + 1}: {error}") from error
    except pickle.UnpicklingError as error:
        raise UserError(f"{resume}: {checkpoints.PICKLED}") from error
    seconds = time.monotonic() - began
    stopped = stop.stopped and trainer.state.global_step < trainer.state.max_steps
    if not stopped:
        _save(trainer, ready.tokenizer, folder, ranks)
    last: dict[str, Any] = trainer.watch.distances()
    if not stopped:
        last["survival"] = survival(trainer.watch, trainer.save_dtype)
    if ranks.is_first:
        # Resumed at its last step, a run takes none: what it proved before stands.
        folder.update(optimizer=(folder.read() or {}).get("optimizer", {}) | trainer.watch.record)
        if stopped:
            console.print(f"stopped at step {trainer.state.global_step} with a checkpoint; the same command goes on")
        else:
            _record_after(folder, trainer, last, console, resume, seconds)
    return not stopped


def _record_after(
    folder: RunFolder, trainer: Any, last: dict[str, Any], console: Console, resume: Path | None, seconds: float
) -> None:
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    folder.update(
        status="trained",
        training={
            "steps": trainer.state.global_step,
            "seconds_since_start_or_resume": round(seconds, 1),
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            **last,
        },
    )
    loss = f", loss {losses[0]:.3f} -> {losses[-1]:.3f}" if len(losses) > 1 else ""
    taken = trainer.state.global_step - (checkpoints.step_of(resume) if resume else 0)
    here = f" ({taken} now)" if resume else ""
    console.print(f"trained   {trainer.state.global_step} steps{here} in {seconds:.0f} s{loss}", highlight=False)
    if "relative_change" in last:
        console.print(
            f"          matrices changed by {100 * last['relative_change']:.3g}% of their norm", highlight=False
        )
        _say_survival(last["survival"], console)


def _say_survival(kept: dict[str, Any], console: Console) -> None:
    if "matrices" not in kept:
        return
    projection, entries = (100 * kept["matrices"][key] for key in ("projection", "entries"))
    said = f"{projection:.3g}% of the change is kept, in {entries:.3g}% of its entries"
    console.print(f"saved     in {kept['dtype']}: {said}", highlight=False)
    if min(entries, projection) < 100 * SURVIVAL_THRESHOLD:
        console.print("          the rest is rounded away; run.save_dtype: float32 keeps it", highlight=False)


def _say_resolution(
    folder: RunFolder, console: Console, ranks: Ranks, found: dict[str, Any], complaints: list[str]
) -> None:
    if ranks.is_first:
        folder.update(resolution=found)
        for complaint in complaints:
            console.print(f"notice    {complaint}", highlight=False)


def _checkpoint(recipe: Recipe, folder: RunFolder, origin: dict[str, Any], console: Console) -> Path | None:
    if recipe.run.resume not in ("auto", "never"):
        path = Path(recipe.run.resume).expanduser()
        checkpoints.check(path, origin)
        return path
    found, notices = checkpoints.latest(folder.checkpoints, origin)
    for notice in notices:
        console.print(f"notice    {notice}", highlight=False)
    if found:
        console.print(f"resume    from step {checkpoints.step_of(found)}", highlight=False)
        resumed = (folder.read() or {}).get("resumed_from_steps", [])
        folder.update(resumed_from_steps=[*resumed, checkpoints.step_of(found)])
    return found


def _record_before(folder: RunFolder, ready: Ready, trainer: Any) -> None:
    recipe, counted, split = ready.recipe, ready.account, ready.splits["train"]
    folder.update(
        start={
            "path": str(Path(ready.start).resolve()) if Path(ready.start).is_dir() else ready.start,
            "sha256_or_revision": trainer.origin["start"],
        },
        data={
            "train": split.source
            | {"layout": split.layout, "num_examples": counted.num_kept, "dropped": split.dropped | counted.dropped}
            | ({"num_examples_by_source": list(counted.kept_of_parts)} if counted.kept_of_parts else {}),
            "eval": ready.splits["eval"].source if ready.splits["eval"] else None,
        },
        parallel=recipe.run.parallel,
        examples_per_step=rows_per_step(recipe, trainer.watch.ranks.num_ranks)[0],
        gradient_accumulation_steps=trainer.args.gradient_accumulation_steps,
        seeds={"trainer": trainer.args.seed, "init": recipe.model.init_seed},
        device=str(trainer.args.device),
        parameters={
            "dtype": sorted({str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters()}),
            "total": sum(map(_numel, trainer.model.parameters())),
            "trainable": sum(_numel(p) for p in trainer.model.parameters() if p.requires_grad),
        },
        routing=routing_table(route(trainer.model, recipe.optimizer.aux)),
    )


def _say_before(console: Console, ready: Ready, trainer: Any, ranks: Ranks) -> None:
    counted, split = ready.account, ready.splits["train"]
    for notice in ready.notices:
        console.print(f"notice    {notice}", highlight=False)
    reasons = split.dropped | counted.dropped
    dropped = f", {describe_dropped(reasons)}" if reasons else ""
    console.print(f"data      {counted.num_kept} of {split.num_rows} rows, {split.layout}{dropped}", highlight=False)
    for kept, source in zip(counted.kept_of_parts, split.source.get("sources", ()), strict=True):
        console.print(f"          {_told(source, kept)}", highlight=False, markup=False)
    console.print(f"start     {ready.start}", highlight=False)
    if ranks.launched:
        rows, product = rows_per_step(ready.recipe, ranks.num_ranks)
        console.print(f"batch     {rows} rows per step: {product}", highlight=False)
        console.print(f"parallel  {ready.recipe.run.parallel}", highlight=False)
    optimizer = ready.recipe.optimizer
    tensors = [len(g["params"]) for g in trainer.reference.param_groups]
    kind = kind_of(optimizer)
    console.print(f"steps     {kind} on {tensors[0]} matrices at {optimizer.lr:g}", highlight=False)
    if len(tensors) > 1:
        console.print(f"          adamw on {tensors[1]} other tensors at {optimizer.aux_lr:g}", highlight=False)


def _told(source: dict[str, Any], kept: int) -> str:
    """A source of a mixture in words: "zoo.jsonl: 30 of 120 rows (weight 0.25), 29 kept, chat messages"."""
    dropped = f", {describe_dropped(source['dropped'])}" if source["dropped"] else ""
    taken = f"{source['taken']} of {source['num_rows']} rows (weight {source['weight']:g})"
    return f"{source['path']}: {taken}, {kept} kept, {source['layout']}{dropped}"


def kind_of(optimizer: Any) -> str:
    """The matrices' optimizer in words: "soren (sns, scale match_rms_adamw)"."""
    words = [optimizer.spectral_map, optimizer.adjust_lr_fn and f"scale {optimizer.adjust_lr_fn}"]
    said = ", ".join(word for word in words if word)
    return f"{optimizer.name} ({said})" if said else optimizer.name


def _save(trainer: Any, tokenizer: Any, folder: RunFolder, ranks: Ranks) -> None:
    """The model folder, whole or not at all. Collective: a sharded model is put together by all."""
    aside = folder.model.with_name("model.part")
    if ranks.is_first:
        remove(aside)
    trainer.save_model(str(aside))
    if not ranks.is_first:
        return
    tokenizer.save_pretrained(aside)
    (aside / "training_args.bin").unlink(missing_ok=True)  # a pickle, and the recipe says all of it
    remove(folder.model)  # of a try that was killed before run.json could say so
    aside.rename(folder.model)


def _numel(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO 3 empties the tensor
