"""`soren-align compare`: start the runs of a study, several at a time, until all have ended.

Every run is an ordinary run folder, trained in a process of its own. Its lock is the claim: several
commands, on one machine or on several with a shared file system, share a study without a
coordinator. What has ended is read from the folders, so that a command that was killed at any
moment is continued by the same command.
"""

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.prompt import Confirm
from rich.text import Text

from ..core.errors import (
    MAX_CHARACTERS,
    NoMemoryError,
    ResumableError,
    UserError,
    free_bytes,
    printable,
)
from ..core.files import local_path, remove
from ..core.signals import killed_by, stop_signals
from ..core.text import Table, Terminal, estimated_time, number, print_labelled, stderr_console
from ..launch.environment import set_environment, visible_gpus
from ..run import lock
from ..run.folder import LOCK, RunFolder
from ..run.provenance import DECLARATION, DIGITS, read_declaration
from .audit import conclude
from .config import StudyFile, missing_extras_of_runs, recipe_of_run
from .report.page import REPORT, terminal_verdict
from .run_processes import LOCKED, RESUMABLE, SERVER_LOST, start_run, start_server
from .runs import STAGES, select
from .search import STUDY_FILE, Progress, create
from .study import ENDED, Run, mean_metric

POLL_SECONDS = 2.0
"""Between two looks at runs of other commands."""
STAGE_NAMES = {"search": "search", "verdict": "final runs"}
LOCK_SECONDS = 60.0
"""How long another command may hold the study's lock: it draws trials within a second."""


def compare(
    study: StudyFile, *, jobs: int | None = None, processes: int = 1, yes: bool = False
) -> int:
    """Run a study, or continue it, and print its verdict.
    Returns the exit code: 0, or 130 if a signal stopped it.

    jobs: runs at a time; None: the study's, else one per GPU, else 1. processes: of a run. yes: try
    values beyond the ends of spaces at which selected ones lie, without asking. Raises
    ResumableError if the machine stopped a run: the study is not concluded, and the same command
    continues it.
    """
    if problems := missing_extras_of_runs(study):
        raise UserError(*problems)
    folder, console = local_path(study.output_dir), stderr_console()
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    # Another command may create the folder at the same time.
    is_new = all(name.startswith((LOCK, STUDY_FILE)) for name in names)
    if not is_new and not (folder / STUDY_FILE).is_file():
        raise UserError(
            f"{folder}: is neither empty nor a study's folder; choose another output_dir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder):
        create(folder, study)
        progress = Progress(folder)
        digits = read_declaration(folder)["sha256"][:DIGITS]
        print_labelled(console, "declared", f"{digits}, in {folder / DECLARATION}")

    # The whole search comes first: final runs of a setting at the end of its space would be
    # trained for nothing if the search is extended after them.
    runner = _Runner(progress, console, jobs, processes)
    code = runner.run(STAGES[:1])
    while code == 0 and _extended(progress, console, yes=yes):
        code = runner.run(STAGES[:1])
    code = code or runner.run(STAGES)
    if code == 0:
        _conclude(folder, progress.failures)
    return code


def _extended(progress: Progress, console: Terminal, *, yes: bool) -> bool:
    """Extend the search where selected values lie at ends of their spaces, if the user agrees;
    returns whether it was.

    There is no question without a terminal, or once final runs have been started.
    """
    with _exclusive(progress.folder):
        runs = progress.update()
        extension = progress.extension(runs)
        if extension is None:
            return False
        for name, spaces in extension.spaces.items():
            at_edge = progress.candidate(name, [r for r in runs if r.stage == "search"]).at_edge
            for key, values in spaces.items():
                where = "at an end of" if key in at_edge else "within"
                text = f"{name}: the selected {key} lies {where} its space; further trials would"
                text += f" have {values['low']:.3g} to {values['high']:.3g}"
                print_labelled(console, "edge", text)
        if yes:
            progress.extend(extension)
            print_labelled(console, "extend", f"{extension.trials} more trials of each candidate")
            return True
    has_final_runs = any(run.stage == "verdict" and run.status != "waiting" for run in runs)
    if has_final_runs or not (console.is_terminal and sys.stdin.isatty()):
        print_labelled(console, "", "rerun with --yes to try them")
        return False
    # Not within the lock: other commands, and the runs on other machines, would wait for an answer.
    question = f"Add {extension.trials} trials of each candidate before the final runs?"
    if not Confirm.ask(question, console=console, default=True):
        return False
    with _exclusive(progress.folder):
        progress.update()
        if (extension := progress.extension(progress.update())) is not None:
            progress.extend(extension)
    return True


def report(study: StudyFile) -> None:
    """Conclude a study from the runs that have ended.
    Raises UserError if it has not been started.
    """
    folder = local_path(study.output_dir)
    if not (folder / STUDY_FILE).is_file():
        raise UserError(
            f"{folder}: is no study's folder; run soren-align compare without --report first"
        )
    _conclude(folder)


def _conclude(folder: Path, failures: Mapping[str, str] | None = None) -> None:
    with _exclusive(folder):  # other commands conclude at the same time
        study = conclude(folder, failures)
    console, page = Terminal(), folder / REPORT
    console.print(terminal_verdict(study), highlight=False)
    console.print()
    print_labelled(console, "report", str(page), wrap=False, link=page.resolve().as_uri())


@dataclass(frozen=True)
class _Obstacle:
    """What the machine stopped a run by."""

    text: str
    kind: str
    """The kind of error, as in core/errors.py, or "killed"."""


@dataclass
class _Runner:
    """The processes of this command's runs."""

    progress: Progress
    console: Terminal
    jobs: int | None
    processes: int
    active: dict[BaseProcess, tuple[Run, int]] = field(default_factory=dict)
    """The run and the number of its slot, by process."""
    ended: set[str] = field(default_factory=set)
    """Folders of runs whose end was printed, unless it came before this command."""
    is_stopping: bool = False
    killed: set[str] = field(default_factory=set)
    """Folders of runs that a signal, not ours, ended once. They are repeated once."""
    obstacle: _Obstacle | None = None
    """No other run is started after it, since a full disk would stop them all."""

    def run(self, stages: Sequence[str]) -> int:
        """Start runs until all of these stages have ended.
        Returns the exit code. Raises ResumableError if the machine stopped one.
        """
        is_first = not self.ended
        runs, ended = self._update()
        if ended and is_first:
            text = f"{len(ended)} of {self._total(runs)} runs have ended already"
            print_labelled(self.console, "resume", text)
        pending = self._pending(runs, stages)
        if not pending:
            return 0
        for run in runs:  # those with another number of processes could not be compared
            before = (RunFolder(self.progress.folder / run.folder).read() or {}).get("processes")
            if before not in (None, self.processes):
                raise UserError(
                    f"{self.progress.folder}: the study's runs have {before} "
                    f"process{'es' * (before > 1)} each, not {self.processes}; rerun with "
                    f"--processes {before}"
                )

        # Prepare the processes: a slot is a place for one run, with GPUs of its own.
        recipe = recipe_of_run(self.progress.study, pending[0])
        gpus = [] if recipe.trainer.get("use_cpu") else visible_gpus()
        set_environment(recipe, num_gpus=max(1, len(gpus)))
        context = start_server(on_gpus=bool(gpus))
        slots = self.jobs or self.progress.study.jobs or max(1, len(gpus) // self.processes)
        started, first = time.monotonic(), len(self.ended)
        with (
            ExitStack() as stack,
            Live(console=self.console, transient=True, refresh_per_second=2) as live,
        ):
            for signum in stop_signals():
                stack.callback(signal.signal, signum, signal.signal(signum, self._stop))
            stack.callback(self._stop_all)

            # Fill the slots, wait for an end, read what has ended. The folders are the only state:
            # runs of other commands, which hold their locks, are waited for and read alike.
            while pending or self.active:
                for run in pending if not (self.is_stopping or self.obstacle) else []:
                    folder = RunFolder(self.progress.folder / run.folder)
                    if len(self.active) < slots and not folder.is_in_use():
                        self._start(run, context, gpus, slots)
                if self.is_stopping and not self.active:
                    print_labelled(self.console, "stopped", "rerun the same command to continue")
                    return 130
                if self.obstacle and not self.active:
                    raise self._stopped(runs, self.obstacle, slots)
                done = len(self.ended)
                per_run = (time.monotonic() - started) / (done - first) if done > first else None
                live.update(self._state(runs, per_run))
                wait([process.sentinel for process in self.active], timeout=POLL_SECONDS)
                self._reap()
                runs, ended = self._update()
                self._print_ended(runs, ended)
                own = {run.folder for run, _ in self.active.values()}
                pending = [each for each in self._pending(runs, stages) if each.folder not in own]
        return 0

    @staticmethod
    def _pending(runs: list[Run], stages: Sequence[str]) -> list[Run]:
        return [run for run in runs if run.status not in ENDED and run.stage in stages]

    def _print_ended(self, runs: list[Run], ended: list[Run]) -> None:
        first = len(self.ended) - len(ended) + 1
        for count, run in enumerate([] if self.is_stopping else ended, first):
            text = describe_run(run, self.progress.study)
            if not self.console.is_terminal:  # there, the bar has these numbers
                text += f" ({count} of {self._total(runs)} runs)"
            print_labelled(self.console, run.candidate, text)

    def _stopped(self, runs: list[Run], obstacle: _Obstacle, slots: int) -> ResumableError:
        """Return the error that ends the command after the machine stopped a run."""
        done = sum(run.status in ENDED for run in runs)
        is_crowded = obstacle.kind == NoMemoryError.kind and slots > 1
        fewer = ", with fewer runs at a time (--jobs)" if is_crowded else ""
        return ResumableError(
            f"{self.progress.folder}: the study stopped, and no result is lost ({done} of "
            f"{self._total(runs)} runs have ended): {obstacle.text}. To resume the other runs, "
            f"rerun the same command{fewer}"
        )

    def _total(self, runs: list[Run]) -> int:
        return sum(self.progress.num_runs(runs).values())

    def _state(self, runs: list[Run], seconds_per_run: float | None) -> Group:
        """Return what a terminal shows meanwhile: the ended runs of all, a bar, the time left, and
        the best so far.

        seconds_per_run: of this command until now; None before a run has ended.
        """
        study, totals = self.progress.study, self.progress.num_runs(runs)
        ended = {
            stage: sum(run.stage == stage and run.status in ENDED for run in runs)
            for stage in totals
        }
        done, total = sum(ended.values()), sum(totals.values())
        parts = [f"{name} {ended[stage]}/{totals[stage]}" for stage, name in STAGE_NAMES.items()]
        if seconds_per_run is not None:
            parts.append(f"about {estimated_time(seconds_per_run * (total - done) / 3600)} left")
        rows = []
        for name in study.candidates:
            trials = [run for run in runs if run.candidate == name and run.stage == "search"]
            best = select(trials, higher_is_better=self.progress.higher_is_better)
            chosen = [run for run in trials if run.number == best]
            values = [chosen[0].parameters[key] for key in study.free(name)] if chosen else []
            rows.append(
                [name, ", ".join(map(_short, values)) or "-", number(mean_metric(chosen), ".3g")]
            )
        keys = dict.fromkeys(
            key.removeprefix("optimizer.") for name in study.candidates for key in study.free(name)
        )
        table = Table(["best so far", ", ".join(keys), study.search.metric], rows)
        own = ", ".join(run.folder for run, _ in self.active.values())
        running = Text(
            f"running: {own or 'runs of other commands'}",
            style="dim",
            overflow="ellipsis",
            no_wrap=True,
        )
        return Group(
            Text(" · ".join(parts)), Padding(ProgressBar(total, done), 0), table.rich(), running
        )

    def _update(self) -> tuple[list[Run], list[Run]]:
        """Return all runs, and those that have ended since the last call."""
        with _exclusive(self.progress.folder):
            runs = self.progress.update()
            if ended := [
                run for run in runs if run.status in ENDED and run.folder not in self.ended
            ]:
                self.ended |= {run.folder for run in ended}
            if not self.progress.study.search.keep_models:
                for run in (
                    run
                    for run in runs
                    if run.stage == "search" and run.status in ("finished", "diverged")
                ):
                    folder = RunFolder(self.progress.folder / run.folder)
                    paths = [
                        path
                        for path in (folder.model, folder.checkpoints, folder.start)
                        if path.exists()
                    ]
                    # a process may still hold it
                    for path in paths if paths and not folder.is_in_use() else ():
                        remove(path)
        return runs, ended

    def _start(self, run: Run, context: BaseContext, gpus: list[str], slots: int) -> None:
        taken = {slot for _, slot in self.active.values()}
        slot = next(number for number in range(slots) if number not in taken)
        size = self.processes
        own = [gpus[(slot * size + i) % len(gpus)] for i in range(size)] if gpus else []
        path = self.progress.folder / run.folder
        _move_another_setting(run, self.progress, path)
        recipe = recipe_of_run(self.progress.study, run)
        recipe = recipe.model_copy(
            update={"run": recipe.run.model_copy(update={"output_dir": str(path)})}
        )
        self.active[start_run(context, recipe, path.with_name(f"{path.name}.log"), size, own)] = (
            run,
            slot,
        )

    def _reap(self) -> None:
        """Take the processes that have ended out of `active`, and note why a run ended without a
        result.
        """
        for process in [each for each in self.active if each.exitcode is not None]:
            run, _ = self.active.pop(process)
            code = process.exitcode or 0
            process.join()
            # The machine's fault, such as a full disk: every other run would meet it too.
            if code == RESUMABLE:
                self._stop_starting(run, *self._reason(run))
            elif (code < 0 or code in (130, SERVER_LOST)) and not self.is_stopping:
                # Repeated once; at the second time, no other is started either.
                causes = {
                    130: "stopped by a signal",
                    SERVER_LOST: "the process that started it was killed",
                }
                cause = causes.get(code) or killed_by(-code)
                if run.folder in self.killed:
                    remedy = f"read {run.folder}.log, and start fewer runs at a time (--jobs)"
                    self._stop_starting(run, f"{cause}, for the second time; {remedy}", "killed")
                else:
                    self.killed.add(run.folder)
                    text = f"{run.folder}: {cause}; the run is repeated from its last checkpoint"
                    print_labelled(self.console, "notice", text)
            # LOCKED is a run of another command, whose result is read from its folder.
            elif code not in (0, 130, LOCKED) and code > 0:
                self.progress.failures[run.folder] = (
                    f"ended with exit code {code}; read {run.folder}.log"
                )

    def _stop_starting(self, run: Run, reason: str, kind: str) -> None:
        is_first = self.obstacle is None
        self.obstacle = self.obstacle or _Obstacle(f"{run.folder}: {reason}", kind)
        if self.active:
            number = f"{len(self.active)} active run{'s' * (len(self.active) > 1)}"
            cause = (
                f"no other run starts. {run.folder}: {reason}"
                if is_first
                else f"{run.folder} stopped too"
            )
            print_labelled(self.console, "waiting", f"for {number}; {cause}")

    def _reason(self, run: Run) -> tuple[str, str]:
        """Return why the machine stopped a run, as its run.json or the end of its log states, and
        the kind of the failure.
        """
        folder = self.progress.folder / run.folder
        with suppress(UserError):
            record = RunFolder(folder).read() or {}
            if record.get("resumable") and record.get("last_error"):
                return record["last_error"], record.get("failure", ResumableError.kind)
        free = f"{free_bytes(folder):,} bytes"
        with suppress(OSError):
            log = folder.with_name(f"{folder.name}.log")
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            text = lines[-1] if lines else f"{free} are free on its disk"
            return printable(text, MAX_CHARACTERS), ResumableError.kind
        return (
            f"the log of this run cannot be written, with {free} free on its disk; free space",
            ResumableError.kind,
        )

    def _stop(self, *_: object) -> None:
        """Stop the runs as a run is stopped: with a checkpoint; at the second signal, at once."""
        self.is_stopping = True
        self._stop_all()

    def _stop_all(self) -> None:
        for process in self.active:
            process.terminate()


def describe_run(run: Run, study: StudyFile) -> str:
    """Describe a run that has ended: "trial 3 of 6, lr 0.0052: eval_loss 0.2312, 41 s"."""
    of_all = f" of {study.search.trials}" if run.number < study.search.trials else ", added"
    trials = f"trial {run.number + 1}{of_all}" if run.stage == "search" else f"seed {run.seed}"
    if run.stage == "search" and len(study.search.seeds) > 1:
        trials += f", seed {run.seed}"
    free = study.free(run.candidate)
    values = [f"{key.removeprefix('optimizer.')} {_short(run.parameters[key])}" for key in free]
    text = ", ".join([trials, *values])
    if run.status != "finished":
        return f"{text}: {run.status}: {run.reason}"
    seconds = f", {run.seconds:.0f} s" if run.seconds else ""
    scores = "".join(f", {column} {score:.1f}" for column, score in (run.scores or {}).items())
    return f"{text}: {study.search.metric} {_short(run.metric)}{scores}{seconds}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _move_another_setting(run: Run, progress: Progress, path: Path) -> None:
    """Move a verdict's run of a setting that was selected before an extension to earlier/ in the
    study's folder.

    Beside the verdict's runs it would be one that the study does not list.
    """
    if run.stage == "verdict" and not progress.is_own(run, RunFolder(path)):
        earlier = path.parents[2] / "earlier" / path.parent.name
        earlier.mkdir(parents=True, exist_ok=True)
        path.rename(
            next(to for n in range(1, 1000) if not (to := earlier / f"{path.name}-{n}").exists())
        )


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the study's lock within the block."""
    file, end = folder / LOCK, time.monotonic() + LOCK_SECONDS
    while True:
        try:
            lock.acquire(file)
            break
        except lock.LockedError:
            if time.monotonic() > end:
                raise UserError(
                    f"{folder}: another command has held {LOCK} for {LOCK_SECONDS:.0f} s; rerun"
                    " after that command"
                ) from None
            time.sleep(0.05)
    try:
        yield
    finally:
        lock.release(file)
