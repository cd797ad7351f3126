"""The progress of one model's evaluation: a bar on a terminal, and a line per score, in a log too."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn


class ProgressDisplay:
    """Shows one model's progress; a context manager, while which the bar is visible."""

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
        self.bar = self.progress.add_task(f"{name}: reading model files", total=None)
        self.start = time.monotonic()
        self.is_cached = True
        """Whether all responses of the current column came from the cache."""

    def __enter__(self) -> "ProgressDisplay":
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def on_progress(self, column: str, done: int, total: int) -> None:
        """Update the bar: `done` of a column's requests have responses."""
        self.is_cached = self.is_cached and done == total
        self.progress.update(self.bar, description=f"{self.name} {column}", completed=done, total=total)

    def on_score(self, column: str, score: dict[str, Any]) -> None:
        """Print a column's score and the seconds it took."""
        seconds, self.start = time.monotonic() - self.start, time.monotonic()
        value = f"{score['value']:.1f} ± {score['stderr']:.1f}"
        duration = "cached" if self.is_cached else f"{seconds:.1f} s"
        self.is_cached = True
        self.console.print(
            f"{self.name:<20} {column:<16} {value:>12}   {score['n']:,} questions, {duration}",
            highlight=False,
            soft_wrap=True,
        )
