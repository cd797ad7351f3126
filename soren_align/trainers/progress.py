"""What a person sees while a model trains: one bar with the loss, or plain lines where there is no terminal."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

LINE_SECONDS = 10.0
"""Without a terminal, at most one line in so many seconds."""


class ProgressBar(TrainerCallback):
    """Replaces transformers' own bars and its printed dicts."""

    def __init__(self, console: Console, task: str):
        self.console, self.task = console, task
        self.bar: Progress | None = None
        self._printed = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        """Show where the run starts: at 0, or where its checkpoint left it."""
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            shown = (TextColumn("{task.fields[loss]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            self.bar = Progress(*columns, *shown, console=self.console, transient=True)
            self._id = self.bar.add_task(self.task, total=state.max_steps, completed=state.global_step, loss="")
            self.bar.start()
        self._printed = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        """One step more."""
        if self.bar:
            self.bar.update(self._id, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """The loss beside the bar, or a line now and then."""
        if not logs or "loss" not in logs:
            return
        if self.bar:
            self.bar.update(self._id, loss=f"loss {logs['loss']:.3f}")
        elif time.monotonic() - self._printed > LINE_SECONDS:
            self._printed = time.monotonic()
            self.console.print(f"{self.task} step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}")

    def on_train_end(self, args, state, control, **kwargs):
        """Take the bar away; the report follows."""
        if self.bar:
            self.bar.stop()
            self.bar = None
