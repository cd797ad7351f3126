"""One command of soren-align in a process forked from this one, which waits at a chosen write until the fault is there.

The libraries are loaded once, before the fork. In the child an audit hook sees every file of the run that is opened
for writing, renamed or removed; torch.save, safetensors and fsync, of which Python reports nothing, are wrapped. At
the chosen event the child waits, this process causes the fault, and the child continues: the same fault at the same
place each time, and none while libraries are imported.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import os
import re
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.forks import free_port

ARMED = ("metrics.jsonl", 2)
"""Events count from here on: the second line of metrics, when the first step has been taken."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Place:
    """The nth event (from 1) of a category since ARMED; category None: of all."""

    category: str | None
    ordinal: int


@dataclass
class Ended:
    """How a command ended."""

    codes: list[int]
    """Of its processes, by rank; a signal is negative."""
    output: str
    hit: bool
    """Whether the fault came."""
    is_hanging: bool
    seconds: float
    events: list[str] = field(default_factory=list)
    """Categories of the events since ARMED; of a watched command without a place."""

    @property
    def code(self) -> int:
        """0 if all processes ended with 0; 2 if one refused; else the first that is not 0."""
        return 2 if 2 in self.codes else next((code for code in self.codes if code), 0)


class Watch:
    """In the child: counts events, and waits at the chosen one."""

    def __init__(self, folder: Path, place: Place | None, report: int, resume: int):
        self.folder, self.place, self.report, self.resume = str(folder) + os.sep, place, report, resume
        self.counts: Counter = Counter()
        self.pid, self.is_armed, self.is_busy = os.getpid(), False, False

    def install(self) -> None:
        """Watch this process from now on."""
        import safetensors.torch
        import torch

        sys.addaudithook(self._on_audit_event)
        _wrap(torch, "save", 1, self.note)
        _wrap(safetensors.torch, "serialize_file", 1, self.note)
        sync = os.fsync

        def fsync(file):
            number = file if isinstance(file, int) else file.fileno()
            self.note(os.readlink(f"/proc/self/fd/{number}"))
            sync(file)

        os.fsync = fsync

    def _on_audit_event(self, event: str, arguments: tuple) -> None:
        if event == "open":
            if isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.note(arguments[0])
        elif event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            self.note(*arguments[: 1 + (event == "os.rename")])

    def note(self, *paths: object) -> None:
        """Count an event on these paths; wait if it is the chosen one."""
        if self.is_busy or os.getpid() != self.pid:
            return
        texts = [os.path.abspath(os.fsdecode(p)) for p in paths if isinstance(p, str | bytes | os.PathLike)]
        categories = [category(text[len(self.folder) :]) for text in texts if text.startswith(self.folder)]
        if not categories:
            return
        own = categories[-1]  # of a rename: where to
        if not self.is_armed:
            self.counts[own] += own == ARMED[0]
            self.is_armed = self.counts[ARMED[0]] >= ARMED[1]
            if self.is_armed:
                self.counts.clear()
            return
        self.counts[own] += 1
        self.counts[None] += 1
        if self.place is None:
            os.write(self.report, f"{own}\n".encode())
        elif self.counts[self.place.category] == self.place.ordinal and self.place.category in (own, None):
            self.is_busy = True  # the signal's own writes are no second hit
            os.write(self.report, b"hit\n")
            os.read(self.resume, 1)
            self.is_busy = False


def category(path: str) -> str:
    """Return what a path below the case's folder belongs to."""
    first, _, others = path.partition("/")
    name = others.split("/")[0] if first == "run" else first
    return name if name == "model.part" else re.sub(r"(\.\d+)?\.part$", "", name)


def _wrap(module, name: str, position: int, note: Callable) -> None:
    """Note a function's file before and after the call."""
    original = getattr(module, name)

    def noted(*args, **kwargs):
        file = args[position] if len(args) > position else kwargs.get("f")
        note(file)
        result = original(*args, **kwargs)
        note(file)
        return result

    setattr(module, name, noted)


def start(
    arguments: list[str], folder: Path, log: Path, watch: Watch | None, environment: dict[str, str], prepare: Callable
) -> int:
    """Fork a process that runs `soren-align ARGUMENTS` in `folder`; return its id. prepare: called there before."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()  # Ctrl-C reaches the soak alone
        die_with_parent()
        os.chdir(folder)
        os.environ.update(environment)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        # Processes that the command starts must not import this program again.
        sys.modules["__main__"] = sys.modules["soren_align.cli.app"]
        prepare()
        if watch is not None:
            watch.pid = os.getpid()
            watch.install()
        from soren_align.cli import app

        sys.argv[1:] = arguments
        code = app.main()  # as the program: it ends without interruptions, too
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run(
    arguments: list[str],
    folder: Path,
    log: Path,
    *,
    seconds: float,
    processes: int = 1,
    are_ranks: bool = True,
    environment: dict[str, str] | None = None,
    place: Place | None = None,
    when: Callable[[], bool] | None = None,
    fault: Callable[[list[int]], None] | None = None,
    afterwards: Callable[[list[int]], None] | None = None,
    prepare: Callable[[], None] = lambda: None,
    record: bool = False,
) -> Ended:
    """Run a command to its end, with a fault at `place` (or once `when()` is true); kill it after `seconds`.

    fault: called with the process ids while the first of them waits at the place. afterwards: called when it has been
    let go. record: return the events. processes: ranks as srun starts them, or (are_ranks: False) commands at once.
    """
    began, size = time.monotonic(), log.stat().st_size if log.exists() else 0
    watched = record or place is not None
    (report, report_to), (resume_from, resume) = os.pipe(), os.pipe()
    port = free_port()
    pids = []
    for rank in range(processes):
        own = dict(environment or {})
        if processes > 1 and are_ranks:
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        watch = Watch(folder, place, report_to, resume_from) if watched and rank == 0 else None
        pids.append(start(arguments, folder, log, watch, own, prepare))
    os.close(report_to)
    os.close(resume_from)
    codes: dict[int, int] = {}
    hit, is_closed, text = False, False, b""
    try:
        while len(codes) < processes and time.monotonic() - began < seconds:
            ready = select.select([report] if watched and not is_closed else [], [], [], 0.01)[0]
            if ready:
                part = os.read(report, 65536)
                is_closed, text = not part, text + part  # the end: all have closed it
            is_due = b"hit" in text if place else bool(when and when())
            if fault and not hit and is_due:
                hit = True
                fault(pids)
                with contextlib.suppress(BrokenPipeError):
                    os.write(resume, b".")
                if afterwards:
                    afterwards(pids)
            _collect(pids, codes)
            if codes and len(codes) < processes:  # the others are stopped, and nothing wakes them
                left = [pid for pid in pids if pid not in codes]
                if all(_state(pid) == "T" for pid in left):
                    for pid in left:
                        os.kill(pid, signal.SIGKILL)
        strays = wait_for_strays(pids, began + seconds)
        is_hanging = len(codes) < processes or bool(strays)
        if is_hanging:
            for pid in [pid for pid in pids if pid not in codes]:
                os.kill(pid, signal.SIGUSR1)  # faulthandler writes where it hangs
            time.sleep(1)
            kill_all([*strays, *(pid for pid in pids if pid not in codes)])
            while len(codes) < processes:
                _collect(pids, codes)
                time.sleep(0.01)
            wait_for_strays([], time.monotonic() + 10)
    except BaseException:
        kill_all(descendants())
        wait_for_strays([], time.monotonic() + 10)
        raise
    finally:
        os.close(report)
        os.close(resume)
    with log.open("rb") as stream:
        stream.seek(size)
        output = stream.read().decode(errors="replace")
    events = text.decode().split() if record else []
    return Ended([codes[pid] for pid in pids], output, hit, is_hanging, time.monotonic() - began, events)


def kill_all(pids: list[int]) -> None:
    """SIGKILL to all of these."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _collect(pids: list[int], codes: dict[int, int]) -> None:
    for pid in pids:
        if pid not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
            codes[pid] = os.waitstatus_to_exitcode(status[1])


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends: one that waits at a place would wait for ever."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of processes that this one's children leave behind, so that they can be waited for."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_strays(own: list[int], until: float) -> list[int]:
    """Wait for the processes that a command has left behind; return those that are there at the end."""
    while True:
        with contextlib.suppress(ChildProcessError):
            for pid in descendants():
                if pid not in own:
                    os.waitpid(pid, os.WNOHANG)
        left = [pid for pid in descendants() if pid not in own]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.05)


def parents() -> dict[int, int]:
    """Return the parent of every process."""
    found: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            text = Path("/proc", str(int(entry)), "stat").read_text()
            found[int(entry)] = int(text.rpartition(")")[2].split()[1])
    return found


def descendants(root: int | None = None) -> list[int]:
    """Return the processes below this one, or below `root`."""
    above, level, below = parents(), [root or os.getpid()], []
    while level:
        level = [pid for pid, parent in above.items() if parent in level]
        below += level
    return below


def command_line(pid: int) -> str:
    """Return the arguments of a process, joined by spaces; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
