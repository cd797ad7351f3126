"""The list of checks, and the process of one: python -m soren_align.doctor.checks NAME FILE
MACHINE.

Each check is a function from a `Machine` to findings in a module of this folder. It runs in a
process of its own, so that a crash, a hang or a full GPU ends with it. Its findings are appended to
FILE one by one.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from ..core.errors import in_one_line
from .findings import Finding, Machine


@dataclass(frozen=True)
class Check:
    """A check: the name of its function, `module.function`, and its time limits; quick_seconds 0:
    not with --quick.
    """

    function: str
    seconds: float
    quick_seconds: float

    def load(self) -> Callable[[Machine], Iterator[Finding]]:
        """Import the function, with all that its module needs."""
        module, _, name = self.function.partition(".")
        return getattr(import_module(f".{module}", __package__), name)


CHECKS = {
    "libraries": Check("system.libraries", 60, 60),
    "file system": Check("system.file_system", 60, 30),
    "ranks": Check("ranks.ranks", 120, 60),
    "maps": Check("maps.maps", 180, 90),
    "times": Check("times.times", 120, 40),
    "parity": Check("trainings.parity", 540, 150),
    "DPO": Check("trainings.dpo", 120, 60),
    "memory": Check("trainings.memory", 180, 0),
    "speed": Check("trainings.speed", 180, 0),
    "interruptions": Check("interruptions.interruptions", 300, 0),
}
"""In the order in which they run: what others need comes first."""


def findings(name: str, machine: Machine) -> Iterator[Finding]:
    """The findings of one check; an exception ends it as a failure."""
    try:
        yield from CHECKS[name].load()(machine)
    except Exception as error:  # whatever it is, the other checks run
        text = f"{name}: {type(error).__name__}: {in_one_line(error, 600)}"
        yield Finding(name, "", "no error", "FAILED", text)


def main(arguments: list[str]) -> None:
    """Run one check."""
    name, file, text = arguments
    values = json.loads(text)
    machine = Machine(**{**values, "folder": Path(values["folder"])})
    with open(file, "w", encoding="utf-8") as stream:
        for finding in findings(name, machine):
            stream.write(json.dumps(asdict(finding)) + "\n")
            stream.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
