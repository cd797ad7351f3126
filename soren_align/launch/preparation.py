"""Prepare a run folder for training: create it, resume it, or refuse."""

import os
import shlex
from itertools import count
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import write
from ..recipe import (
    Recipe,
    differences,
    load_resolved,
    parallel,
    to_yaml,
    trainer_value,
    training_part,
)
from ..run.folder import RunFolder, now
from ..run.provenance import provenance
from ..tasks import TASKS


def prepare(folder: RunFolder, recipe: Recipe, num_ranks: int = 1) -> None:
    """Make a folder ready to start or resume training in, and hold it (`RunFolder.lock`).

    A finished run is not changed. An unfinished run resumes only with its own recipe and number of
    processes. Raises UserError otherwise, and if `accelerate launch` is configured for another kind
    of parallelism than the recipe.
    """
    shared = parallel(recipe.run.parallel)
    for kind, name in {"zero": "DeepSpeed", "fsdp2": "FSDP"}.items():
        is_configured = os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true"
        if is_configured and shared.kind != kind:
            raise UserError(
                f"accelerate is configured for {name}, but run.parallel is {shared.kind}; write another run.parallel "
                "(zero1, zero2, zero3, fsdp2 or the path of a config), or configure accelerate for plain multi-GPU"
            )
    folder.lock(create=True)
    run, config = folder.read(), shared.config
    if (
        run is None
        or recipe.run.overwrite
        or (run["status"] == "training" and not folder.complete_checkpoints())
    ):
        folder.clear()  # without a checkpoint there is nothing to resume from, and nothing to lose
        start = {
            "status": "training",
            "task": recipe.task,
            "processes": num_ranks,
            "started": now(),
            **provenance(),
        }
        start["extends"] = recipe.extends
        folder.replace(**start, **({"parallel_config": config} if config else {}))
        write(folder.recipe, to_yaml(recipe))
        return
    status = run["status"]
    if status == "diverged":
        raise UserError(f"{folder}: {folder.why_no_model()}")
    started = load_resolved(folder.recipe) if folder.recipe.is_file() else None
    # Finished without an evaluation, as by --no-eval, which the recipe asks for now: only that is
    # left to do.
    if status == "finished" and (
        recipe.eval is None or folder.evaluation(recipe.eval.name).is_dir()
    ):
        _refuse_more_steps(folder, recipe, run, started)
        raise UserError(
            f"{folder}: contains a finished run. Choose another run.output_dir, evaluate the run with "
            f"`soren-align eval {folder}`, or replace the run with --overwrite"
        )
    if status != "finished" and recipe.run.resume == "never":
        raise UserError(
            f"{folder}: contains an unfinished run, and run.resume is never. Choose another run.output_dir, resume "
            "the run with --set run.resume=auto, or replace the run with --overwrite"
        )
    changed = [] if started is None else differences(training_part(started), training_part(recipe))
    # the same file, whose content may have changed
    if started and recipe.run.parallel == started.run.parallel:
        changed += differences(
            {"run.parallel": run.get("parallel_config", config)}, {"run.parallel": config}
        )
    if changed:
        _refuse_more_steps(folder, recipe, run, started)
        raise UserError(
            f"{folder}: contains a run of another recipe, in which these keys differ:",
            *(f"  {line}" for line in changed),
            "Restore these keys to resume the run, choose another run.output_dir, or replace the run with --overwrite",
        )
    if status == "finished":
        folder.update(status="trained")
    elif status == "training":
        # Dropout is drawn per process, and sums round differently: the result would be that of
        # neither number.
        if (before := run.get("processes", 1)) not in (None, num_ranks):
            raise UserError(
                f"{folder}: contains an unfinished run of {before} process{'es' * (before > 1)}, not of {num_ranks}. "
                f"Resume with --processes {before}, convert the run's last checkpoint with `soren-align reshard "
                f"{folder}`, or replace the run with --overwrite"
            )
        folder.update(processes=num_ranks)
    write(folder.recipe, to_yaml(recipe))


def _refuse_more_steps(
    folder: RunFolder, recipe: Recipe, run: dict[str, Any], started: Recipe | None
) -> None:
    """Raise UserError with the command that trains on from a trained run, if `recipe` is its own
    but for more steps.

    The schedule has ended, and its learning rates were those of the shorter run: more steps are
    another run.
    """
    num_steps = run.get("training", {}).get("steps")
    if run["status"] == "training" or num_steps is None or started is None:
        return
    parts = []
    for part in (started, recipe):
        trainer = {
            key: value
            for key, value in part.trainer.items()
            if key not in ("max_steps", "num_train_epochs")
        }
        parts.append(training_part(part.model_copy(update={"trainer": trainer})))
    key = "max_steps" if trainer_value(recipe, "max_steps") > 0 else "num_train_epochs"
    before = num_steps if key == "max_steps" else trainer_value(started, key)
    more = trainer_value(recipe, key) - before
    if (
        differences(*parts)
        or more <= 0
        or (trainer_value(started, "max_steps") > 0) != (key == "max_steps")
    ):
        return
    target = next(path for number in count(2) if not Path(path := f"{folder}-{number}").exists())
    changes = {
        "model.name_or_path": folder.model,
        "run.output_dir": target,
        f"trainer.{key}": f"{more:g}",
    }
    changes["trainer.seed"] = trainer_value(started, "seed") + 1
    model = started.model
    changes |= {
        f"model.{name}": "null"
        for name in ("init_seed", "tokenizer", "revision", "lora")
        if getattr(model, name) is not None
    }
    command = [f"soren-align {recipe.task} {shlex.quote(str(folder.recipe))}"]
    command += [f"--set {shlex.quote(f'{name}={value}')}" for name, value in changes.items()]
    reference = ", which is also its reference model" if TASKS[recipe.task].has_reference else ""
    raise UserError(
        f"{folder}: this run is complete ({num_steps} steps), and its schedule has ended, so the run cannot be "
        f"extended. To train further, start a new run from this run's model{reference}. The new run has a new "
        "schedule, a new optimizer state and a new order of the examples:",
        "  " + " \\\n    ".join(command),  # lines that a shell joins
    )
