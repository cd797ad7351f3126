"""`soren-align doctor`: run all checks one after the other, print one table, and write
doctor.json.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ..core import files
from ..core.errors import UserError
from ..core.launchers import without_ranks
from ..core.text import Table, Terminal, count, print_labelled, stderr_console, working
from ..launch.environment import visible_gpus
from ..run.folder import now
from ..run.provenance import provenance
from .checks import CHECKS, Finding, Machine, last_line

RESULT = "doctor.json"
STOP_SECONDS = 20.0
"""The time for a check's process, and the ranks that it started, to end after SIGTERM."""


def doctor(num_processes: int | None, *, output: str, capture: str | None = None) -> int:
    """Check this machine; return the exit code: 0, or 1 if a check failed.

    num_processes: None: one per GPU, or 2 without GPUs. output: a folder, best on the file system
    of future runs. capture: a file for the step of each sharding strategy.
    """
    folder = Path(output).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        finding = f"cannot be created ({error.strerror})"
        raise UserError(f"--output {output}: {finding}; name another folder") from None
    num_gpus = len(visible_gpus())
    file = str(Path(capture).absolute()) if capture else ""
    machine = Machine(folder, num_processes or num_gpus or 2, num_gpus, file)
    findings: list[Finding] = []
    begin, console = time.monotonic(), stderr_console()
    with working(console, "Checking") as show:
        for name, (_, seconds) in CHECKS.items():
            if name == "capture" and not capture:
                continue
            show(f"Checking {name}")
            findings += run_check(name, machine, seconds)
            # Written after each check: a doctor that is killed has a result too.
            content = {"time": now(), "seconds": round(time.monotonic() - begin, 1)}
            content |= {"processes": machine.num_processes, "num_gpus": num_gpus, **provenance()}
            content |= {"findings": [asdict(finding) for finding in findings]}
            files.write(folder / RESULT, json.dumps(content, indent=2) + "\n")
    failures = [finding for finding in findings if finding.verdict == "FAILED"]
    rows = [[f.check, f.measured, f.expected, f.verdict] for f in findings]
    signs = {"FAILED": ("bold red", "worse"), "ok": ("green", "better"), "skipped": ("dim", "")}
    columns = ["check", "measured", "expected", "verdict"]
    Terminal().print(Table(columns, rows, align="llll", signs=signs).rich())
    for finding in findings:
        if finding.reason:
            print_labelled(console, finding.verdict, f"{finding.check}: {finding.reason}")
    words = f"{count(len(failures), 'failure')} in {count(len(findings), 'line')}"
    words += f", {time.monotonic() - begin:.0f} s; {folder / RESULT}"
    print_labelled(console, "done", words)
    return int(bool(failures))


def run_check(name: str, machine: Machine, seconds: float) -> list[Finding]:
    """Return the findings of a check, run in a process of its own for at most so many seconds."""
    stem = machine.folder / name.replace(" ", "_")
    file, log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
    file.unlink(missing_ok=True)
    values = json.dumps({**asdict(machine), "folder": str(machine.folder)})
    command = [sys.executable, "-m", "soren_align.doctor.checks", name, str(file), values]
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment(),
            start_new_session=True,
        )
        try:
            code, problem = process.wait(seconds), ""
            if code:
                output = log.read_text(encoding="utf-8", errors="replace")
                problem = f"its process ended with exit code {code}: {last_line(output)}"
        except subprocess.TimeoutExpired:
            problem = f"it had not ended after {seconds:.0f} s; {log} has its output"
        finally:
            # End the processes that are alive: SIGTERM first, with which torchrun ends its ranks.
            for number in (signal.SIGTERM, signal.SIGKILL):
                # Once SIGTERM was needed the group is killed too: ranks may outlive the process
                # that started them.
                if process.poll() is not None and number == signal.SIGTERM:
                    break
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
    findings = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with suppress(ValueError):  # of a process that was killed while it wrote
            findings.append(Finding(**json.loads(line)))
    file.unlink(missing_ok=True)
    if problem or not findings:
        findings.append(Finding(name, "", "an end", "FAILED", problem or "it has no result"))
    elif not any(finding.verdict == "FAILED" for finding in findings):
        log.unlink()
    return findings


def environment() -> dict[str, str]:
    """Return the environment of a check and of the processes that it starts: no launcher's, and
    this package importable.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    quiet = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "15", "COLUMNS": "200"}
    return {"HF_HUB_OFFLINE": "1"} | without_ranks(os.environ) | quiet | {"PYTHONPATH": path}
