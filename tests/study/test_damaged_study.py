"""`compare --report` of a damaged, foreign or half-written study: one sentence or no verdict; no run is changed."""

import json
import re
import shutil
from unittest import mock

import pytest
from soren_align.study import audit
from soren_align.study.report.verdict import VERDICT
from tests.support import command
from tests.support.large_study import SMALL, plant, write_verdict

RUN, EVALUATION = "verdict/soren/102", "verdict/soren/102/eval/open-llm-leaderboard-v1"
WRITTEN = {"study.json", VERDICT, "history.jsonl", ".lock"}


def cut(place, size=40):
    """A fault: a file that ends after so many bytes, as after a kill or on a full disk."""
    return lambda study: (study / place).write_bytes((study / place).read_bytes()[:size])


def put(place, content):
    """A fault: another content."""
    return lambda study: (study / place).write_text(content)


def without(place):
    """A fault: a file or folder is missing."""
    return lambda study: shutil.rmtree(study / place) if (study / place).is_dir() else (study / place).unlink()


# By fault: what a refusal states in its one sentence. The command ends with exit code 2.
REFUSED = {
    "another file as study.yaml": (put("study.yaml", "a: 1\n"), "study.yaml"),
    "a cut study.yaml": (cut("study.yaml"), "study.yaml"),
    "no study.yaml": (without("study.yaml"), "study's folder"),
    "a cut recipe of a run": (cut(f"{RUN}/recipe.yaml"), "verdict/soren/102/recipe.yaml"),
    "a cut run.json": (cut(f"{RUN}/run.json"), "run.json"),
    "a run.json of something else": (put(f"{RUN}/run.json", "[]"), "run.json"),
    "cut results": (cut(f"{EVALUATION}/results.json"), "results.json"),
}
# By fault: a problem in the report, which has no verdict. The command ends with exit code 0.
NO_VERDICT = {
    "cut values of held-out examples": (cut(f"{RUN}/held_out.json"), "held_out.json"),
    "cut points": (cut(f"{EVALUATION}/points.json"), "points.json"),
}
# The candidate of the run has no verdict, and the others have one.
LOST = {"cut metrics": cut(f"{RUN}/metrics.jsonl", 300), "a run without run.json": without(f"{RUN}/run.json")}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    plant(folder, **SMALL)
    return folder


def run(study, tmp_path, change):
    """Damage a copy of the study; return its folder, the command's Result, and whether files of its runs changed."""
    shutil.copytree(study / "study", tmp_path / "study")
    change(tmp_path / "study")
    before = contents(tmp_path / "study")
    arguments = ("compare", study / "large.yaml", "--report", "--set", f"output_dir={tmp_path / 'study'}")
    with mock.patch.object(audit, "write_report", write_verdict):
        result = command.run(*arguments, env={"COLUMNS": "2000"})
    return tmp_path / "study", result, before != contents(tmp_path / "study")


def contents(folder):
    files = [file for file in folder.rglob("*") if file.is_file() and file.name not in WRITTEN]
    return {str(file): file.read_bytes() for file in files}


@pytest.mark.rest
@pytest.mark.parametrize("fault", REFUSED)
def test_a_study_that_cannot_be_read_is_refused_in_one_sentence(study, tmp_path, fault):
    change, words = REFUSED[fault]
    folder, result, is_changed = run(study, tmp_path, change)
    assert result.returncode == 2, result.stdout
    lines = [line for line in result.stderr.splitlines() if not line.startswith("  ")]  # the keys of a recipe
    assert len(lines) == 1, result.stderr
    assert re.search(words, result.stderr), result.stderr
    assert not is_changed
    assert not (folder / VERDICT).exists()


@pytest.mark.rest
@pytest.mark.parametrize("fault", NO_VERDICT)
def test_a_study_with_a_damaged_run_has_no_verdict_and_names_the_file(study, tmp_path, fault):
    change, words = NO_VERDICT[fault]
    folder, result, is_changed = run(study, tmp_path, change)
    assert result.returncode == 0, result.stderr
    content = json.loads((folder / VERDICT).read_text())
    assert content["differences"] == []
    assert re.search(words, "\n".join(content["problems"])), content["problems"]
    assert str(folder) not in json.dumps(content)
    assert not is_changed


@pytest.mark.rest
@pytest.mark.parametrize("fault", LOST)
def test_a_candidate_with_a_lost_run_has_no_verdict(study, tmp_path, fault):
    folder, result, is_changed = run(study, tmp_path, LOST[fault])
    assert result.returncode == 0, result.stderr
    names = {d["candidate"] for d in json.loads((folder / VERDICT).read_text())["differences"]}
    assert names == {"adamw", "muon", "htmuon"}
    assert not is_changed
