"""Published scores are transcribed without errors, read strictly, and never compared."""

import shutil
from math import sqrt

import pytest
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.evaluate.report import tables
from soren_align.evaluate.suite.suites import load_published
from tests.support.edited_files import replace
from tests.support.result_tables import make_results

COLUMNS = {
    "open-llm-leaderboard-v1": ["arc_challenge", "hellaswag", "mmlu", "truthfulqa_mc2", "winogrande", "gsm8k"],
    "commonsense-zero-shot": ["arc_challenge", "arc_easy", "piqa", "hellaswag", "openbookqa", "winogrande"],
}
SUITES = {"paper/dpo": "open-llm-leaderboard-v1", "paper/sft": "open-llm-leaderboard-v1",
          "paper/zero-shot": "commonsense-zero-shot", "references/mistral-7b": "open-llm-leaderboard-v1",
          "references/qwen2.5-3b": "open-llm-leaderboard-v1"}  # fmt: skip
PAPERS = [name for name in SUITES if name.startswith("paper/")]
RIGHT_OR_WRONG = {"arc_challenge": 1172, "hellaswag": 10042, "mmlu": 14042, "winogrande": 1267, "gsm8k": 1319}


def rows(name):
    return load_published(name, SUITES[name])


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_rows_are_complete_and_their_averages_follow_from_the_scores(name):
    assert [row["name"] for row in rows(name)] == ["AdamW", "Muon", "HTMuon", "Soren"]
    for row in rows(name):
        *columns, last = row["scores"]
        assert (columns, last) == (COLUMNS[SUITES[name]], "average")
        mean = sum(row["scores"][column]["value"] for column in columns) / 6
        assert row["scores"]["average"] == {"value": pytest.approx(mean, abs=0.0051)}


@pytest.mark.parametrize("name", ["paper/sft", "paper/dpo"])
def test_the_papers_standard_errors_are_about_those_of_as_many_right_or_wrong_answers(name):
    # A slip of a digit would show. The paper's own deviations, up to 0.06, are named in the files; MMLU's is pooled.
    for row in rows(name):
        for column, n in RIGHT_OR_WRONG.items():
            score = row["scores"][column]
            assert score["stderr"] == pytest.approx(sqrt(score["value"] * (100 - score["value"]) / n), abs=0.06)
        assert 1.4 < row["scores"]["truthfulqa_mc2"]["stderr"] < 1.6


def test_the_papers_zero_shot_table_has_no_standard_errors():
    assert all(list(score) == ["value"] for row in rows("paper/zero-shot") for score in row["scores"].values())


def test_the_differences_that_the_papers_text_names_are_those_of_the_rows():
    """Soren minus another optimizer, as the paper's sections on SFT, DPO and downstream tasks have it in words."""
    named = {
        ("paper/sft", "HTMuon"): [0.86, 0.56, 2.69, 0.64, 0.87, None, 1.49],
        ("paper/dpo", "HTMuon"): [0.60, 1.40, 2.08, None, 0.79, 5.01, 1.65],
        ("paper/sft", "AdamW"): [None] * 6 + [3.00],
        ("paper/sft", "Muon"): [None] * 5 + [2.72, 1.68],  # the text says 2.72 of HTMuon
        ("paper/dpo", "AdamW"): [None] * 6 + [3.50],
        ("paper/dpo", "Muon"): [None] * 6 + [1.50],
        ("paper/zero-shot", "HTMuon"): [None] * 6 + [0.89],
    }
    for (name, other), differences in named.items():
        by_name = {row["name"]: [s["value"] for s in row["scores"].values()] for row in rows(name)}
        for ours, theirs, difference in zip(by_name["Soren"], by_name[other], differences, strict=True):
            assert difference is None or ours - theirs == pytest.approx(difference)


@pytest.mark.parametrize("name", ["references/qwen2.5-3b", "references/mistral-7b"])
def test_a_reference_has_the_columns_that_were_asked_with_our_shots(name):
    (row,) = rows(name)
    assert list(row["scores"]) == COLUMNS[SUITES[name]][:5]  # not GSM8K


@pytest.mark.parametrize("name", SUITES)
def test_no_published_score_is_in_a_test_of_significance(name):
    """Nothing there to test (no points, no prompts); beside two models of ours, the table compares just these."""
    for row in rows(name):
        assert list(row) == ["name", "source", "scores"]
        assert all(score.keys() <= {"value", "stderr"} for score in row["scores"].values())
    results = make_results(6, 2)
    without = tables.markdown(results)
    page = tables.markdown(results | {"published": rows(name)})
    own = [line for line in page.splitlines() if "(published)" not in line and "published scores, " not in line]
    assert own == without.splitlines()
    assert not [line for line in page.splitlines() if "(published)" in line and ("[" in line or "p " in line)]
    assert rows(name)[0]["source"] in page


def test_a_table_of_another_suite_is_refused():
    with pytest.raises(UserError, match="has published scores for suite commonsense-zero-shot, not for quickstart"):
        load_published("paper/zero-shot", "quickstart")


def test_a_file_of_ones_own_is_read_like_a_shipped_one(tmp_path):
    file = shutil.copy(shipped.published()["paper/sft"], tmp_path / "mine.yaml")
    assert load_published(str(file), "open-llm-leaderboard-v1") == rows("paper/sft")


@pytest.mark.parametrize(("old", "new", "message"), [
    ("source:", "sources:", "sources: unknown key"),
    ("suite: open-llm-leaderboard-v1", "", "suite: is required"),
    ("{value: 55.97, stderr: 1.45}", "55.97", "rows.0.scores.arc_challenge: found 55.97"),
    ("value: 55.97", "value: 5597", "rows.0.scores.arc_challenge.value: found 5597"),
    ("value: 55.97", "value: 55,97", "rows.0.scores.arc_challenge"),
    ("stderr: 1.45", "error: 1.45", "rows.0.scores.arc_challenge.error: unknown key"),
    ("name: Muon", "name: AdamW", "'AdamW' occurs twice"),
    ("rows:", "rows: [", "not valid YAML"),
])  # fmt: skip
def test_a_mistake_in_a_table_is_named(tmp_path, old, new, message):
    file = shutil.copy(shipped.published()["paper/sft"], tmp_path / "mine.yaml")
    replace(file, old, new)
    with pytest.raises(UserError) as error:
        load_published(str(file), "open-llm-leaderboard-v1")
    assert f"{file}" in str(error.value)
    assert message in str(error.value)
