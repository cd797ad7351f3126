"""Benchmarks beside the training: another process scores each checkpoint, and nothing waits for it.

    benchmarks/checkpoint-200/
        model/     the checkpoint's weights, as hard links, until they are scored
        eval/      the results, as of `soren-align eval`
        log.txt    what that process printed

The scores go into the next log of metrics.jsonl, as `benchmark_step` and `benchmark/COLUMN`. One
process at a time, so that a slow benchmark queues checkpoints and not processes. Links, because
transformers deletes old checkpoints while they are still to be scored. What is still to be scored
or logged is read from these folders and metrics.jsonl: a kill loses nothing.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from transformers import TrainerCallback

from ...core.files import append, file_sha256, read_json, remove
from ...core.launchers import SRUN, without_ranks
from ...core.text import count, print_labelled
from ...recipe import Benchmark, Eval
from ...run.folder import RunFolder, metrics_line, read_metrics, step_of
from ...run.weights import FILES

RESULTS = Path("eval/results.json")
"""Of a checkpoint's folder; the file is written last."""


class Sidecar(TrainerCallback):
    """Starts the evaluations of `run.benchmark`, on the first rank alone; `values` has the scores
    that came since the last log.
    """

    def __init__(self, section: Benchmark, settings: Eval, folder: RunFolder, console: Console):
        self.section, self.settings, self.folder, self.console = section, settings, folder, console
        self.waiting: list[Path] = []
        self.running: tuple[Path, subprocess.Popen[bytes]] | None = None
        self._num_saved = 0
        self._scores: list[dict[str, float]] = []

    def on_train_begin(self, args, state, control, **kwargs):
        """Continue what a run that was killed has left; forget steps that are repeated."""
        for place in self._places():
            if step_of(place) > state.global_step:
                remove(place)
        self._restore()
        in_steps = args.save_strategy == "steps"
        self._num_saved = (
            state.global_step // state.save_steps if in_steps else round(state.epoch or 0)
        )

    def on_save(self, args, state, control, **kwargs):
        """Queue the checkpoint that was saved."""
        self._num_saved += 1
        if self._num_saved % self.section.every == 0:
            name = f"checkpoint-{state.global_step}"
            place = self.folder.path / "benchmarks" / name
            remove(place)
            (place / "model").mkdir(parents=True)
            for pattern in FILES:
                for file in (self.folder.checkpoints / name).glob(pattern):
                    if file.name != "trainer_state.json":
                        _link(file, place / "model" / file.name)
            self.waiting.append(place)
        self.poll()

    def on_step_end(self, args, state, control, **kwargs):
        """Look whether a process has ended: a system call of microseconds."""
        self.poll()

    def poll(self) -> None:
        """Take the scores of a process that has ended, and start the next one."""
        if self.running and self.running[1].poll() is not None:
            place, process = self.running
            self.running = None
            self._take(place, process.returncode)
        if self.waiting and not self.running:
            place = self.waiting.pop(0)
            with (place / "log.txt").open("wb") as log:
                # A group of its own: Ctrl-C is for the training, which then stops it in `close`.
                process = subprocess.Popen(
                    self.command(place),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(),  # of one process, also inside a job's step
                    start_new_session=True,
                )
            self.running = place, process

    def command(self, place: Path) -> list[str]:
        """Return the words of the evaluation of a place."""
        words = [*self.section.command, sys.executable, "-m", "soren_align", "eval"]
        words += [str(place / "model"), "--output", str(place / "eval"), "--processes", "1"]
        settings = self.settings.model_dump(exclude={"processes", "published", "base_template"})
        if self.section.limit is not None:
            settings["limit"] = self.section.limit
        for key, value in settings.items():
            option = f"--{key.replace('_', '-')}"
            for each in value if isinstance(value, list) else [value]:
                if each is True:
                    words.append(option)
                elif each not in (None, False):
                    words += [option, str(each)]
        return words

    def values(self) -> dict[str, float]:
        """Return the scores for the next log, of one checkpoint at a time."""
        return self._scores.pop(0) if self._scores else {}

    def finish(self) -> None:
        """Score what is left after the training, and append it to metrics.jsonl.

        Only once no other rank waits for this one: a benchmark may take longer than a collective.
        """
        self._restore()
        try:
            while self.running or self.waiting:
                self.poll()
                if self.running:
                    num = count(len(self.waiting) + 1, "checkpoint")
                    text = f"waiting for the scores of {num} (Ctrl-C leaves them out)"
                    print_labelled(self.console, "benchmark", text)
                    self.running[1].wait()
        except KeyboardInterrupt:
            pass
        finally:
            self.close()
        record = self.folder.record("training", "written")
        while scores := self.values():
            step = {"step": record["training"]["steps"]}
            append(self.folder.metrics, metrics_line(step | scores))
        written = record["written"] | {"metrics_sha256": file_sha256(self.folder.metrics)}
        self.folder.update(written=written)

    def close(self) -> None:
        """End the process. The checkpoint stays, and is scored later."""
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.running[1].pid, signal.SIGTERM)
            self.running[1].wait()
            self.running = None

    def _places(self) -> list[Path]:
        return sorted((self.folder.path / "benchmarks").glob("checkpoint-*"), key=step_of)

    def _restore(self) -> None:
        """Take scores that no log has, and queue what has none."""
        lines = read_metrics(self.folder.metrics)
        logged = {line["benchmark_step"] for line in lines if "benchmark_step" in line}
        for place in self._places():
            if step_of(place) in logged:
                continue
            if (place / RESULTS).is_file():
                self._take(place, 0)
            elif (place / "model").is_dir():
                self.waiting.append(place)

    def _take(self, place: Path, exit_code: int) -> None:
        file = place / RESULTS
        if exit_code or not file.is_file():
            text = f"no scores of step {step_of(place)}: the evaluation ended with exit code"
            text += f" {exit_code}; {place / 'log.txt'} has its reason, and the weights stay beside"
            print_labelled(self.console, "notice", f"{text}; the run continues")
            return
        row = read_json(file)["rows"][-1]["scores"]
        scores = {f"benchmark/{column}": float(score["value"]) for column, score in row.items()}
        self._scores.append({"benchmark_step": step_of(place)} | scores)
        remove(place / "model")


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without links
        shutil.copyfile(file, target)


def _environment() -> dict[str, str]:
    """Without srun's names too, from which `eval` would take itself for a rank of the training."""
    env = without_ranks(os.environ)
    return {name: value for name, value in env.items() if name not in SRUN.values()}
