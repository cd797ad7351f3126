"""The report of a large study takes seconds and little memory."""

import os
import re
import time
from pathlib import Path

import pytest
from tests.support import command
from tests.support.large_study import plant


@pytest.mark.process
@pytest.mark.rest
def test_a_report_of_a_hundred_runs_takes_at_most_thirty_seconds_and_a_gigabyte(tmp_path):
    """4 candidates, 80 runs of the search, 20 final runs, 10,000 held-out examples, 30,000 questions.

    Seconds of the CPU, which do not depend on the load: 20 on the machine of docs/comparison.md, with answers of 1 kB.
    """
    file = plant(tmp_path, answer_bytes=100)
    process = command.start("compare", file, "--report", cwd=tmp_path, is_fork=False)
    # Not wait4's ru_maxrss: it begins with the memory of this process, from which the command was started.
    peak = 0
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max(peak, *(int(kilobytes) for kilobytes in re.findall(r"VmHWM:\s+(\d+) kB", status)), 0)
        time.sleep(0.05)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    assert process.returncode == 0, errors
    assert usage.ru_utime + usage.ru_stime <= 30
    assert 5e4 < peak <= 1e6  # kB
    assert (tmp_path / "study/verdict.json").stat().st_size < 1e5
