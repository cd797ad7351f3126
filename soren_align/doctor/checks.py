"""The checks, what they return, and the process of one: python -m soren_align.doctor.checks NAME
FILE MACHINE.

Each check is a function from a `Machine` to findings in a module of this folder. It runs in a
process of its own, so that a crash, a hang or a full GPU ends with it. Its findings are appended to
FILE one by one.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from ..core.errors import in_one_line

Verdict = Literal["ok", "FAILED", "skipped"]


@dataclass(frozen=True)
class Machine:
    """The facts about this machine that the checks need.

    folder: temporary files are in it. num_processes: of the collectives. num_gpus: visible ones;
    with none, the checks run on the CPU. capture: the file of the check of this name, or "".
    """

    folder: Path
    num_processes: int
    num_gpus: int
    capture: str = ""

    @property
    def device(self) -> str:
        """The device of the maps: cuda or cpu."""
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
    """Return a finding that is ok if it passes, and else failed for this reason."""
    if passes:
        return Finding(check, measured, expected)
    return Finding(check, measured, expected, "FAILED", reason)


def skipped(check: str, reason: str) -> Finding:
    """Return the finding of a check that does not apply here."""
    return Finding(check, "", "", "skipped", reason)


def last_line(text: str) -> str:
    """Return the last line of an output that is not empty."""
    lines = [line.strip()[:600] for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


CHECKS = {
    "libraries": ("system.libraries", 60),
    "file system": ("system.file_system", 60),
    "ranks": ("ranks.ranks", 240),
    "capture": ("ranks.capture", 240),
    "maps": ("maps.maps", 120),
    "speed": ("maps.speed", 60),
}
"""The function, `module.function`, and the time limit in seconds of each check, in the order in
which they run: what others need comes first. `capture` runs only with --capture."""


def findings(name: str, machine: Machine) -> Iterator[Finding]:
    """The findings of one check; an exception ends it as a failure."""
    try:
        module, _, function = CHECKS[name][0].partition(".")
        yield from getattr(import_module(f".{module}", __package__), function)(machine)
    except Exception as error:  # whatever it is, the other checks run
        text = f"{name}: {type(error).__name__}: {in_one_line(error, 600)}"
        yield Finding(name, "", "no error", "FAILED", text)


def main(arguments: list[str]) -> None:
    """Run one check, and write its findings into the file."""
    name, file, text = arguments
    values = json.loads(text)
    machine = Machine(**{**values, "folder": Path(values["folder"])})
    with open(file, "w", encoding="utf-8") as stream:
        # Flushed one by one: of a check that crashes or hangs, the findings before it are known.
        for finding in findings(name, machine):
            stream.write(json.dumps(asdict(finding)) + "\n")
            stream.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
