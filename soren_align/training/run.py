"""Train one recipe to its model folder; a run can be resumed from any moment.

Training ends early on a signal (Ctrl-C, SIGTERM, SIGHUP), with a checkpoint to resume from, or when
evaluations improve no longer, by transformers' early stopping.
"""

import os
import pickle
import signal
import time
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback

from ..core import signals
from ..core.errors import DivergedError, UserError
from ..core.files import read_json, remove, rename_durably
from ..core.text import print_labelled, working
from ..recipe import Recipe, few_steps
from ..run.folder import COMPLETE_MARKER, RunFolder, checkpoints_in, read_metrics, step_of
from ..run.provenance import provenance
from ..run.record import divergence
from ..run.weights import trl_config_names
from ..sharding import is_universal
from ..sharding.ranks import Ranks
from ..tasks import TASKS
from . import build, checkpoints
from .checkpoints import PICKLE_REFUSED, STREAM_FILE, write_errors
from .lost_updates import LostUpdatesPolicy, change_after_saving
from .measure.held_out import HeldOutRecorder
from .measure.progress import LogsOfShortRuns, TrainingProgress
from .measure.retention import Retention, read_probes
from .measure.samples import SampleWriter
from .measure.sidecar import Sidecar
from .reference import precision, refuse_other_inputs, run_identity
from .report import report_first_step, report_result, report_setup
from .setup import TrainingSetup
from .trained_optimizer import relative_changes


@dataclass(frozen=True)
class Observers:
    """The callbacks of a run; those that the recipe does not ask for are None."""

    stop: "StopOnSignal"
    progress: TrainingProgress
    early: "EarlyStopping | None" = None
    samples: SampleWriter | None = None
    retention: Retention | None = None
    held_out: HeldOutRecorder | None = None
    sidecar: Sidecar | None = None


def train(
    setup: TrainingSetup, folder: RunFolder, console: Console, ranks: Ranks = Ranks()
) -> bool:
    """Train to `folder.model`, from the last checkpoint if there is one. Collective.

    Returns False if a signal came, after saving a checkpoint, or the model if it was the last step.
    Only the first rank writes and prints.
    """
    # Prepare: the checkpoint is verified by content before any weight of it is read.
    with working(console, "Loading the model, tokenizing the examples"):
        policy = LostUpdatesPolicy(
            setup.recipe.run.lost_updates, partial(report_first_step, folder, console, ranks)
        )
        refuse_other_inputs(setup, ranks)
        trainer: Any = build.build_trainer(setup, folder, ranks, policy)
        checkpoint = None
        with ranks.shared_errors():
            if ranks.is_first:
                checkpoint = _find_checkpoint(setup.recipe, folder, trainer.origin, console)
        # One choice for all: on a network file system ranks may see different folders.
        checkpoint = ranks.broadcast(checkpoint)
        if checkpoint:
            checkpoints.verify(checkpoint, ranks)
    # A universal checkpoint has whole tensors, which DeepSpeed cuts for the present ranks only if
    # its config asks for that.
    resumed_from = step_of(checkpoint) if checkpoint else 0
    if checkpoint and is_universal(checkpoint):
        trainer.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {
            "load_universal": True
        }
    # Observe: what is measured changes no weight and draws no random number of the training.
    observers = _observe(trainer, setup, folder, console, ranks)
    # Another command may hold the folder now: nothing is written into it.
    trainer.sealer.check = partial(refuse_lost_lock, folder, ranks)
    trainer.saves_models_beside_shards = setup.recipe.run.benchmark is not None
    trainer.sealer.is_async = setup.recipe.run.async_save and trainer.is_fsdp_enabled

    # Report before the first step: a run that fails or is killed shows what it was.
    identity = run_identity(setup, trainer, ranks)
    if ranks.is_first:
        source = observers.retention and observers.retention.probes.source
        report_setup(folder, console, setup, trainer, ranks, identity, source)
        _report_resume(folder, console, checkpoint)

    # Train.
    beside = closing(observers.sidecar) if observers.sidecar else nullcontext()
    with beside, closing(observers.progress), closing(observers.stop):
        seconds = round(_run_loop(trainer, checkpoint), 1)
    stopped, state = observers.stop.stopped, trainer.state
    finished = not stopped or state.global_step >= state.max_steps
    refuse_lost_lock(folder, ranks)

    # Measure and save. A run that a signal stopped before its last step has a checkpoint alone.
    result: dict[str, Any] = {"seconds_since_start_or_resume": seconds}
    result |= relative_changes(trainer.starting_weights, trainer.attached)
    if finished:
        result |= _measure_end(trainer, setup.recipe, observers)
        _save_model(trainer, setup.tokenizer, folder, ranks)
        result["change_after_saving"] = change_after_saving(
            trainer.starting_weights, trainer.attached, trainer.exporter.dtype
        )
    identity |= {"precision": precision(trainer), **trainer.batch_hash.record()}
    if ranks.is_first:
        folder.update(optimizer=trainer.optimizer_check.record)
        if finished:
            folder.update(identity=identity)
            if "best_model" not in result and (reason := divergence(read_metrics(folder.metrics))):
                result["diverged"] = reason
            report_result(folder, console, setup.recipe, trainer, result, resumed_from)
            # After the status is written: until then a rerun resumes, and needs these logits.
            remove(folder.start_logits)
        if stopped:
            saved = "model" if finished else "checkpoint"
            where = f"at step {state.global_step}, {saved} saved"
            print_labelled(console, "stopped", f"{where}; rerun the same command to resume")
    return not stopped


def _observe(
    trainer: Any, setup: TrainingSetup, folder: RunFolder, console: Console, ranks: Ranks
) -> Observers:
    """Add the recipe's callbacks to the trainer, and return them. Collective."""
    recipe, run = setup.recipe, setup.recipe.run
    with ranks.main_process_first():  # the others read the retention examples that it caches
        probes = read_probes(recipe, setup.tokens.eval, setup.tokenizer)
    observers = Observers(
        StopOnSignal(ranks),
        TrainingProgress(
            console, recipe.task, partial(few_steps, recipe, num_ranks=ranks.num_ranks)
        ),
        early=run.early_stopping
        and EarlyStopping(run.early_stopping.patience, run.early_stopping.threshold),
        samples=run.samples
        and SampleWriter(setup.prompts, setup.tokenizer, folder.samples, console, ranks),
        retention=probes and Retention(trainer, probes, folder, ranks),
        sidecar=run.benchmark
        and recipe.eval
        and (Sidecar(run.benchmark, recipe.eval, folder, console) if ranks.is_first else None),
    )
    if recipe.data.eval_part == "verdict" and trainer.eval_dataset:
        metrics = tuple(TASKS[recipe.task].higher_is_better)
        recorder = HeldOutRecorder(trainer, metrics, folder, ranks)
        observers = replace(observers, held_out=recorder)
    trainer.evaluated_with = [observers.retention] if observers.retention else []
    trainer.logged_with = [observers.sidecar] if observers.sidecar else []
    # The order counts: early stopping decides before a short run asks for its last log.
    callbacks = (
        observers.stop,
        observers.early,
        LogsOfShortRuns(),
        observers.progress if ranks.is_first else None,
        observers.samples,
        observers.retention,
        observers.held_out,
        observers.sidecar,
    )
    trainer.remove_callback(PrinterCallback)
    for callback in callbacks:
        if callback is not None:
            trainer.add_callback(callback)
    return observers


def _report_resume(folder: RunFolder, console: Console, checkpoint: Path | None) -> None:
    """Remove the measurements that a resumed run repeats, and record the resume."""
    step = step_of(checkpoint) if checkpoint else 0
    logged = read_json(checkpoint / "trainer_state.json")["log_history"] if checkpoint else ()
    for notice in folder.drop_measurements_after(step, logged):
        print_labelled(console, "notice", notice)
    if checkpoint:
        print_labelled(console, "resume", f"from step {step}")
        record, now = folder.record(), provenance()["versions"]
        if changes := [
            f"{name} {record['versions'].get(name)} -> {version}"
            for name, version in now.items()
            if version != record["versions"].get(name)
        ]:
            text = f"other versions than before ({', '.join(changes)}): bits may differ"
            print_labelled(console, "notice", f"{text} from those of an uninterrupted run")
            earlier = record.get("versions_before", [])
            folder.update(versions=now, versions_before=[*earlier, record["versions"]])
        folder.update(resumed_from_steps=[*record.get("resumed_from_steps", []), step])


def _measure_end(trainer: Any, recipe: Recipe, observers: Observers) -> dict[str, Any]:
    """Return what a finished training adds to run.json, and measure the model that is saved.
    Collective.
    """
    args, state, early = trainer.args, trainer.state, observers.early
    result: dict[str, Any] = {}
    if early and early.has_stopped:
        result["stopped_early"] = {
            "max_steps": state.max_steps,
            "patience": early.early_stopping_patience,
            "threshold": early.early_stopping_threshold,
            "best": best_evaluation(args, state),
        }
    if args.load_best_model_at_end and state.best_model_checkpoint is not None:
        result["best_model"] = best_evaluation(args, state)
    with trl_config_names(trainer.model):
        if recipe.task == "pretrain" and trainer.eval_dataset is not None:
            result["validation"] = trainer.validation()
        if observers.held_out:
            observers.held_out.record("end")
        samples = observers.samples
        if samples and ("best_model" in result or samples.last_step != state.global_step):
            # The mark: a run that is killed later repeats the end, and these lines.
            samples.sample(trainer.model, state.global_step, at="end")
    return result


def _run_loop(trainer: Any, checkpoint: Path | None) -> float:
    """Run transformers' training loop, which calls `optimizer.step()`; return the seconds that it
    took.
    """
    started = time.monotonic()
    # A resumed run has evaluated the start already.
    trainer.args.eval_on_start &= checkpoint is None
    if checkpoint and trainer.stream is not None:
        num_passed_over = trainer.num_sequences(step_of(checkpoint))
        trainer.stream.resume(read_json(checkpoint / STREAM_FILE), num_passed_over)
    try:
        with trl_config_names(trainer.model):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except FloatingPointError as error:
        raise DivergedError(f"step {trainer.state.global_step + 1}: {error}") from error
    except pickle.UnpicklingError as error:
        raise UserError(f"{checkpoint}: {PICKLE_REFUSED}") from error
    return time.monotonic() - started


def _find_checkpoint(
    recipe: Recipe, folder: RunFolder, origin: dict[str, Any], console: Console
) -> Path | None:
    """Return the checkpoint to resume from, or None; incomplete ones are removed.

    Raises UserError if the newest complete one cannot be used: an older one, or none, is never
    chosen silently.
    """
    checkpoint = None
    if recipe.run.resume not in ("auto", "never"):
        checkpoint = Path(recipe.run.resume).expanduser()
    else:
        # The newest complete one. An older one is never chosen silently: the run would repeat steps
        # without a word.
        for candidate in reversed(checkpoints_in(folder.checkpoints)):
            if (candidate / COMPLETE_MARKER).is_file():
                checkpoint = candidate
                break
            remove(candidate)  # the process was killed while writing it
            print_labelled(console, "notice", f"{candidate.name} is incomplete and was removed")
    if checkpoint:
        checkpoints.check(checkpoint, origin)
    return checkpoint


def _save_model(trainer: Any, tokenizer: Any, folder: RunFolder, ranks: Ranks) -> None:
    """Write the model folder, completely or not at all. Collective: a sharded model is gathered."""
    partial_folder = folder.model.with_name("model.part")
    # Under another name until it is complete: a model folder that exists is a whole model.
    if ranks.is_first:
        remove(partial_folder)
    with write_errors(partial_folder):
        trainer.save_model(str(partial_folder))
        if not ranks.is_first:
            return
        tokenizer.save_pretrained(partial_folder)
        remove(folder.model)  # of a process that was killed before it updated run.json
        rename_durably(partial_folder, folder.model)


class EarlyStopping(EarlyStoppingCallback):
    """Ends training after `patience` evaluations in a row that improve `metric_for_best_model` by
    `threshold` or less.

    transformers writes the count into checkpoints and reads it only with
    restore_callback_states_from_checkpoint, which would restore a flag to stop, too.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        """Restore the count of the checkpoint; stop at once if it was reached before."""
        # Set here, as transformers' loop resets the flag to stop before this call.
        saved = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(saved, dict):
            self.early_stopping_patience_counter = saved["attributes"][
                "early_stopping_patience_counter"
            ]
        control.should_training_stop = self.has_stopped

    @property
    def has_stopped(self) -> bool:
        """Whether training was ended here."""
        return self.early_stopping_patience_counter >= self.early_stopping_patience


def best_evaluation(args: Any, state: Any) -> dict[str, Any]:
    """Return {"metric", "value", "step"} of the best evaluation of a training."""
    metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    steps = (log["step"] for log in state.log_history if log.get(metric) == state.best_metric)
    return {"metric": metric, "value": state.best_metric, "step": next(steps, None)}


class StopOnSignal(TrainerCallback):
    """Saves and stops after the step of a first signal; on a second Ctrl-C, raises
    KeyboardInterrupt at once.

    A second SIGTERM or SIGHUP has no effect: Slurm sends two when it pre-empts a job, and so does a
    closed terminal. A signal to one of several ranks stops all of them at the same step: they
    exchange a flag after every step.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.received: set[int] = set()
        self.stopped = False
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        """Install the handlers of signals."""
        # A signal that came while the model was loading counts too: its exception may have been
        # lost (`core.signals`).
        self.received |= signals.received.keys()
        self._before = {
            number: signal.signal(number, self._handle) for number in signals.stop_signals()
        }

    def _handle(self, number, frame):
        # A second Ctrl-C: who presses it twice does not want to wait for the step.
        if number == signal.SIGINT and number in self.received:
            self.close()
            raise KeyboardInterrupt
        self.received.add(number)
        if number == signal.SIGINT and self.ranks.is_first:
            # The terminal may be closed. os.write, since Python's files are not reentrant.
            with suppress(OSError):
                text = "stopping  after this step; Ctrl-C again stops at once, without a checkpoint"
                os.write(2, f"\n{text}\n".encode())

    def on_step_end(self, args, state, control, **kwargs):
        """Save and stop between two steps if any rank received a signal. Collective."""
        # All ranks at the same step: a rank that stopped alone would leave the others in a
        # collective.
        if self.ranks.any(bool(self.received)):
            self.stopped = True
            control.should_save = True
            control.should_training_stop = True

    def close(self) -> None:
        """Restore the previous handlers, also after an error."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def refuse_lost_lock(folder: RunFolder, ranks: Ranks) -> None:
    """Raise LockedError on all ranks if the first one does not hold the run folder any more.
    Collective.
    """
    with ranks.shared_errors():
        if ranks.is_first:
            folder.refuse_lost_lock()
