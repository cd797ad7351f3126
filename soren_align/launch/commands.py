"""Run a command in this process: check its recipe without torch, then import torch and work.

Whatever can be refused without torch is refused first. Only training on several ranks starts other
processes.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError, known_failure
from ..core.extras import require
from ..core.figures import NO_PICTURES
from ..core.files import read_json
from ..core.launchers import without_ranks
from ..core.signals import deferred
from ..core.silence import quiet_libraries
from ..core.text import (
    Terminal,
    counting,
    join_words,
    loading,
    print_labelled,
    stderr_console,
    working,
)
from ..evaluate.suite.suites import check_suite
from ..recipe import (
    Recipe,
    accumulation,
    adapter_config,
    load_resolved,
    parallel,
    recorded_quantization,
    trainer_value,
)
from ..recipe.loader import to_yaml
from ..recipe.model import missing_extras, refuse_unloadable, refuse_unreachable
from ..recipe.parallel import AUTO
from ..run import lock
from ..run.folder import AFTER_DIVERGENCE, STOPPED, RunFolder, now
from ..run.record import describe_result
from .environment import gpu_bytes, rank_from_environment, refuse_ranks, set_environment
from .preparation import prepare

if TYPE_CHECKING:
    from ..planning.rates import Convention


def train(recipe: Recipe, processes: int | None = None) -> int:
    """Train a recipe, then evaluate the model.
    Returns the exit code: 0, 1 if the training diverged, or 130 if a signal stopped it.

    Trains in this process, or starts torchrun for several `processes`. Under a launcher this
    process is one rank, and the first rank prepares the run folder. Raises UserError if the folder
    cannot be used or the batch not divided.
    """
    rank = rank_from_environment()
    if rank and processes not in (None, rank.num_ranks):
        raise UserError(
            f"--processes {processes}: a launcher has already started {rank.num_ranks} processes;"
            " remove --processes"
        )
    if recipe.run.parallel == AUTO:
        if rank:
            raise UserError(
                "run.parallel: auto is decided before the processes start, but a launcher has"
                " started them; write the value that `soren-align plan` marks"
            )
        recipe = _with_fastest(recipe, processes or 1)
    # Everything that can be refused without torch, before anything is written.
    num_ranks = rank.num_ranks if rank else processes or 1
    accumulation(recipe, num_ranks)  # raises before anything is written
    if problems := missing_extras(recipe):
        raise UserError(*problems)
    if recipe.eval:
        check_suite(recipe.eval)
    folder = RunFolder(recipe.run.output_dir)
    timeout_seconds = float(trainer_value(recipe, "ddp_timeout"))
    refusal = None
    try:
        try:
            if rank is None or rank.rank == 0:
                # Only if something is left to train: evaluating a trained run needs neither its
                # data nor its start.
                if recipe.run.overwrite or (folder.read() or {}).get("status") in (
                    None,
                    "training",
                ):
                    refuse_unreachable(recipe)
                prepare(folder, recipe, num_ranks)
                # Before torch is imported, which takes seconds.
                data = join_words([split.path for split in recipe.data.sources])
                model, output = recipe.model.name_or_path, recipe.run.output_dir
                text = f"{model} with {recipe.optimizer.name} on {data}, into {output}"
                print_labelled(stderr_console(), recipe.task, text)
        except UserError as error:
            if rank is None or num_ranks == 1:
                raise
            refusal = error  # raised where the other ranks learn of it
        # Train in this process if it is alone, is itself a rank, or has only the evaluation left.
        # Otherwise start torchrun, which starts this package's worker on every rank.
        single = num_ranks == 1 and recipe.run.parallel == "ddp"
        here = single or rank is not None or folder.record()["status"] == "trained"
        set_environment(
            recipe, num_ranks if rank or not here else 1, is_rank=rank is not None and not single
        )
        if here:
            return train_here(folder, timeout_seconds, refusal)
        return _start_ranks(folder, num_ranks, timeout_seconds)
    except KeyboardInterrupt:
        record_stop(folder, requeue=num_ranks == 1)
        raise
    finally:
        folder.release()


def _with_fastest(recipe: Recipe, num_ranks: int) -> Recipe:
    """Return the recipe with the `run.parallel` that a plan marks, or that its unfinished run has.
    Raises UserError if the plan finds a problem, or nothing that fits.
    """

    def chosen(name: str) -> Recipe:
        return recipe.model_copy(update={"run": recipe.run.model_copy(update={"parallel": name})})

    folder = RunFolder(recipe.run.output_dir)
    if folder.recipe.is_file() and not recipe.run.overwrite:
        return chosen(load_resolved(folder.recipe).run.parallel)
    # In a process of its own: torch is imported here only after the choice, which sets its
    # environment.
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "recipe.yaml")
        file.write_text(to_yaml(recipe), encoding="utf-8")
        words = ["plan", str(file), "--processes", str(num_ranks), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "soren_align", *words], capture_output=True, text=True
        )
    try:
        plan = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or ["the plan failed"]
        raise UserError(lines[-1].removeprefix("error: ")) from None
    name = plan["fastest"]
    if name is None:
        raise UserError(
            "run.parallel: auto: no value fits into the GPUs' memory; write a smaller"
            " trainer.per_device_train_batch_size, or name a value (`soren-align plan` lists them)"
        )
    print_labelled(stderr_console(), "parallel", f"{name}, the fastest that fits")
    return chosen(name)


def train_here(folder: RunFolder, timeout_seconds: float, refusal: UserError | None = None) -> int:
    """Train and evaluate in this process, which may be one rank of several.
    Returns the exit code: 0, 1 or 130.

    Steps that are done already, by run.json's status, are skipped. The first rank alone writes and
    prints. refusal: its error before the ranks were joined, which all raise.
    """
    # Imports take seconds; a signal during them waits, since torch cannot be imported twice.
    console = stderr_console(quiet=int(os.environ.get("RANK", "0")) > 0)
    with deferred(), loading(console, "Loading torch, transformers and TRL"):
        from ..sharding.ranks import current_ranks, init_process_group
        from ..training import run as training

    with quiet_libraries(), ExitStack() as stack:
        # Join the ranks. What the first rank has refused, all raise: a rank that ended alone would
        # leave the others waiting until the timeout.
        number, waiting = os.environ.get("WORLD_SIZE", "1"), nullcontext()
        if number != "1":
            waiting = loading(console, f"Waiting for all {number} processes")
        with waiting:
            init_process_group(timeout_seconds)
        ranks = current_ranks()
        with ranks.main_process_first():
            if refusal:
                raise refusal

        # From here on an error is in run.json too.
        recipe = load_resolved(
            folder.recipe
        )  # after joining: the first rank may just have written it
        if ranks.is_first:
            stack.enter_context(_recording_errors(folder))
        if ranks.is_first:
            folder.forget_failure()

        # Train, unless only the evaluation is missing: an interrupted run resumes where it was.
        # The first rank reads the status for all, and changes the file only later.
        status = ranks.broadcast(folder.record()["status"] if ranks.is_first else None)
        if status != "trained":
            setup = _check_inputs(recipe, folder, console, ranks)
            if not training.train(setup, folder, console, ranks):
                if ranks.is_first:
                    record_stop(folder, requeue=True)
                ranks.destroy()  # srun ends the other ranks when one has ended
                return 130

        # The first rank alone evaluates; the others have ended by then and have freed their memory.
        ranks.destroy()
        if ranks.is_first:
            return _finish(folder, recipe, console, evaluate_here=not ranks.launched)
    return 0


def _check_inputs(recipe: Recipe, folder: RunFolder, console: Terminal, ranks: Any) -> Any:
    """Return what training starts from.

    Data, model, and whether the evaluation after training could run: what is wrong with them is
    raised now, and not after hours of training. The first rank reads first and fills the caches.
    """
    from ..training.setup import set_up_training

    with working(console, "Checking data and evaluation") as show, ranks.main_process_first():
        setup = set_up_training(recipe, folder, counting(show, "Counting tokens"), ranks)
        if recipe.eval and ranks.is_first:
            from ..evaluate.report.results import refuse_foreign
            from ..evaluate.run import stage

            refuse_foreign(stage.output_of(folder, recipe.eval), [])
            show("Checking evaluation")
            inputs = recipe.eval, setup.recipe.model, setup.start, setup.tokenizer
            _, notices = stage.preflight(*inputs, lambda name: show(f"Checking evaluation: {name}"))
            for notice in notices:
                print_labelled(console, "notice", notice)
    return setup


def _finish(folder: RunFolder, recipe: Recipe, console: Terminal, *, evaluate_here: bool) -> int:
    """Write the card, evaluate, and set the run's status to finished. Returns the exit code, 0.

    A training that diverged is not evaluated: its status is diverged and the exit code 1, or 0 of a
    rank whose launcher is ours, which reads the status.

    After training on several ranks, a new program evaluates in place of this process: torch,
    accelerate and DeepSpeed cannot return to a single process.
    """
    from ..publish.card import write_card
    from ..run.curves import draw_curves, read_curves
    from .show import print_chart, print_next

    # Checkpoints that have no scores yet: here no rank waits any more, and the model is saved.
    reason = folder.record("training")["training"].get("diverged")
    if recipe.run.benchmark and recipe.eval and evaluate_here and not reason:
        from ..training.measure.sidecar import Sidecar

        Sidecar(recipe.run.benchmark, recipe.eval, folder, console).finish()
    # Picture and card, from the files of the run: a killed evaluation finds them there.
    curves = read_curves(folder.metrics)
    if curves.by_key and NO_PICTURES not in os.environ:
        draw_curves([(folder.name, curves)], folder.curves)
    write_card(folder)
    print_chart(console, curves)
    if reason:
        folder.update(status="diverged", finished=now(), last_error=None)
        not_evaluated = ", and is not evaluated" if recipe.eval else ""
        model = f"{folder.model} is the diverged model, kept for inspection{not_evaluated}"
        print_labelled(console, "diverged", f"{reason}; {AFTER_DIVERGENCE}", model)
        from .torchrun import STARTED_HERE

        return 0 if STARTED_HERE in os.environ else 1
    # In a program of its own: DeepSpeed and accelerate leave state behind that lm-eval would use.
    if recipe.eval and not evaluate_here:
        worker = [sys.executable, "-m", "soren_align.launch.worker", str(folder), "--timeout", "0"]
        os.execvpe(sys.executable, worker, without_ranks(os.environ) | lock.keep_through_exec())
    if recipe.eval:
        from . import evaluation

        try:
            evaluation.run_evaluation([str(folder)], recipe.eval, console, brief=True)
        except Exception as error:
            # The training is done and must not seem lost: the message adds where its model is.
            problem = known_failure(error, folder.path)
            if problem is None:
                raise
            raise type(problem)(
                *problem.problems,
                f"Only the evaluation failed; the trained model is in {folder.model}. Fix the cause"
                f" and rerun the same command, or run `soren-align eval {folder}` with other"
                " options",
            ) from error
    elif result := describe_result(folder.record("training")["training"]):
        print_labelled(console, "result", result)
    folder.update(status="finished", finished=now(), last_error=None)
    files = [
        "recipe.yaml",
        "model/",
        "model/README.md",
        *[folder.curves.name] * folder.curves.is_file(),
    ]
    print_labelled(console, "done", f"{folder} ({', '.join(files)})", wrap=False)
    print_next(console, folder, folder.record())
    return 0


@contextmanager
def _recording_errors(folder: RunFolder) -> Iterator[None]:
    """Hold the run folder, and write a UserError into run.json, or a failure of the machine as
    one.
    """
    if not folder.is_locked():
        folder.lock(as_rank=True)  # its launcher holds the folder
    try:
        yield
    except Exception as error:
        problem = known_failure(error, folder.path)
        if problem is None:
            raise
        if folder.is_locked():  # else it is another command's now
            folder.record_failure(problem)
        raise problem from None


def record_stop(folder: RunFolder, *, requeue: bool) -> None:
    """Write into run.json that a signal stopped the run, if this process holds its folder.

    requeue: also create the file that SOREN_ALIGN_STOPPED names, at which
    configs/slurm/train.sbatch requeues the job. srun's exit code is no sign of a stop: it ends the
    other ranks when one has ended. Not if another rank may have failed, at which srun sends SIGTERM
    to this one.
    """
    if not folder.is_locked():
        return
    with suppress(OSError, UserError):
        if (record := folder.read()) and record["status"] in ("training", "trained"):
            folder.update(last_error=STOPPED)
            if requeue and (file := os.environ.get("SOREN_ALIGN_STOPPED")):
                Path(file).touch()


def _start_ranks(folder: RunFolder, num_ranks: int, timeout_seconds: float) -> int:
    """Train with torchrun; return the exit code. Prints the one message of all ranks."""
    console = stderr_console()
    with deferred(), console.status(f"Starting {num_ranks} processes"):
        from . import torchrun
    os.environ[torchrun.STARTED_HERE] = "1"
    failure = torchrun.start(num_ranks, [str(folder), "--timeout", str(timeout_seconds)])
    if failure is None:
        return 1 if folder.record()["status"] == "diverged" else 0
    if failure.code != 130:
        folder.update(
            last_error=failure.message, resumable=failure.is_resumable, failure=failure.kind
        )
    elif folder.record().get("last_error") == STOPPED:
        return 130  # the first rank has printed it
    else:
        record_stop(folder, requeue=False)
    console.print(failure.message, highlight=False, soft_wrap=True)
    return failure.code


def plan(
    recipe: Recipe,
    next_command: str,
    *,
    full: bool,
    as_json: bool,
    processes: int,
    gpu_memory: float | None = None,
) -> int:
    """Print what `train` would do with this number of processes: a summary, or all of it.
    Returns the exit code.

    gpu_memory: of each GPU, in GB; None: this machine's, or the plan's own assumption.
    next_command: the one that trains the recipe; printed last, unless training would not start.
    """
    accumulation(recipe, processes)  # raises before torch is imported
    if recipe.eval:
        check_suite(recipe.eval)
    from ..planning.offline import model_config, num_examples, offline_without_hub

    if model_config(recipe.model.name_or_path) is None or num_examples(recipe.data) is None:
        refuse_unreachable(recipe)  # a plan of published numbers needs no hub
    set_environment(recipe)
    console = stderr_console()
    with deferred(), console.status("Loading torch, transformers and TRL"):
        from ..planning import plan as planning
        from ..planning.show import print_plan
    with quiet_libraries(), working(console, "Checking data") as show, offline_without_hub():
        result, account = planning.plan_training(
            recipe,
            counting(show, "Counting tokens"),
            processes,
            gpu_memory * 1e9 if gpu_memory else gpu_bytes(),
        )
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        print_plan(result, account, terminal := Terminal(), full)
        if not result["problems"]:
            print_labelled(terminal, "next", next_command, wrap=False)
    return 2 if result["problems"] else 0


def plan_model(recipe: Recipe, next_command: str, *, processes: int, as_json: bool) -> int:
    """Print what is known of the recipe's model without its weights.
    Returns the exit code: 2 if it cannot be trained.

    processes: of the predicted optimizer states. next_command: printed last, unless the model
    cannot be trained.
    """
    inspection = _inspection(recipe, processes)
    from ..planning.inspection import ALWAYS, print_inspection

    is_refused = any(problem["when"] == ALWAYS for problem in inspection["problems"])
    if as_json:
        sys.stdout.write(json.dumps(inspection, indent=2) + "\n")
    else:
        print_inspection(inspection, terminal := Terminal())
        if not is_refused:
            print_labelled(terminal, "next", next_command, wrap=False)
    return 2 if is_refused else 0


def _inspection(recipe: Recipe, processes: int) -> dict[str, Any]:
    """The inspection of the recipe's model; see `inspect_model`."""
    from ..planning.offline import model_config, offline_without_hub

    if model_config(recipe.model.name_or_path) is None:
        refuse_unreachable(recipe)
    set_environment(recipe)
    console = stderr_console()
    with deferred(), console.status("Loading torch and transformers"):
        from ..planning.inspection import inspect_model
    with quiet_libraries(), console.status("Inspecting the model"), offline_without_hub():
        return inspect_model(recipe, processes)


def translate_rate(
    recipe: Recipe, start: "Convention", target: "Convention | None", *, as_json: bool
) -> None:
    """Print what the rate of `start` means for the matrices of the recipe's model, and elsewhere.

    Raises UserError if the model has no matrices.
    """
    from ..planning import rates

    matrices = _inspection(recipe, 1)["matrices"]
    if not matrices:
        name = recipe.model.name_or_path
        raise UserError(
            f"--model {name}: has no matrices for Muon; name a model with linear layers"
        )
    translation = rates.translate(matrices, start, target)
    if as_json:
        sys.stdout.write(json.dumps(translation, indent=2) + "\n")
    else:
        rates.print_translation(translation, Terminal())


def reshard(run: str) -> None:
    """Convert the last checkpoint of an unfinished run, so that any number of processes can resume
    from it.
    """
    folder = RunFolder(run)
    with folder.locked():
        record = folder.record()
        # A conversion is for an unfinished run: the model of a finished one needs none.
        if record["status"] != "training" or not folder.complete_checkpoints():
            raise UserError(
                f"{folder}: has no unfinished run with a complete checkpoint; name another run"
                " folder"
            )
        recipe, same = (
            load_resolved(folder.recipe),
            f"resume with --processes {record.get('processes')}",
        )
        if recipe.run.global_batch_size is None:
            raise UserError(
                f"{folder}: the recipe has no run.global_batch_size, so another number of processes"
                f" would change the number of examples per step; {same}"
            )
        refuse_ranks("reshard")
        if parallel(recipe.run.parallel).kind == "zero":
            # DeepSpeed converts Adam's moments alone, and these weights are neither.
            if recipe.optimizer.weight_decay_to == "start":
                raise UserError(
                    f"{folder}: optimizer.weight_decay_to: start, whose starting weights DeepSpeed"
                    f" converts to no other number of processes; {same}"
                )
            require("deepspeed", "run.parallel")
        set_environment(recipe)
        console = stderr_console()
        with console.status("Converting the last checkpoint"), _recording_errors(folder):
            from ..training.checkpoints import make_universal

            checkpoint = folder.complete_checkpoints()[-1]
            with quiet_libraries():
                make_universal(checkpoint)
            # Any number of processes may resume now; the earlier one stays in the record.
            if record.get("processes"):
                previous = [*record.get("previous_processes", []), record["processes"]]
                folder.update(processes=None, previous_processes=previous)
        print_labelled(
            console, "done", f"any number of processes can resume from {checkpoint}", wrap=False
        )


def merge(run: str) -> None:
    """Merge a run's adapter with its base model into RUN/merged."""
    folder = RunFolder(run)
    with folder.locked():
        if folder.record()["status"] not in ("trained", "finished") or not folder.model.is_dir():
            raise UserError(f"{folder}: {folder.why_no_model()}")
        if adapter_config(folder.model) is None:
            raise UserError(
                f"{folder}: trained no adapter, so there is nothing to merge; use the model in"
                f" {folder.model}"
            )
        refuse_unloadable(folder.model)
        refuse_ranks("merge")
        set_environment(load_resolved(folder.recipe))
        console = stderr_console()
        with console.status("Merging"), _recording_errors(folder):
            from ..publish.card import write_card
            from ..training import adapters

            with quiet_libraries():
                merged = adapters.merge(folder)
            write_card(folder, merged=True)
        print_labelled(console, "written", str(merged), wrap=False)
        quantized = recorded_quantization(folder.model)
        steps = [f"base dequantized from {quantized.quantize}"] if quantized else []
        steps += [
            "merged in float32",
            f"saved in {(read_json(merged / 'config.json') or {}).get('dtype')}",
        ]
        print_labelled(console, "", ", ".join(steps))


def spectrum(run: str, globs: list[str], *, as_json: bool) -> None:
    """Show the output of every map on the spectra of a run, without training."""
    folder = RunFolder(run)
    folder.record()
    with folder.locked(shared=True):
        set_environment(None)
        console = stderr_console()
        with console.status("Loading torch"):
            from ..run import spectra
        with quiet_libraries(), console.status("Reading the spectra") as status:
            source, momenta = spectra.spectra_of_run(folder, globs)
            maps, records = spectra.all_maps(), []
            for number, momentum in enumerate(momenta, 1):
                status.update(f"Mapping spectrum {number} of {len(momenta)}")
                records.append(spectra.measure(momentum, maps))
    if as_json:
        sys.stdout.write(json.dumps({"source": source, "spectra": records}, indent=2) + "\n")
    else:
        Terminal().print(spectra.summary(source, records), highlight=False)
