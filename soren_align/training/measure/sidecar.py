"""Benchmarks beside the training: another process scores each checkpoint, and nothing waits for it.

    benchmarks/checkpoint-200/model      the checkpoint's weights, as hard links, until they are scored
    benchmarks/checkpoint-200/eval       the results, as of `soren-align eval`
    benchmarks/checkpoint-200/log.txt    what that process printed

The scores go into the next log of metrics.jsonl, as `benchmark_step` and `benchmark/COLUMN`. One
process at a time, so that a slow benchmark queues checkpoints and not processes. Links, because
transformers deletes old checkpoints while they are still to be scored.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback

from ...core.files import read_json, remove
from ...core.text import count, print_labelled
from ...recipe import Benchmark, Eval
from ...run.folder import RunFolder, step_of

KEPT = {".safetensors", ".json", ".jinja", ".model", ".txt"}
"""Suffixes of a model's and a tokenizer's files; of a checkpoint, the states have others."""
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
RANK_VARIABLES += ("ACCELERATE_", "FSDP_")
"""Beginnings of the names by which a launcher makes a process one of several ranks."""


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
        """Queue what a run that was killed left without scores."""
        places = (self.folder.path / "benchmarks").glob("checkpoint-*/model")
        self.waiting = sorted((place.parent for place in places), key=step_of)
        for place in [place for place in self.waiting if step_of(place) > state.global_step]:
            self.waiting.remove(place)  # of steps that are repeated
            remove(place)

    def on_save(self, args, state, control, **kwargs):
        """Queue the checkpoint that was saved."""
        self._num_saved += 1
        if self._num_saved % self.section.every == 0:
            name = f"checkpoint-{state.global_step}"
            checkpoint, place = (
                self.folder.checkpoints / name,
                self.folder.path / "benchmarks" / name,
            )
            remove(place)
            (place / "model").mkdir(parents=True)
            for file in checkpoint.iterdir():
                if file.suffix in KEPT and file.name != "trainer_state.json":
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
                    env=_environment(),
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

    def finish(self) -> list[dict[str, float]]:
        """Wait for what is still to be scored after the last step; return the scores without a
        log.
        """
        try:
            while self.running or self.waiting:
                self.poll()
                if self.running:
                    num = count(len(self.waiting) + 1, "checkpoint")
                    text = f"waiting for the scores of {num} (Ctrl-C leaves them out)"
                    print_labelled(self.console, "benchmark", text)
                    self.running[1].wait()
        except KeyboardInterrupt:
            self.close()
        scores, self._scores = self._scores, []
        return scores

    def close(self) -> None:
        """End the process. The checkpoint stays, and is scored when the run resumes."""
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.running[1].pid, signal.SIGTERM)
            self.running[1].wait()
            self.running = None

    def _take(self, place: Path, exit_code: int) -> None:
        file = place / "eval" / "results.json"
        if exit_code or not file.is_file():
            text = f"no scores of step {step_of(place)}: the evaluation ended with exit code"
            text += f" {exit_code}; {place / 'log.txt'} has its reason, and the weights stay beside"
            print_labelled(self.console, "notice", f"{text}; the training continues")
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


def _environment() -> dict[str, Any]:
    return {key: value for key, value in os.environ.items() if not key.startswith(RANK_VARIABLES)}
