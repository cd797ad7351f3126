"""Prepare a run folder for training: create it, resume it, or refuse."""

import os

from ..core.errors import UserError
from ..core.files import write
from ..recipe import Recipe, differences, load_resolved, parallel, to_yaml, training_part
from ..run.folder import RunFolder, now
from ..run.provenance import provenance


def prepare(folder: RunFolder, recipe: Recipe, num_ranks: int = 1) -> None:
    """Make a folder ready to start or resume training in, and hold it (`RunFolder.lock`).

    A finished run is not changed. An unfinished run resumes only with its own recipe and number of
    processes. Raises UserError otherwise, and if `accelerate launch` is configured for another kind
    of parallelism than the recipe.
    """
    # accelerate's own configuration would silently win over the recipe's.
    shared = parallel(recipe.run.parallel)
    for kind, name in {"zero": "DeepSpeed", "fsdp2": "FSDP"}.items():
        is_configured = os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true"
        if is_configured and shared.kind != kind:
            raise UserError(
                f"accelerate is configured for {name}, but run.parallel is {shared.kind}; write"
                " another run.parallel (zero1, zero2, zero3, fsdp2 or the path of a config), or"
                " configure accelerate for plain multi-GPU"
            )
    # Held until this process ends: two commands in one folder would write into one another's run.
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
        if recipe._skipped_suite:
            start["skipped_suite"] = recipe._skipped_suite
        # run.json before recipe.yaml: a kill between the two leaves a run's folder, which the same
        # command takes again.
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
        raise UserError(
            f"{folder}: contains a finished run, whose schedule has ended. Evaluate the run with "
            f"`soren-align eval {folder}`, train further in another run.output_dir with "
            f"model.name_or_path={folder.model}, or replace the run with --overwrite"
        )
    if status != "finished" and recipe.run.resume == "never":
        raise UserError(
            f"{folder}: contains an unfinished run, and run.resume is never. Choose another"
            " run.output_dir, resume the run with --set run.resume=auto, or replace the run with"
            " --overwrite"
        )
    # A changed recipe is another run. Resuming under it would mix two trainings in one curve.
    changed = [] if started is None else differences(training_part(started), training_part(recipe))
    # The config may be the same file with another content.
    if started and recipe.run.parallel == started.run.parallel:
        changed += differences(
            {"run.parallel": run.get("parallel_config", config)}, {"run.parallel": config}
        )
    if changed:
        raise UserError(
            f"{folder}: contains a run of another recipe, in which these keys differ:",
            *(f"  {line}" for line in changed),
            "Restore these keys to resume the run, choose another run.output_dir, or replace the"
            " run with --overwrite",
        )
    if status == "finished":
        folder.update(status="trained")
    elif status == "training":
        # Dropout is drawn per process, and sums round differently: the result would be that of
        # neither number.
        if (before := run.get("processes", 1)) not in (None, num_ranks):
            raise UserError(
                f"{folder}: contains an unfinished run of {before} process{'es' * (before > 1)},"
                f" not of {num_ranks}. Resume with --processes {before}, convert the run's last"
                f" checkpoint with `soren-align reshard {folder}`, or replace the run with"
                " --overwrite"
            )
        folder.update(processes=num_ranks)
    # Written again: keys that do not belong to the training, such as the evaluation's, may have
    # changed.
    write(folder.recipe, to_yaml(recipe))
