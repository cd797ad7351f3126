"""A sample of `make soak`, and its verdicts on made-up ends: if all were identical, they would prove nothing."""

import os
import random
import re
import subprocess
import sys

import pytest
from tests.soak import faults, runs
from tests.soak.commands import Ended

REFERENCE = faults.Reference({"weights": {"model.safetensors": "a"}}, 1.0, ["checkpoints", "run.json"])
CLEAR = "run: No space left on device; rerun the same command\n"


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """verdict(ends, result) -> that of a trial whose commands end like this, and whose run has this result."""

    def conclude(ends, result=REFERENCE.result, **arguments):
        trial = faults.Trial(tmp_path / "case", "sft", REFERENCE, random.Random(0))
        ends = [Ended(codes, output, True, hangs, 1.0) for codes, output, hangs in ends]
        trial.ended.append(ends.pop(0))
        monkeypatch.setattr(trial, "command", lambda: trial.ended.append(ends.pop(0)))
        monkeypatch.setattr(runs, "result", lambda *_: {} if ends else result)
        return trial.conclude(**arguments)

    return conclude


KILLED, DONE = ([-9], "", False), ([0], "done\n", False)
REFUSED = ([2], CLEAR, False)
TRACE = ([1], "Traceback (most recent call last):\nKeyError: 1\nrerun the same command", False)
REMEDY = {"remedy": lambda: None, "names": "No space left"}


@pytest.mark.parametrize(("expected", "ends", "arguments"), [
    ("identical", [KILLED, DONE], {}),
    ("identical", [KILLED], {}),  # its ranks have trained on
    ("identical", [([-9, 1], "another rank failed. Rerun the same command", False), ([0, 0], "", False)], {}),
    ("clear", [REFUSED, DONE], REMEDY),
    ("unclear", [TRACE, DONE], {}),
    ("unclear", [([1], "lost something", False), DONE], {}),
    ("unclear", [KILLED, ([1], "Traceback (most recent call last):\nKeyError: 1", False), DONE], REMEDY),
    ("unclear", [([2], "no", False), DONE], REMEDY),
    ("unclear", [([-11], "", False), DONE], {}),
    ("hang", [KILLED, ([-9], "", True)], {}),
    ("WRONG", [KILLED, REFUSED], {}),
    ("WRONG", [REFUSED, REFUSED], REMEDY),
    ("WRONG", [KILLED, *[([130], "", False)] * faults.MOST_RERUNS], {}),
])  # fmt: skip
def test_a_verdict_follows_from_codes_and_messages(verdict, expected, ends, arguments):
    assert verdict(ends, **arguments) == expected


@pytest.mark.parametrize("result", [{}, {"weights": {"model.safetensors": "b"}}, {"weights": {}}])
def test_another_result_is_wrong_whatever_the_messages(verdict, result):
    assert verdict([KILLED, DONE], result) == "WRONG"
    assert verdict([REFUSED, DONE], result, **REMEDY) == "WRONG"


def test_a_lost_checkpoint_is_wrong(tmp_path):
    trial = faults.Trial(tmp_path / "case", "sft", REFERENCE, random.Random(0))
    for step in (2, 4):
        (trial.run / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
        (trial.run / f"checkpoints/checkpoint-{step}/soren_align.json").touch()
    trial.kept = trial.sealed()
    trial.check_kept()
    assert not trial.notes
    (trial.kept[1] / "soren_align.json").unlink()
    trial.check_kept()
    assert trial.notes == ["LOST checkpoint-4"]


@pytest.mark.process
def test_eight_faults_change_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.soak", "--sample", "--seed", "sample", "--state", tmp_path / "sample.jsonl"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| **all** | 8 |" in done.stdout
    assert int(re.search(r"Of \d+ faults (\d+) hit", done.stdout)[1]) >= 6, done.stdout  # else nothing was disturbed
