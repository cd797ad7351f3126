"""Show the progress of training: a bar in a terminal, lines of text elsewhere."""

import resource
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from ...core.text import LINE_SECONDS, print_labelled, with_prefix
from ...tasks import BENCHMARK, TASKS


class Display(Progress):
    """A bar, and a line of text under it."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the bar and the line, which is cut at the terminal's width."""
        yield from super().get_renderables()
        yield Text(self.line, no_wrap=True, overflow="ellipsis")


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


class TrainingProgress(TrainerCallback):
    """Shows steps, time and measurements, in place of transformers' bars and printed dictionaries.

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
        self.display: Display | None = None
        self._logs: dict[str, float] = {}
        self._start = self._last_line = 0.0
        self._first_step = self._num_batches = 0

    def on_train_begin(self, args, state, control, **kwargs):
        """Print the notice about the number of steps.
        Start the bar at step 0, or at the step of the checkpoint.
        """
        if notice := self.notice_of(state.max_steps):
            print_labelled(self.console, "notice", notice)
        # A bar where somebody watches; a log file gets lines at intervals instead of a bar's
        # thousand rewrites.
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
            )
            columns += (TimeRemainingColumn(), TextColumn("left, {task.fields[costs]}"))
            self.display = Display(*columns, console=self.console, transient=True, expand=True)
            start = {
                "total": state.max_steps,
                "completed": state.global_step,
                "costs": self._costs(),
            }
            self._bar = self.display.add_task(self.task, **start)
            self.display.start()
        self._first_step, self._start = state.global_step, time.monotonic()
        self._last_line = self._start

    def on_step_begin(self, args, state, control, **kwargs):
        """Print a line about the steps until now, if LINE_SECONDS have passed since the last
        line.
        """
        if not self.display and state.global_step > self._first_step and self._is_time_for_a_line():
            steps = f"step {state.global_step}/{state.max_steps}"
            # The speed since this start: a resumed run may be on another machine.
            num_steps = state.global_step - self._first_step
            seconds = (
                (time.monotonic() - self._start) / num_steps * (state.max_steps - state.global_step)
            )
            time_left = f"{timedelta(seconds=round(seconds))} left"
            facts = (steps, *self._values(self._logs, ""), self._costs(), time_left)
            print_labelled(self.console, self.task, ", ".join(facts))

    def on_step_end(self, args, state, control, **kwargs):
        """Advance the bar."""
        if self.display:
            self.display.update(self._bar, completed=state.global_step, costs=self._costs())

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the measurements under the bar; print those of an evaluation."""
        logs = logs or {}
        if "eval_loss" in logs:
            step = f"step {state.global_step}: "
            print_labelled(self.console, "eval", step + ", ".join(self._values(logs, "eval_")))
        prefix = f"eval_{BENCHMARK}"
        if scores := {
            key.removeprefix(prefix): value for key, value in logs.items() if key.startswith(prefix)
        }:
            texts = [f"{name} {value:.1%}" for name, value in scores.items()]
            print_labelled(
                self.console, "benchmark", f"step {state.global_step}: {', '.join(texts)}"
            )
        if "loss" in logs or "eval_loss" in logs:
            self._logs |= logs
            self._show(self._measurements())

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Show the batch of the evaluation."""
        self._num_batches += 1
        total = (
            f" of {len(eval_dataloader)}"
            if eval_dataloader is not None and has_length(eval_dataloader)
            else ""
        )
        text = f"step {state.global_step}, batch {self._num_batches}{total}"
        self._show(f"evaluating {text}")
        if not self.display and self._is_time_for_a_line():
            print_labelled(self.console, "eval", text)

    def on_evaluate(self, args, state, control, **kwargs):
        """Show the training's measurements again."""
        self._num_batches = 0
        self._show(self._measurements())

    def close(self) -> None:
        """Remove the bar, which hides the cursor, also after an error."""
        if self.display:
            self.display.stop()
            self.display = None

    def _measurements(self) -> str:
        """Return the last measurements of training, and the loss of the last evaluation."""
        evaluated = self._logs.get("eval_loss")
        return ", ".join(
            self._values(self._logs, "") + ([f"eval loss {evaluated:.4f}"] if evaluated else [])
        )

    def _values(self, logs: dict[str, float], prefix: str) -> list[str]:
        return [
            text.format(logs[prefix + key])
            for key, text in TASKS[self.task].shown.items()
            if prefix + key in logs
        ]

    def _costs(self) -> str:
        speed = self._logs.get("tokens_per_second")
        return (
            f"{speed:,.0f} tokens/s, " if speed else ""
        ) + f"peak {with_prefix(peak_memory(), 'B')}"

    def _is_time_for_a_line(self) -> bool:
        now = time.monotonic()
        if now - self._last_line <= LINE_SECONDS:
            return False
        self._last_line = now
        return True

    def _show(self, line: str) -> None:
        if self.display:
            self.display.line = line


def peak_memory() -> int:
    """Return the most bytes that this process has used: on its GPU, or without one the resident
    set.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
