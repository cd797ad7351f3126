"""From a checked recipe to the process that runs it.

Everything that can be refused without torch is refused here: a finished run in the way, a checkpoint of another
recipe. Then this process *becomes* the worker, so that signals and exit codes are the worker's own.
"""

import os
import subprocess
import sys
from pathlib import Path

from .bench import shapes as bench_shapes
from .recipe import Recipe, UserError, differences, load_resolved, to_yaml, training_part
from .report import RunFolder, now, provenance, write


def train(recipe: Recipe) -> None:
    """Make or find the run folder, then become its worker. UserError if the folder must not be touched."""
    folder = RunFolder(recipe.run.output_dir)
    prepare(folder, recipe)
    _become(["train", str(folder)], recipe)


def plan(recipe: Recipe, as_json: bool) -> int:
    """Print what `train` would do; the worker's exit code."""
    command = [*_WORKER, "plan", *(["--json"] if as_json else [])]
    return subprocess.run(command, input=to_yaml(recipe), text=True, env=environment(recipe)).returncode


def evaluate(targets: list[str], suite: str | None, output: str | None, summary: str | None) -> None:
    """Become a worker that evaluates model or run folders."""
    for target in targets:
        if not (RunFolder(target).read() or (Path(target) / "config.json").is_file()):
            raise UserError(f"{target}: neither a run folder (run.json) nor a model folder (config.json)")
    arguments = ["eval", *targets]
    for option, value in (("--suite", suite), ("--output", output), ("--summary", summary)):
        arguments += [option, value] if value else []
    _become(arguments, _recipe_of(targets[0]))


def bench(command: list[str], shapes: str, device: str | None, as_json: bool, output: str | None) -> None:
    """Become a worker that measures; what it cannot measure is refused before torch loads."""
    bench_shapes.parse(shapes)
    arguments = ["bench", *command, "--shapes", shapes]
    if device:
        bench_shapes.check_device(device)
        arguments += ["--device", device]
    if output:
        if not Path(output).absolute().parent.is_dir():
            raise UserError(f"--output: {output}: no such folder")
        if Path(output).is_dir():
            raise UserError(f"--output: {output}: is a folder; name a file, such as {Path(output) / 'benchmarks.md'}")
        arguments += ["--output", output]
    _become([*arguments, *(["--json"] if as_json else [])], None)


def prepare(folder: RunFolder, recipe: Recipe) -> None:
    """Leave a folder that the worker can start or go on in.

    A finished run is not touched; an unfinished one goes on only under the recipe that began it.
    """
    run = folder.read()
    if run is None:
        if folder.path.is_dir() and any(folder.path.iterdir()):
            raise UserError(f"{folder}: not empty and not a run folder; choose another run.output_dir")
    elif folder.is_busy():
        raise UserError(f"{folder}: another process is running this run")
    elif recipe.run.overwrite or (run["status"] == "training" and not folder.sealed()):
        folder.clear()  # without a checkpoint there is nothing to go on from, nor to lose
        run = None
    elif run["status"] == "finished" and _lacks_evaluation(folder, recipe):
        _refuse_another_recipe(folder, recipe)
        folder.update(status="trained")
    elif run["status"] == "finished":
        raise UserError(
            f"{folder}: holds a finished run. Choose another run.output_dir, look at it with "
            f"`soren-align eval {folder}`, or replace it with --set run.overwrite=true"
        )
    elif recipe.run.resume == "never":
        raise UserError(
            f"{folder}: holds an unfinished run and run.resume is never. Choose another run.output_dir, go on with "
            "--set run.resume=auto, or replace it with --set run.overwrite=true"
        )
    else:
        _refuse_another_recipe(folder, recipe)
    folder.path.mkdir(parents=True, exist_ok=True)
    write(folder.recipe, to_yaml(recipe))
    if run is None:
        folder.update(status="training", task=recipe.task, started=now(), **provenance())


def _lacks_evaluation(folder: RunFolder, recipe: Recipe) -> bool:
    """Whether a run that was finished with --no-eval is now asked for its evaluation."""
    if recipe.eval is None:
        return False
    suite = Path(recipe.eval.suite)
    return not folder.evaluation(suite.parent.name if suite.suffix == ".yaml" else str(suite)).is_dir()


def _refuse_another_recipe(folder: RunFolder, recipe: Recipe) -> None:
    if not folder.recipe.is_file():
        return
    changed = differences(training_part(load_resolved(folder.recipe)), training_part(recipe))
    if changed:
        raise UserError(
            f"{folder}: holds an unfinished run of another recipe:",
            *(f"  {line}" for line in changed),
            "Restore these to go on, choose another run.output_dir, or replace it with --set run.overwrite=true",
        )


def environment(recipe: Recipe | None) -> dict[str, str]:
    """The worker's environment. What the user has set stands."""
    env = dict(os.environ)
    env.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if recipe and recipe.run.num_threads:
        env.setdefault("OMP_NUM_THREADS", str(recipe.run.num_threads))
    if recipe and recipe.run.offline:
        env.setdefault("HF_HUB_OFFLINE", "1")
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if len(gpus) > 1 and "CUDA_VISIBLE_DEVICES" not in env:
        # TRL refuses several visible GPUs in one process, and the batch must not depend on the machine.
        env["CUDA_VISIBLE_DEVICES"] = "0"
        print(f"{len(gpus)} GPUs are here; this run uses one (CUDA_VISIBLE_DEVICES=0)", file=sys.stderr)  # noqa: T201
    return env


_WORKER = [sys.executable, "-m", "soren_align.worker"]


def _become(arguments: list[str], recipe: Recipe | None) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("WORLD_SIZE is more than 1: this version trains in one process; start it without a launcher")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(sys.executable, [*_WORKER, *arguments], environment(recipe))


def _recipe_of(target: str) -> Recipe | None:
    """The recipe of a run folder, for its environment; None for a plain model."""
    folder = RunFolder(target)
    return load_resolved(folder.recipe) if folder.read() and folder.recipe.is_file() else None
