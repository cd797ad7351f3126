"""The table shows what the results hold: every number, whole, in eighty columns, and published scores apart."""

import io
import re

import pytest
from rich.console import Console
from soren_align.evaluate.report import tables
from tests.support.result_tables import COLUMNS, make_results


def screen(results, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(tables.terminal(results), highlight=False)
    return out.getvalue()


def cells(page):
    """The page's table: rows of cells, each a list of lines."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip().split("<br>") for cell in row] for row in rows if "---" not in row[0]]


@pytest.mark.parametrize("num_columns", [3, 6])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_the_terminal_shows_every_cell_whole_in_eighty_columns(num_columns, num_rows):
    results = make_results(num_columns, num_rows, num_published=4, average=num_columns == 6)
    shown = screen(results)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "…" not in shown
    head, *rows = cells(tables.markdown(results))
    assert len(head) == 1 + len(results["rows"][0]["scores"])
    for cell in [*head, *(cell for row in rows for cell in row[1:])]:
        for line in cell:
            assert re.search(rf"(^|  ){re.escape(line)}(  |\s*$)", shown, re.MULTILINE), line


def test_a_cell_is_the_score_its_difference_with_interval_and_the_corrected_p():
    results = make_results(1, 2, average=False)
    row = results["rows"][1]
    row["scores"]["arc_challenge"] |= {"value": 24.06, "stderr": 1.24}
    row["differences"]["arc_challenge"] |= {"value": 0.94, "low": -0.5, "high": 2.38, "p": 0.01, "p_holm": 0.06}
    assert cells(tables.markdown(results))[2][1] == ["24.1 ± 1.2", "+0.9 [-0.5, +2.4]", "p 0.060"]
    assert len(cells(tables.markdown(results))[1][1]) == 1  # the first row is held against nothing


def test_few_questions_have_no_interval_and_no_p():
    results = make_results(2, 3, average=True)
    for row in results["rows"]:
        row["scores"]["arc_challenge"] |= {"n": 19, "also": {"acc": {"value": 50.0}}}
        row["scores"]["hellaswag"]["n"] = 20
    difference = {"value": 60.0, "low": 20.4, "high": 99.6, "p": 0.001, "p_holm": 0.002}
    for row in results["rows"][1:]:
        row["differences"]["arc_challenge"] = difference
    results["rows"][2]["start"] = {"name": "SFT", "differences": {"arc_challenge": difference}}
    page = tables.markdown(results)
    few, enough, average = cells(page)[2][1:]
    assert few[1:] == ["+60.0", "too few questions"]
    assert "[" in enough[1]
    assert "[" in average[1]  # of 39 questions
    assert "20.4" not in page + screen(results)
    assert (
        "with fewer than 20 questions, a difference has no interval and no p; number of questions: arc_challenge 19"
        in page
    )
    for row in results["rows"]:
        row["scores"]["arc_challenge"]["n"] = row["scores"]["hellaswag"]["n"] = 9
    assert "p-value" not in tables.markdown(results)  # no legend of what is not there


@pytest.mark.parametrize(
    ("p_holm", "shown"),
    [
        (0.0, "* p < 0.001"),
        (0.00099, "* p < 0.001"),
        (0.0124, "* p 0.012"),
        (0.05, "p 0.050"),
        (1.0, "not distinguishable"),
    ],
)
def test_the_p_that_is_shown_and_starred_is_the_corrected_one(p_holm, shown):
    results = make_results(1, 2, average=False)
    results["rows"][1]["differences"]["arc_challenge"] |= {"p": 0.0, "p_holm": p_holm}
    assert cells(tables.markdown(results))[2][1][2] == shown


def test_the_legend_counts_the_comparisons_without_published_scores():
    results = make_results(6, 4, num_published=4)
    legend = "\n".join(tables.notes(results))
    assert "Holm-corrected for the 21 comparisons" in legend
    assert "McNemar" in legend
    assert "intervals are not corrected: an interval may exclude 0 although p is above 0.05" in legend
    alone = "\n".join(tables.notes(make_results(6, 1)))
    assert "McNemar" not in alone


def test_published_scores_come_last_are_marked_and_are_not_compared():
    results = make_results(6, 2, num_published=4)
    del results["published"][0]["scores"]["gsm8k"], results["published"][0]["scores"]["mmlu"]["stderr"]
    rows = {row[0][0]: row[1:] for row in cells(tables.markdown(results))[1:]}
    published = ["AdamW (published)", "Muon (published)", "HTMuon (published)", "Soren (published)"]
    assert list(rows) == ["base", "SFT", *published]
    assert all(len(cell) == 1 for name in published for cell in rows[name])
    assert rows["AdamW (published)"][COLUMNS.index("gsm8k")] == ["-"]
    assert "±" not in rows["AdamW (published)"][COLUMNS.index("mmlu")][0]
    sources = [note for note in tables.notes(results) if note.startswith("published")]
    assert sources == ["published scores, not evaluated here and not compared: Phi Van et al., Table 3"]


def test_truncated_prompts_are_counted_by_model_and_task():
    results = make_results(6, 3)
    assert not [note for note in tables.notes(results) if "truncated" in note]
    results["rows"][1]["truncated"] = {"mmlu": 0, "gsm8k": 12}
    results["rows"][2]["truncated"] = {"mmlu": 3, "gsm8k": 12}
    expected = "prompts truncated to the model's context: SFT: gsm8k 12; DPO: mmlu 3, gsm8k 12"
    assert expected in tables.notes(results)


def test_a_row_is_compared_with_its_start_in_a_note():
    results = make_results(2, 3, average=False)
    assert "its start" not in screen(results)
    difference = {"value": 0.94, "low": -0.5, "high": 2.38, "p": 0.01, "p_holm": 0.02}
    results["rows"][2]["start"] = {"name": results["rows"][1]["name"], "differences": {"arc_challenge": difference}}
    names = [row["name"] for row in results["rows"]]
    note = f"{names[2]} minus {names[1]}, its starting checkpoint (p corrected for this line alone): arc_challenge"
    assert f"{note} +0.9 [-0.5, +2.4], * p 0.020" in tables.notes(results)
