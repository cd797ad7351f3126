"""`make fuzz`: mutated recipes, data files, run folders, models and others of targets.py, for 20 minutes.

    python -m tests.fuzz.run [--seed N] [--minutes 20] [--jobs 2] [--state FILE] [--kinds recipe,data]
    python -m tests.fuzz.run --seed N --one recipe:123        one input again: shown, tried, with its traceback
    python -m tests.fuzz.run --seed N --keep                  one small input of each failure goes into tests/fuzz/kept

Every input follows from (seed, kind, index). The state file has a line for every piece of work that is done; with the
same one, the command goes on. Exit status 1 if anything failed: an exception that is no UserError, more than 5 seconds,
a file touched outside of the run's folders.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", TORCH_COMPILE_DISABLE="1")

QUOTAS = {"recipe": 30_000, "override": 3_000, "import": 3_000, "data": 2_500, "run": 1_000, "adapter": 1_000,
          "model": 1_000, "journal": 500, "suite": 500}  # fmt: skip
"""The shares of the kinds, and what 20 minutes on two cores are to reach."""
CHUNKS = {"recipe": 100, "override": 100, "import": 50, "data": 25, "run": 20, "adapter": 20, "model": 10,
          "journal": 10, "suite": 50}  # fmt: skip
KEPT = HERE / "kept"
STUCK_SECONDS = 30
"""A process that is at one input for so long cannot be interrupted from inside, and is killed."""


def work(pipe: Any, now: Any, kinds: list[str]) -> None:
    """Try the pieces of work that come through the pipe; `now` holds the index of the input under way."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from tests.fuzz import trial
    from tests.fuzz.kinds import make

    box = trial.settle(root, kinds)
    pipe.send(None)
    while (chunk := pipe.recv()) is not None:
        seed, kind, first, last = chunk
        done = {"seed": seed, "kind": kind, "first": first, "last": last, "verdicts": Counter(), "slowest": 0.0}
        done["failures"], began = [], time.perf_counter()
        for index in range(first, last):
            now[0], now[1] = index, int(time.time())
            given = make(seed, kind, index)
            outcome = trial.attempt(box, given)
            done["verdicts"][outcome.verdict] += 1
            done["slowest"] = max(done["slowest"], round(outcome.seconds, 2))
            if not outcome.is_fine:
                done["failures"].append({"index": index, **outcome.to_json()})
        done["seconds"] = round(time.perf_counter() - began, 2)
        pipe.send(done)
    os.chdir("/")
    shutil.rmtree(root, ignore_errors=True)


class State:
    """What is done, as a file of JSON lines."""

    def __init__(self, file: Path, seed: str):
        self.file, self.seed = file, seed
        self.lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        self.lines = [line for line in self.lines if line["seed"] == seed]
        file.parent.mkdir(parents=True, exist_ok=True)
        self.next: dict[str, int] = defaultdict(int)
        self.gaps: list[tuple[str, int, int]] = []
        for kind in QUOTAS:
            for line in sorted((e for e in self.lines if e["kind"] == kind), key=lambda line: line["first"]):
                if line["first"] > self.next[kind]:
                    self.gaps.append((kind, self.next[kind], line["first"]))
                self.next[kind] = line["last"]

    def add(self, line: dict[str, Any], chunk: tuple[str, str, int, int]) -> None:
        """Append what is done of a piece of work, in one write; the inputs before and after it are taken again."""
        _, kind, first, last = chunk
        self.gaps += [(kind, a, b) for a, b in ((first, line["first"]), (line["last"], last)) if a < b]
        self.lines.append(line)
        with self.file.open("ab", buffering=0) as stream:
            stream.write((json.dumps(line) + "\n").encode())

    def take(self, kinds: list[str]) -> tuple[str, str, int, int]:
        """The next piece of work: of the kind that is furthest behind its quota."""
        if self.gaps:
            return self.seed, *self.gaps.pop()
        kind = min(kinds, key=lambda kind: self.next[kind] / QUOTAS[kind])
        first = self.next[kind]
        self.next[kind] = first + CHUNKS[kind]
        return self.seed, kind, first, first + CHUNKS[kind]

    def counts(self, kind: str) -> Counter:
        """Verdict -> number of inputs."""
        return sum((Counter(line["verdicts"]) for line in self.lines if line["kind"] == kind), Counter())


class Process:
    """A worker, and the input that it is at."""

    def __init__(self, kinds: list[str]):
        context = multiprocessing.get_context("spawn")
        self.now = context.Array("q", [-1, int(time.time())])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, self.now, kinds))
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def do(self, chunk: tuple[str, str, int, int]) -> dict[str, Any] | str:
        """What became of a piece of work; a word where the process died of it."""
        self.now[:] = chunk[2], int(time.time())
        self.pipe.send(chunk)
        while not self.pipe.poll(1):
            if time.time() - self.now[1] > STUCK_SECONDS:
                return "stuck"
        try:
            return self.pipe.recv()
        except EOFError:
            return "died"


def lost(chunk: tuple[str, str, int, int], index: int, why: str) -> dict[str, Any]:
    """The input that a process died of, as a piece of work."""
    verdict = "slow" if why == "stuck" else "failed"
    failure = {"index": index, "verdict": verdict, "seconds": 0.0, "what": why, "where": "", "message": why}
    line = {"seed": chunk[0], "kind": chunk[1], "first": index, "last": index + 1, "verdicts": {verdict: 1}}
    return line | {"slowest": 0.0, "failures": [failure], "seconds": 0.0}


def attend(state: State, lock: threading.Lock, kinds: list[str], until: float) -> None:
    """Hand pieces of work to one process after another until the time is over."""
    process = Process(kinds)
    while time.time() < until:
        with lock:
            chunk = state.take(kinds)
        done = process.do(chunk)
        if isinstance(done, str):
            done = lost(chunk, process.now[0], done)
            process.process.kill()
            process = Process(kinds)
        with lock:
            state.add(done, chunk)
    process.pipe.send(None)
    process.process.join(10)
    process.process.kill()


def table(state: State) -> str:
    """What was tried and what became of it, in 80 columns; then each kind of failure with an example."""
    lines = [f"{'seed ' + state.seed:10}{'inputs':>9}{'accepted':>10}{'refused':>9}{'failed':>8}{'over 5 s':>10}"
             f"{'outside':>9}{'slowest':>9}{'/s':>6}"]  # fmt: skip
    for kind in QUOTAS:
        counts, mine = state.counts(kind), [line for line in state.lines if line["kind"] == kind]
        if not mine:
            continue
        seconds = sum(line["seconds"] for line in mine) or 1
        lines.append(f"{kind:10}{counts.total():9,}{counts['accepted']:10,}{counts['refused']:9,}{counts['failed']:8,}"
                     f"{counts['slow']:10,}{counts['outside']:9,}{max(line['slowest'] for line in mine):7.1f} s"
                     f"{counts.total() / seconds:6.0f}")  # fmt: skip
    groups: dict[tuple, list] = defaultdict(list)
    for line in state.lines:
        for failure in line["failures"]:
            key = (line["kind"], failure["verdict"], failure["what"], failure["where"])
            groups[key].append(failure)
    for (kind, verdict, what, where), found in sorted(groups.items(), key=lambda item: -len(item[1])):
        least = min(failure["index"] for failure in found)
        lines.append(f"\n{len(found):5} {kind} {verdict}: {what} {where}\n      --one {kind}:{least}")
        lines += textwrap.wrap(found[0]["message"], 74, initial_indent="      ", subsequent_indent="      ")[:3]
    return "\n".join(lines)


def show_one(seed: str, kind: str, index: int) -> int:
    """Try one input again, with all that is known of it."""
    from tests.fuzz import kinds, trial

    given = kinds.make(seed, kind, index)
    print(json.dumps(given.to_json(), indent=1)[:20_000])
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        outcome = trial.attempt(trial.settle(Path(root), [kind]), given)
    print(outcome.trace)
    print(outcome.verdict, outcome.what, outcome.where, outcome.message, f"{outcome.seconds:.2f} s")
    return 0 if outcome.is_fine else 1


def keep(state: State) -> int:
    """Write an input of each kind of failure, made smaller, into KEPT."""
    from tests.fuzz import kinds, shrink, trial

    found = {(line["kind"], f["what"], f["where"]): (line["kind"], f["index"]) for line in state.lines
             for f in reversed(line["failures"])}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        box = trial.settle(Path(root), sorted({kind for kind, _ in found.values()}))
        for kind, index in found.values():
            shrink.keep(box, kinds.make(state.seed, kind, index), KEPT)
    return 0


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description="Try mutated inputs.")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--kinds", default=",".join(QUOTAS))
    parser.add_argument("--one", metavar="KIND:INDEX")
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    if asked.one:
        kind, _, index = asked.one.partition(":")
        return show_one(asked.seed, kind, int(index))
    kinds, lock = asked.kinds.split(","), threading.Lock()
    state = State(asked.state or Path("runs/fuzz") / f"{asked.seed}.jsonl", asked.seed)
    if asked.keep:
        return keep(state)
    until = time.time() + 60 * asked.minutes
    threads = [threading.Thread(target=attend, args=(state, lock, kinds, until)) for _ in range(asked.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(table(state))
    return 1 if any(line["failures"] for line in state.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
