"""What is seen while a model answers: a bar on a terminal, and a line for each score, in a log too."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn


class Showing:
    """One model at work: a bar on a terminal, and a line for each score, in a log too."""

    def __init__(self, name: str, console: Console):
        self.name, self.console = name, console
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.bar = self.progress.add_task(f"{name}: reading its files", total=None)
        self.began = time.monotonic()
        self.asked = False  # something of the model, and not only the journal

    def on_progress(self, column: str, done: int, of: int) -> None:
        """So many of a column's requests are answered."""
        self.asked = self.asked or done < of
        self.progress.update(self.bar, description=f"{self.name} {column}", completed=done, total=of)

    def on_score(self, column: str, score: dict[str, Any]) -> None:
        """A column is done."""
        seconds, self.began = time.monotonic() - self.began, time.monotonic()
        told = f"{score['value']:.1f} ± {score['stderr']:.1f}"
        took = f"{seconds:.1f} s" if self.asked else "kept"
        self.asked = False
        self.console.print(
            f"{self.name:<20} {column:<16} {told:>12}   {score['n']:,} questions, {took}",
            highlight=False,
            soft_wrap=True,
        )
