"""2,060 mutated inputs, always the same, and every input that ever failed: accepted or refused, and nothing else.

`make fuzz` tries many more. One input again: `python -m tests.fuzz.run --seed make-test --one recipe:123`.
"""

import contextlib
import json
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from tests.fuzz import trial
from tests.fuzz.box import watched
from tests.fuzz.kinds import Input, make

SEED = "make-test"
SAMPLE = {"recipe": 1_250, "override": 300, "import": 150, "data": 100, "run": 100, "adapter": 50, "suite": 50}
SAMPLE |= {"model": 40, "journal": 20}
KEPT = sorted((Path(__file__).parent / "kept").glob("*.json"))
pytestmark = pytest.mark.filterwarnings("ignore")  # of mutated YAML; the commands silence them, too


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    before = resource.getrlimit(resource.RLIMIT_AS)
    bytecode = mock.patch.object(sys, "dont_write_bytecode", True)
    with mock.patch.dict(os.environ), mock.patch.object(tempfile, "tempdir", None), bytecode, contextlib.chdir(root):
        yield trial.settle(root, list(SAMPLE))
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("model", "run", "recipe", "override")))
        for kind in SAMPLE
    ],
)
def test_a_mutated_input_is_accepted_or_refused_in_words(kind, box):
    outcomes = {i: trial.attempt(box, make(SEED, kind, i)) for i in range(SAMPLE[kind])}
    assert [f"--one {kind}:{i} {outcome}" for i, outcome in outcomes.items() if not outcome.is_fine] == []
    verdicts = [outcome.verdict for outcome in outcomes.values()]
    assert verdicts.count("accepted") > len(verdicts) / 50  # mutations that all are refused at once would prove little


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_what_once_failed_is_accepted_or_refused_in_words(file, box):
    assert trial.attempt(box, Input.from_json(json.loads(file.read_text()))).is_fine


def test_the_sample_has_2060_inputs_and_each_is_made_from_its_number_alone():
    assert sum(SAMPLE.values()) == 2_060
    assert make("a", "recipe", 5) == make("a", "recipe", 5) != make("a", "recipe", 6)


@pytest.mark.parametrize("deed", [
    lambda there: there.joinpath("victim.txt").write_text("gone"), lambda there: there.joinpath("victim.txt").unlink(),
    lambda there: there.joinpath("new").mkdir(), lambda there: there.joinpath("victim.txt").rename(there / "other"),
    lambda there: shutil.rmtree(there / "deep"),
])  # fmt: skip
def test_a_change_outside_is_refused_and_noted(deed, box):
    box.lay_out({})
    with watched([str(box.work)]) as watch, pytest.raises(PermissionError):
        deed(box.outside)
    assert len(watch.breaches) == 1
    assert not box.changes_outside()


def test_a_change_that_python_does_not_see_is_found_in_the_canary(box):
    box.lay_out({})
    (box.outside / "victim.txt").write_text("gone")
    assert box.changes_outside()
    assert not box.changes_outside()
