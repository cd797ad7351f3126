"""From a checked recipe to the process that runs it.

Everything that can be refused without torch is refused here: a finished run in the way, a checkpoint of another
recipe. Then this process *becomes* the worker, so that signals and exit codes are the worker's own.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .. import shipped
from ..bench import shapes as bench_shapes
from ..errors import UserError
from ..files import local_path
from ..recipe import (
    ADAPTER,
    Eval,
    Recipe,
    accumulation,
    adapter_config,
    differences,
    evaluation_problems,
    is_local,
    load_resolved,
    parallel,
    refuse_unquantizable,
    to_yaml,
    trackers,
    trainer_value,
    training_part,
)
from ..run_folder import RunFolder, now, provenance, write
from .environment import environment as launched_environment
from .environment import launched, without_ranks


def train(recipe: Recipe, processes: int | None = None) -> None:
    """Make or find the run folder, then become its worker, or torchrun for several `processes`.

    Started by a launcher, this is one rank of several: the first prepares the folder, and none launches again.
    UserError if the folder must not be touched or the batch cannot be dealt out.
    """
    folder = RunFolder(recipe.run.output_dir)
    here = launched()
    if here and processes not in (None, here.num_ranks):
        raise UserError(f"--processes {processes}: a launcher has already started {here.num_ranks}; leave it out")
    num_ranks = here.num_ranks if here else processes or 1
    accumulation(recipe, num_ranks)  # refused before anything is touched
    refuse_unquantizable(recipe)
    _refuse_another_kind(parallel(recipe.run.parallel).kind)
    if not here or here.rank == 0:
        prepare(folder, recipe, num_ranks)
    work = ["train", str(folder), "--timeout", str(trainer_value(recipe, "ddp_timeout"))]
    alone = num_ranks == 1 and recipe.run.parallel == "ddp"
    if alone or here or (folder.read() or {}).get("status") == "trained":
        _become(work, recipe, num_ranks if here else 1)
    _become(["ranks", str(num_ranks), *work], recipe, num_ranks)


def plan(recipe: Recipe, as_json: bool, processes: int = 1) -> int:
    """Print what `train` on so many processes would do; the worker's exit code."""
    accumulation(recipe, processes)  # refused before torch loads
    command = [*_WORKER, "plan", "--processes", str(processes), *(["--json"] if as_json else [])]
    return subprocess.run(command, input=to_yaml(recipe), text=True, env=environment(recipe)).returncode


def universal(run: str) -> None:
    """Become a worker that frees a run's last checkpoint from the number of processes that wrote it."""
    folder = RunFolder(run)
    folder.lock()
    if (folder.read() or {}).get("status") != "training" or not folder.complete_checkpoints():
        raise UserError(f"{folder}: holds no unfinished run with a complete checkpoint")
    recipe = load_resolved(folder.recipe)
    if recipe.run.global_batch_size is None:
        raise UserError(
            f"{folder}: has no run.global_batch_size, so that another number of processes would take another number of "
            "rows per step, and be another run"
        )
    if parallel(recipe.run.parallel).kind == "fsdp2":
        raise UserError(f"{folder}: is a run by FSDP2, of which this is not tested; go on with as many processes")
    _become(["universal", run], recipe)


def merge(run: str) -> None:
    """Become a worker that makes one model of a run's adapter and its base."""
    folder = RunFolder(run)
    folder.lock()
    status = (folder.read() or {}).get("status")
    if status not in ("trained", "finished") or not folder.model.is_dir():
        raise UserError(f"{folder}: has no model yet (status: {status}); finish the run first")
    if adapter_config(folder.model) is None:
        raise UserError(f"{folder}: trained no adapter; {folder.model} is a whole model already")
    _become(["merge", run], load_resolved(folder.recipe))


def evaluate(
    models: list[str], given: dict[str, Any], output: str | None, summary: str | None, cache: str | None
) -> None:
    """Become a worker that evaluates models and runs; what `given` leaves out is as in the first run's recipe."""
    for model in models:
        kinds = [local_path(model) / name for name in ("run.json", "config.json", ADAPTER)]
        if is_local(model) and not any(kind.is_file() for kind in kinds):
            raise UserError(
                f"{model}: neither a run folder (run.json), nor a model's (config.json), nor an adapter's ({ADAPTER})"
            )
        if "/" in model and not is_local(model) and Path(model).parent.is_dir():
            raise UserError(
                f"{model}: there is no such folder; a name on the hub it is not, with {Path(model).parent} here"
            )
    first = RunFolder(models[0])
    if output is None and first.read():
        first.lock(shared=True)  # results are written into it
    run = first.read()  # again, now that it is held
    recipe = load_resolved(first.recipe) if run and first.recipe.is_file() else None
    asked = _asked(recipe, given)
    if output is None and (recipe is None or len(models) > 1):
        raise UserError("--output: is required: name the folder for results that belong to no single run")
    arguments = ["eval", *models, "--asked", asked.model_dump_json()]
    for option, value in (("--output", output), ("--summary", summary), ("--cache", cache)):
        arguments += [option, value] if value else []
    trained = (run or {}).get("processes")
    _become(arguments, recipe, num_gpus=asked.processes or trained or 1)


def _asked(recipe: Recipe | None, given: dict[str, Any]) -> Eval:
    """The recipe's evaluation, as the command line changes it."""
    own = recipe.eval.model_dump(exclude={"trust_suite"}) if recipe and recipe.eval else {}  # a stranger's, perhaps
    given = {key: value for key, value in given.items() if value is not None}
    if given.get("suite", own.get("suite")) != own.get("suite"):
        own = {}  # the batch size and the data were another suite's
    try:
        asked = Eval.model_validate(own | given)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        if any(problem["loc"] == ("suite",) for problem in problems):
            raise UserError(
                "--suite: is required; the first of the given models is no run with an evaluation of its own. Shipped"
                f" are: {', '.join(shipped.suites())}"
            ) from None
        raise UserError(
            *(f"--{str(p['loc'][0]).replace('_', '-')}: found {p['input']!r}; {p['msg']}" for p in problems)
        ) from None
    problems = evaluation_problems(asked.model_dump())
    if problems:
        raise UserError(*(f"--{key.replace('_', '-')}: {message}" for key, message in problems))
    return asked


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


def prepare(folder: RunFolder, recipe: Recipe, num_ranks: int = 1) -> None:
    """Leave a folder that the worker can start or go on in, held by this process (`RunFolder.lock`).

    A finished run is not touched; an unfinished one goes on only under the recipe that began it, and on as many
    processes.
    """
    folder.lock(begin=True)
    run = folder.read()
    if run is None or recipe.run.overwrite or (run["status"] == "training" and not folder.complete_checkpoints()):
        folder.clear()  # without a checkpoint there is nothing to go on from, nor to lose
        shared = parallel(recipe.run.parallel).config
        begun = {"status": "training", "task": recipe.task, "processes": num_ranks, "started": now(), **provenance()}
        begun["extends"] = recipe.extends
        folder.replace(**begun, **({"parallel_config": shared} if shared else {}))
    elif run["status"] == "finished" and _lacks_evaluation(folder, recipe):
        _refuse_another_recipe(folder, recipe, run)
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
        _refuse_another_recipe(folder, recipe, run)
        if run["status"] == "training":
            _refuse_another_number(folder, run.get("processes", 1), num_ranks)
            folder.update(processes=num_ranks)
    write(folder.recipe, to_yaml(recipe))


def _lacks_evaluation(folder: RunFolder, recipe: Recipe) -> bool:
    """Whether a run that was finished with --no-eval is now asked for its evaluation."""
    if recipe.eval is None:
        return False
    return not folder.evaluation(recipe.eval.name).is_dir()


def _refuse_another_recipe(folder: RunFolder, recipe: Recipe, run: dict[str, Any]) -> None:
    if not folder.recipe.is_file():
        return
    began, here = load_resolved(folder.recipe), parallel(recipe.run.parallel).config
    changed = differences(training_part(began), training_part(recipe))
    if recipe.run.parallel == began.run.parallel:  # the same file, which may hold something else now
        changed += differences({"run.parallel": run.get("parallel_config", here)}, {"run.parallel": here})
    if changed:
        raise UserError(
            f"{folder}: holds an unfinished run of another recipe:",
            *(f"  {line}" for line in changed),
            "Restore these to go on, choose another run.output_dir, or replace it with --set run.overwrite=true",
        )


def _refuse_another_number(folder: RunFolder, there: int, here: int) -> None:
    # Dropout draws per process, and sums round otherwise: the run would not be that of either number.
    if there not in (None, here):
        raise UserError(
            f"{folder}: holds an unfinished run of {there} process{'es' * (there > 1)}, not {here}. Go on with "
            f"--processes {there}, free its last checkpoint from that number with `soren-align universal {folder}`, or "
            "replace it with --set run.overwrite=true"
        )


def _refuse_another_kind(kind: str) -> None:
    """UserError if `accelerate launch` was configured for something else than the recipe."""
    for variable, theirs, named in (
        ("ACCELERATE_USE_DEEPSPEED", "zero", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "fsdp2", "FSDP"),
    ):
        if os.environ.get(variable, "").lower() == "true" and kind != theirs:
            raise UserError(
                f"accelerate was configured for {named}, and run.parallel is {kind}: say it in run.parallel (zero1, "
                "zero2, zero3, fsdp2 or a config's path), or configure accelerate for plain multi-GPU"
            )


def environment(recipe: Recipe | None, num_ranks: int = 1, num_gpus: int = 1) -> dict[str, str]:
    """The environment of a worker that is one of `num_ranks`, or starts processes for `num_gpus` by itself.

    What the user has set stands.
    """
    env = launched_environment() if num_ranks > 1 else without_ranks(os.environ)
    env["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # no pickle of a checkpoint runs code, whoever reads it
    env.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    env.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if recipe and recipe.run.num_threads:
        env.setdefault("OMP_NUM_THREADS", str(recipe.run.num_threads))
    if num_ranks > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))  # torchrun says 1, and warns
    if recipe and recipe.trainer.get("use_cpu"):
        env.setdefault("ACCELERATE_USE_CPU", "true")
    if recipe and "tensorboard" in trackers.named(recipe.trainer.get("report_to")):
        # transformers' own place has the host's name in it, and a new one after each resume.
        env.setdefault("TENSORBOARD_LOGGING_DIR", str(RunFolder(recipe.run.output_dir).path / "tensorboard"))
    if recipe and recipe.run.offline:
        env.setdefault("HF_HUB_OFFLINE", "1")
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not gpus and not Path("/dev/kfd").exists() and not _has_cuda_driver():
        env.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed says on standard output that it found no GPU
    if num_ranks == num_gpus == 1 and len(gpus) > 1 and "CUDA_VISIBLE_DEVICES" not in env:
        # TRL refuses several visible GPUs in one process, and the batch must not depend on the machine.
        env["CUDA_VISIBLE_DEVICES"] = "0"
        said = f"{len(gpus)} GPUs are here; this run uses one; --processes {len(gpus)} would use all"
        print(said, file=sys.stderr)  # noqa: T201
    return env


def _has_cuda_driver() -> bool:
    """Whether CUDA may be here without /dev/nvidia*, as under WSL2: torch needs this library too. It starts no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


_WORKER = [sys.executable, "-m", "soren_align.launch.worker"]


def _become(arguments: list[str], recipe: Recipe | None, num_ranks: int = 1, num_gpus: int = 1) -> None:
    here = launched()
    if here and here.num_ranks > num_ranks:
        raise UserError(
            f"{arguments[0]} is work for one process; start it without a launcher (WORLD_SIZE is more than 1)"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(sys.executable, [*_WORKER, *arguments], environment(recipe, num_ranks, num_gpus))
