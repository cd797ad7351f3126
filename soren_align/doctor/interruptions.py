"""A rank that is killed, a stop by SIGTERM, and the resumes: with the weights of an undisturbed run
at the end.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ..run.folder import RunFolder, step_of
from .findings import Finding, Machine, judged, last_line
from .trainings import (
    TOLERANCE,
    TrainingError,
    checked_output,
    command,
    folder_of,
    furthest,
    ranks_of,
    train,
)

END_SECONDS = 60.0
"""For the processes to end after a kill or SIGTERM."""
START_SECONDS = 120.0
"""For a training to write its first checkpoint."""
STRATEGY = "zero2"
SAVED = (f"run.parallel={STRATEGY}", "trainer.save_strategy=steps", "trainer.save_steps=2")


def interruptions(machine: Machine) -> Iterator[Finding]:
    """Kill a rank with SIGKILL, resume, stop by SIGTERM, resume, and compare with an undisturbed
    run.
    """
    num_ranks, where = ranks_of(machine), f"under {STRATEGY}"
    undisturbed = folder_of(machine, f"{STRATEGY}-{num_ranks}")  # of the check of parity
    if not (undisturbed / "model").is_dir():
        train(machine, undisturbed.name, f"run.parallel={STRATEGY}", processes=num_ranks)
    run = folder_of(machine, "interrupted")
    shutil.rmtree(run, ignore_errors=True)

    code, seconds, errors = _interrupt(machine, run, signal.SIGKILL)
    passes = code == 1 and seconds < END_SECONDS and "SIGKILL" in errors
    reason = f"after the SIGKILL of a rank, the job {where} ends with exit code {code} after {seconds:.0f} s: {errors}"
    yield judged(
        "kill -9 of a rank",
        f"ended after {seconds:.1f} s",
        f"< {END_SECONDS:.0f} s, exit 1",
        passes,
        reason,
    )

    code, seconds, errors = _interrupt(machine, run, signal.SIGTERM)
    passes = code == 130 and seconds < END_SECONDS and newest_step(run) > 0
    reason = (
        f"after SIGTERM, the job {where} ends with exit code {code} after {seconds:.0f} s: {errors}"
    )
    yield judged(
        "SIGTERM",
        f"ended after {seconds:.1f} s",
        f"< {END_SECONDS:.0f} s, exit 130",
        passes,
        reason,
    )

    checked_output(command(machine, run.name, *SAVED, processes=num_ranks), "the resumed run: ")
    difference = furthest(run, undisturbed)
    reason = f"a run {STRATEGY} that was resumed twice has other weights: {difference:.2g} from an undisturbed run's"
    expected = f"the undisturbed run's weights (<= {TOLERANCE:g})"
    yield judged("resume", f"{difference:.1e}", expected, difference <= TOLERANCE, reason)


def newest_step(run: Path) -> int:
    """The step of the last complete checkpoint; 0 if there is none."""
    return max(
        (step_of(checkpoint) for checkpoint in RunFolder(str(run)).complete_checkpoints()),
        default=0,
    )


def _interrupt(machine: Machine, run: Path, number: signal.Signals) -> tuple[int, float, str]:
    """Train until a new checkpoint is complete, then send a signal: SIGKILL to a rank, another one
    to the launcher.

    Returns the exit code, the seconds until the end, and the last line. Raises TrainingError if the
    training ends before.
    """
    before = newest_step(run)
    log = machine.folder / "interrupted.log"
    words = command(machine, run.name, *SAVED, processes=ranks_of(machine))
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
    begin = time.monotonic()
    while newest_step(run) <= before:
        if process.poll() is not None or time.monotonic() - begin > START_SECONDS:
            process.kill()
            text = last_line(log.read_text(encoding="utf-8", errors="replace"))
            raise TrainingError(
                f"no checkpoint after step {before} before the end (exit code {process.wait()}): {text}"
            )
        time.sleep(0.01)
    pid = process.pid
    # to the last rank that the launcher has started, or to the process itself
    if number == signal.SIGKILL:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        workers = [
            n
            for n in children
            if b"soren_align.launch.worker" in Path(f"/proc/{n}/cmdline").read_bytes()
        ]
        pid = max(map(int, workers), default=pid)
    os.kill(pid, number)
    begin = time.monotonic()
    try:
        process.wait(2 * END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
    code, errors = process.wait(), log.read_text(encoding="utf-8", errors="replace")
    sys.stderr.write(errors)
    return code, time.monotonic() - begin, last_line(errors)
