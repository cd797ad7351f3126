"""A sample of `make soak`, and its verdicts on made-up ends: if all were identical, they would prove nothing."""

import os
import random
import subprocess
import sys

import pytest
from tests.soak import __main__ as soak
from tests.soak import commands, faults, runs
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


def test_the_cases_follow_from_the_seed_and_have_all_kinds():
    names = soak.cases("1")
    assert names == soak.cases("1") != soak.cases("2")
    assert len(names) == len(set(names)) >= 200
    assert {name.rsplit(":", 2)[0] for name in names} == {kind.name for kind in faults.KINDS}
    assert {name.rsplit(":", 2)[1] for name in [*names, *soak.cases("2")]} == runs.CONFIGS.keys()
    kinds = {kind.name: kind.configs for kind in faults.KINDS}
    assert all(config in kinds[kind] for kind, config, _ in (name.rsplit(":", 2) for name in soak.SAMPLE))


def test_a_write_belongs_to_a_file_or_folder_of_the_run():
    paths = [
        "run/run.json.12.part", "run/model.part/config.json", "run/checkpoints/checkpoint-2/optimizer.pt", "cache/a",
    ]  # fmt: skip
    assert [commands.category(path) for path in paths] == ["run.json", "model.part", "checkpoints", "cache"]


@pytest.mark.process
def test_a_watched_process_waits_at_the_chosen_write_and_not_before(tmp_path):
    """In an interpreter of its own: an audit hook cannot be removed."""
    code = f"""
import os, sys
from pathlib import Path
from tests.soak.commands import Place, Watch
folder = Path({str(tmp_path)!r})
report, report_to = os.pipe()
resume_from, resume = os.pipe()
os.write(resume, b".")
(folder / "run").mkdir()
Watch(folder, Place("run.json", 2), report_to, resume_from).install()
def write(name):
    (folder / name).write_text("")
    os.set_blocking(report, False)
    try:
        print(name, os.read(report, 99))
    except BlockingIOError:
        print(name)
names = ["run.json"] * 3 + ["metrics.jsonl"] * 2 + ["run.json", "recipe.yaml", "run.json.7.part"]
for name in map("run/".__add__, names):
    write(name)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-3:] == ["run/run.json", "run/recipe.yaml", "run/run.json.7.part b'hit\\n'"], done


@pytest.mark.process
def test_eight_faults_change_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.soak", "--sample", "--seed", "sample", "--state", tmp_path / "sample.jsonl"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| **all** | 8 |" in done.stdout
