"""The progress of training: a bar with the loss in a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

from ..terminal import print_labelled

LINE_SECONDS = 10.0
"""Shortest time between two plain lines."""


class ProgressBar(TrainerCallback):
    """Shows steps and loss, in place of transformers' bars and printed dictionaries."""

    def __init__(self, console: Console, task: str):
        self.console, self.task = console, task
        self.bar: Progress | None = None
        self._last_line = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the bar at step 0, or at the step of the checkpoint."""
        if self.console.is_terminal:
            steps = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            loss = TextColumn("{task.fields[loss]}")
            self.bar = Progress(*steps, loss, *times, console=self.console, transient=True)
            self._id = self.bar.add_task(self.task, total=state.max_steps, completed=state.global_step, loss="")
            self.bar.start()
        self._last_line = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        """Advance the bar."""
        if self.bar:
            self.bar.update(self._id, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the loss beside the bar, or print a line if LINE_SECONDS have passed."""
        if not logs or "loss" not in logs:
            return
        if self.bar:
            self.bar.update(self._id, loss=f"loss {logs['loss']:.3f}")
        elif time.monotonic() - self._last_line > LINE_SECONDS:
            self._last_line = time.monotonic()
            print_labelled(
                self.console, self.task, f"step {state.global_step}/{state.max_steps}, loss {logs['loss']:.4f}"
            )

    def on_train_end(self, args, state, control, **kwargs):
        """Remove the bar."""
        if self.bar:
            self.bar.stop()
            self.bar = None
