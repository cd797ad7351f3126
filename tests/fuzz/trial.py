"""One input tried: what became of it, how long it took and where it failed."""

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soren_align.core.errors import UserError, from_os_error
from tests.fuzz import targets
from tests.fuzz.box import Box, watched
from tests.fuzz.kinds import Input

LIMIT_SECONDS = 5.0  # of the CPU: other work on the machine does not count
WAIT_SECONDS = 60.0  # after which an input waits for something that does not come
MOST_BYTES = 4 << 30
PACKAGE = str(Path(targets.recipe.__file__).resolve().parent.parent)


class TooSlow(BaseException):
    """More than LIMIT_SECONDS or WAIT_SECONDS."""


@dataclass(frozen=True)
class Outcome:
    """What became of an input."""

    verdict: str
    """accepted, refused, failed, slow or outside."""
    seconds: float
    what: str = ""
    """Of a failure: the exception's name."""
    where: str = ""
    """The innermost line of soren_align, or of this folder."""
    message: str = ""
    trace: str = ""

    @property
    def is_fine(self) -> bool:
        """Accepted or refused in time."""
        return self.verdict in ("accepted", "refused")

    @property
    def group(self) -> tuple[str, str, str]:
        """Failures of one cause, as far as can be told."""
        return self.verdict, self.what, self.where

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {key: value for key, value in asdict(self).items() if key != "trace"}


def attempt(box: Box, given: Input) -> Outcome:
    """Try one input in the box."""
    files = {k: _resolved(v) for k, v in given.all_files().items()}
    here = os.getcwd()
    box.lay_out(files)
    began = time.process_time()
    verdict, error = "accepted", None
    with watched(targets.allowed(given.kind, box)) as watch:
        try:
            with _limited(LIMIT_SECONDS):
                code = targets.TARGETS[given.kind](box, given.arguments)
            verdict = "refused" if code == targets.REFUSED else "accepted"
        except UserError as refusal:
            verdict, error = _refusal(refusal)
        except OSError as other:  # the command says it in one sentence, where it names a file
            verdict, error = ("refused", None) if from_os_error(other) else ("failed", other)
        except TooSlow as late:
            verdict, error = "slow", late
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as other:
            verdict, error = "failed", other
    seconds = time.process_time() - began
    os.chdir(here)
    if box.changes_outside() and not watch.breaches:
        watch.breaches.append("the canary")
    if watch.breaches:
        what = " ".join(watch.breaches[0].replace(str(box.root), "@BOX@").split()[:2])
        where = _place(error) if error else ""
        return Outcome("outside", seconds, what.split(" ")[0], where, what)
    if seconds > LIMIT_SECONDS and error is None:
        return Outcome("slow", seconds)
    if error is None:
        return Outcome(verdict, seconds)
    message = " ".join(str(error).replace(str(box.root), "@BOX@").split())[:200]
    trace = "".join(traceback.format_exception(error, limit=-12))
    return Outcome(verdict, seconds, type(error).__name__, _place(error), message, trace)


def _refusal(refusal: UserError) -> tuple[str, Exception | None]:
    """A refusal is short, and its text commands no terminal."""
    text = str(refusal)
    if not text.strip() or len(text) > targets.MOST_OUTPUT or targets.CONTROL.search(text):
        return "failed", targets.Wrong(f"a refusal that cannot be printed: {text[:100]!r}").with_traceback(
            refusal.__traceback__
        )
    return "refused", None


def _resolved(content: Any) -> Any:
    if isinstance(content, dict) and "shared" in content:
        return {"link": str(targets.SHARED[content["shared"]]())}
    return content


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(PACKAGE)]
    if not ours:
        return "tests"
    return f"{Path(ours[-1].filename).relative_to(PACKAGE)}:{ours[-1].lineno}"


@contextmanager
def _limited(seconds: float):
    def stop(*_: Any) -> None:
        raise TooSlow

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    # again and again: an `except` may swallow the first
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS, 1.0)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def settle(root: Path, kinds: list[str]) -> Box:
    """Make this process one for inputs, without a network and with a home of its own; its box."""
    box = Box(root)
    targets.warm_up(box, kinds)  # with the system's own folder for what lasts longer than an input
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
                      TORCH_COMPILE_DISABLE="1", HOME=str(root / "home"), TMPDIR=str(root / "tmp"),
                      SOREN_ALIGN_CACHE=str(root / "cache"))  # fmt: skip
    tempfile.tempdir = str(root / "tmp")
    sys.dont_write_bytecode = True
    # What asks for more than MOST_BYTES fails, and not the machine.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return box
