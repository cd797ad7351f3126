"""verdict.json has the verdict, all of it and nothing else, in a form that other programs can rely on."""

import json
import math
from dataclasses import replace

import pytest
from soren_align.study.report.verdict import VERDICT, verdict_file
from tests.support.report_study import make_study

STUDY = make_study(declaration="0123456789ab" * 5 + "cdef", num_questions={"held-out": 240, "zoo_mc": 400})
FORM = {
    "candidates", "cautions", "commit", "date", "declaration", "differences", "digits", "format", "looks",
    "machine", "measures", "metric", "problems", "search_seeds", "title", "verdict_seeds", "versions",
}  # fmt: skip


def written(study, folder):
    (folder / VERDICT).write_text(json.dumps(verdict_file(study, folder)))
    return json.loads((folder / VERDICT).read_text())


def test_the_form_changes_with_its_version_only(tmp_path):
    """A key that is added belongs here; one that is removed needs another `format`."""
    content = written(STUDY, tmp_path)
    assert content["format"] == 2
    assert content.keys() == FORM
    assert content["measures"][0].keys() == {
        "name", "unit", "higher_is_better", "num_questions", "start", "candidates",
    }  # fmt: skip
    assert content["differences"][0].keys() == {
        "candidate", "reference", "measure", "unit", "value", "low", "high", "p", "p_holm", "answer", "detectable",
        "equivalence_margin", "retention_margin", "retained", "finer",
    }  # fmt: skip


def test_its_numbers_are_those_of_the_study(tmp_path):
    content = written(STUDY, tmp_path)
    assert (content["digits"], content["declaration"]) == ("0123456789ab", STUDY.declaration)
    assert (content["search_seeds"], content["verdict_seeds"]) == ([0], [101, 102, 103])
    measures = {measure["name"]: measure for measure in content["measures"]}
    assert [*measures] == ["held-out", "average", "zoo_mc", "zoo_gen"]
    assert [measures[name]["num_questions"] for name in ("held-out", "zoo_mc", "zoo_gen")] == [240, 400, None]
    assert [measures[name]["higher_is_better"] for name in ("held-out", "zoo_mc")] == [False, True]
    assert measures["zoo_mc"]["start"] == {"mean": 71.5, "standard_deviation": None, "num_seeds": 1}
    for candidate, shown in zip(STUDY.candidates, content["candidates"], strict=True):
        scores = [run.scores["zoo_mc"] for run in candidate.verdict]
        mean = sum(scores) / len(scores)
        deviation = math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
        own = measures["zoo_mc"]["candidates"][candidate.name]
        assert (own["mean"], own["standard_deviation"]) == pytest.approx((mean, deviation), rel=1e-12)
        assert shown["selected"] == candidate.selected_trial.parameters
        assert (shown["num_trials"], shown["num_runs"]) == (6, 3)
    for shown, difference in zip(content["differences"], STUDY.differences, strict=True):
        assert all(shown[key] == getattr(difference, key) for key in shown if hasattr(difference, key))
        assert (shown["equivalence_margin"], shown["retention_margin"]) == (difference.equivalence, difference.margin)


def test_a_study_with_problems_has_no_differences(tmp_path):
    content = written(replace(STUDY, problems=["search/soren/00: has other batches; remove it"]), tmp_path)
    assert (content["differences"], content["date"]) == ([], None)
    assert content["problems"] == ["search/soren/00: has other batches; remove it"]
    assert [candidate["num_runs"] for candidate in content["candidates"]] == [3] * 4


def test_a_study_without_a_finished_trial_has_scores_of_nothing(tmp_path):
    study = make_study(num_trials=0, differences=[], base_scores=None)
    content = written(study, tmp_path)
    assert [candidate["selected"] for candidate in content["candidates"]] == [None] * 4
    assert content["measures"][0]["start"] == {"mean": None, "standard_deviation": None, "num_seeds": 0}


def test_it_has_no_paths_of_the_machine(tmp_path):
    folder = tmp_path / "runs/zoo"
    folder.mkdir(parents=True)
    own = replace(STUDY.candidates[0], settings={"data.train.path": f"{tmp_path}/faq.jsonl"})
    study = replace(
        STUDY,
        candidates=[own, *STUDY.candidates[1:]],
        problems=[f"{folder}/verdict/soren/101/held_out.json: is missing; rerun", f"{tmp_path}/suite: was edited"],
        cautions=[f"soren: read {folder}/search/soren/00.log"],
        command=f"soren-align compare {folder}/study.yaml",
    )
    content = written(study, folder)
    assert str(tmp_path) not in json.dumps(content)
    assert content["problems"][0] == "verdict/soren/101/held_out.json: is missing; rerun"
    assert content["cautions"] == ["soren: read search/soren/00.log"]
    assert content["candidates"][0]["settings"] == {"data.train.path": ".../faq.jsonl"}
