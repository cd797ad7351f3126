"""Show the progress of training: a line that changes in a terminal, lines at intervals
elsewhere.
"""

import math
import resource
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from rich.console import Console
from rich.status import Status
from rich.text import Text
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from ...core.text import LINE_SECONDS, print_labelled, with_prefix
from ...run.curves import Curve, braille
from ...tasks import TASKS

CHART_LINES = 5


class TrainingProgress(TrainerCallback):
    """Shows steps, measurements and the time left, in place of transformers' bars and printed
    dictionaries; on a terminal also the loss until now, as a curve.

    Every evaluation is a line of its own, on a terminal too. notice_of: the notice about a number
    of steps, if any.
    """

    def __init__(
        self,
        console: Console,
        task: str,
        notice_of: Callable[[int], str | None] = lambda num_steps: None,
    ):
        self.console, self.task, self.notice_of = console, task, notice_of
        self.status: Status | None = None
        self._logs: dict[str, float] = {}
        self._loss, self._chart = Curve(), ""
        self._start = self._last_line = 0.0
        self._first_step = self._num_batches = 0

    def on_train_begin(self, args, state, control, **kwargs):
        """Print the notice about the number of steps."""
        if notice := self.notice_of(state.max_steps):
            print_labelled(self.console, "notice", notice)
        if self.console.is_terminal:
            self.status = self.console.status(self.task)
            self.status.start()
        self._first_step = state.global_step
        self._start = self._last_line = time.monotonic()

    def on_step_begin(self, args, state, control, **kwargs):
        """Show the steps until now, with the last measurements: those of a step come after it."""
        # The speed since this start: a resumed run may be on another machine.
        num_steps = state.global_step - self._first_step
        if not num_steps:
            return
        seconds = (time.monotonic() - self._start) / num_steps
        left = timedelta(seconds=round(seconds * (state.max_steps - state.global_step)))
        facts = [f"step {state.global_step}/{state.max_steps}", *self._values(self._logs, "")]
        if "tokens_per_second" in self._logs:
            facts.append(f"{self._logs['tokens_per_second']:,.0f} tokens/s")
        if self._logs.get("padding"):
            facts.append(f"padding {self._logs['padding']:.0%}")
        facts += [f"peak {with_prefix(peak_memory(), 'B')}", f"{left} left"]
        self._show(self.task, ", ".join(facts) + self._chart)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Note the measurements; print those of an evaluation."""
        logs, step = logs or {}, f"step {state.global_step}: "
        if "loss" in logs:
            self._logs = logs
            self._draw(state.global_step, logs["loss"])
        if "eval_loss" in logs:
            print_labelled(self.console, "eval", step + ", ".join(self._values(logs, "eval_")))

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Show the batch of the evaluation."""
        self._num_batches += 1
        text = f"step {state.global_step}, batch {self._num_batches}"
        if eval_dataloader is not None and has_length(eval_dataloader):
            text += f" of {len(eval_dataloader)}"
        self._show("eval", text)

    def on_evaluate(self, args, state, control, **kwargs):
        """Count the batches of the next evaluation anew."""
        self._num_batches = 0

    def close(self) -> None:
        """Remove the line, which hides the cursor, also after an error."""
        if self.status:
            self.status.stop()
            self.status = None

    def _values(self, logs: dict[str, float], prefix: str) -> list[str]:
        return [
            text.format(logs[prefix + key])
            for key, text in TASKS[self.task].shown.items()
            if prefix + key in logs
        ]

    def _draw(self, step: int, loss: float) -> None:
        # At logs, not at steps, of which a tiny model takes a hundred a second.
        if self.status and math.isfinite(loss):
            self._loss.add(step, loss)
            if len(self._loss.points) > 1:
                width = min(self.console.width, 100) - 2  # beside the spinner
                self._chart = "\n".join(["", *braille(self._loss.points, width, CHART_LINES)])

    def _show(self, label: str, text: str) -> None:
        # A log file gets a line at intervals: a line per step would be thousands.
        now = time.monotonic()
        if self.status:
            self.status.update(Text(f"{label} {text}"))
        elif now - self._last_line > LINE_SECONDS:
            self._last_line = now
            print_labelled(self.console, label, text)


class LogsOfShortRuns(TrainerCallback):
    """Logs the first and the last step of a run that is too short for two logs, so that its losses
    are known.

    On all ranks: transformers averages a logged loss over them.
    """

    def on_step_end(self, args, state, control, **kwargs):
        """Ask for a log; with `logging_strategy: no`, for none."""
        if logs_for_short_run(args, state, state.global_step):
            control.should_log = True


def logs_for_short_run(args: Any, state: Any, step: int) -> bool:
    """Whether a step is the first or the last one of a run with fewer than two logs otherwise."""
    num_logs = {
        "steps": state.max_steps // max(state.logging_steps, 1),
        "epoch": state.num_train_epochs,
    }
    return step in (1, state.max_steps) and num_logs.get(str(args.logging_strategy.value), 2) < 2


def peak_memory() -> int:
    """Return the most bytes that this process has used: on its GPU, or without one the resident
    set.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    # ru_maxrss is in bytes on macOS, and in units of 1024 bytes on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
