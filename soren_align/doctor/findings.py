"""What a check returns: findings, one line of the table each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["ok", "FAILED", "skipped"]


@dataclass(frozen=True)
class Machine:
    """What the checks need.

    folder: the runs and temporary files are in it. num_processes: of trainings and of gloo's
    collectives. num_gpus: visible ones; with none, the checks run on the CPU.
    """

    folder: Path
    num_processes: int
    quick: bool
    num_gpus: int

    @property
    def device(self) -> str:
        """The device of the maps and trainings: cuda or cpu."""
        return "cuda" if self.num_gpus else "cpu"


@dataclass(frozen=True)
class Finding:
    """One line. reason: why it failed or was skipped; for a failure with the remedy."""

    check: str
    measured: str
    expected: str
    verdict: Verdict = "ok"
    reason: str = ""


def judged(check: str, measured: str, expected: str, passes: bool, reason: str) -> Finding:
    """A finding that is ok if it passes, and else failed for this reason."""
    return (
        Finding(check, measured, expected)
        if passes
        else Finding(check, measured, expected, "FAILED", reason)
    )


def skipped(check: str, reason: str) -> Finding:
    """The finding of a check that does not apply here."""
    return Finding(check, "", "", "skipped", reason)


def last_line(text: str) -> str:
    """The last line of an output that is not empty."""
    return next(
        (line.strip()[:600] for line in reversed(text.splitlines()) if line.strip()), "no output"
    )
