"""The table shows what the results hold: every number, whole, in eighty columns, and quoted rows apart."""

import io
import re

import pytest
from rich.console import Console

from soren_align.evaluate import tables
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
    results = make_results(num_columns, num_rows, num_quoted=4, average=num_columns == 6)
    shown = screen(results)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "…" not in shown
    head, *rows = cells(tables.markdown(results))
    assert len(head) == 1 + len(results["rows"][0]["scores"])
    for cell in [*head, *(cell for row in rows for cell in row[1:])]:
        for line in cell:
            assert re.search(rf"(^|  ){re.escape(line)}(  |\s*$)", shown, re.MULTILINE), line


def test_differences_of_a_hundred_points_still_fit():
    results = make_results(3, 2, average=False)
    for d in results["rows"][1]["differences"].values():
        d |= {"value": 100.0, "low": 96.8, "high": 100.0}
    results["rows"][1]["name"] = "a-folder-with-a-long-name"
    shown = screen(results)
    assert shown.count("+100.0 [+96.8, +100.0]") == 3
    assert "…" not in shown


def test_a_cell_is_the_score_its_difference_with_interval_and_the_corrected_p():
    results = make_results(1, 2, average=False)
    row = results["rows"][1]
    row["scores"]["arc_challenge"] |= {"value": 24.06, "stderr": 1.24}
    row["differences"]["arc_challenge"] |= {"value": 0.94, "low": -0.5, "high": 2.38, "p": 0.01, "p_holm": 0.06}
    assert cells(tables.markdown(results))[2][1] == ["24.1 ± 1.2", "+0.9 [-0.5, +2.4]", "p 0.060"]
    assert len(cells(tables.markdown(results))[1][1]) == 1  # the first row is held against nothing


@pytest.mark.parametrize(
    ("p_holm", "shown"),
    [(0.0, "* p < 0.001"), (0.00099, "* p < 0.001"), (0.0124, "* p 0.012"), (0.05, "p 0.050"), (1.0, "p 1.000")],
)
def test_the_p_that_is_shown_and_starred_is_the_corrected_one(p_holm, shown):
    results = make_results(1, 2, average=False)
    results["rows"][1]["differences"]["arc_challenge"] |= {"p": 0.0, "p_holm": p_holm}
    assert cells(tables.markdown(results))[2][1][2] == shown


def test_the_legend_counts_the_comparisons_and_leaves_quoted_rows_out():
    results = make_results(6, 4, num_quoted=4)
    legend = "\n".join(tables.notes(results))
    assert "Holm's correction for the 21 comparisons" in legend
    assert "McNemar" in legend
    alone = "\n".join(tables.notes(make_results(6, 1)))
    assert "McNemar" not in alone


def test_quoted_rows_come_last_are_marked_and_are_held_against_nothing():
    results = make_results(6, 2, num_quoted=4)
    del results["quoted"][0]["scores"]["gsm8k"], results["quoted"][0]["scores"]["mmlu"]["stderr"]
    rows = {row[0][0]: row[1:] for row in cells(tables.markdown(results))[1:]}
    quoted = ["AdamW (quoted)", "Muon (quoted)", "HTMuon (quoted)", "Soren (quoted)"]
    assert list(rows) == ["base", "SFT", *quoted]
    assert all(len(cell) == 1 for name in quoted for cell in rows[name])
    assert rows["AdamW (quoted)"][COLUMNS.index("gsm8k")] == ["-"]
    assert "±" not in rows["AdamW (quoted)"][COLUMNS.index("mmlu")][0]
    sources = [note for note in tables.notes(results) if note.startswith("quoted")]
    assert sources == ["quoted, neither asked here nor compared: Phi Van et al., Table 3"]


def test_other_readings_of_a_score_stand_beneath_the_table():
    results = make_results(6, 2)
    for row, value in zip(results["rows"], (24.06, 25.0), strict=True):
        row["scores"]["mmlu"]["also"] = {"mean over subjects": {"value": value}}
        row["scores"]["gsm8k"]["also"] = {"flexible-extract": {"value": value, "stderr": 1.2}}
    notes = tables.notes(results)
    assert "mmlu, mean over subjects: base 24.1, SFT 25.0" in notes
    assert "gsm8k, flexible-extract: base 24.1 ± 1.2, SFT 25.0 ± 1.2" in notes


def test_cut_prompts_are_told_by_model_and_task():
    results = make_results(6, 3)
    assert not [note for note in tables.notes(results) if "cut" in note]
    results["rows"][1]["cut"] = {"mmlu": 0, "gsm8k": 12}
    results["rows"][2]["cut"] = {"mmlu": 3, "gsm8k": 12}
    told = "prompts cut to fit the model: SFT: gsm8k 12; DPO: mmlu 3, gsm8k 12"
    assert told in tables.notes(results)


def test_notes_of_the_suite_are_passed_on():
    results = make_results(6, 1)
    results["notes"] = ["limited to 8 questions a task"]
    assert "limited to 8 questions a task" in tables.notes(results)
    assert "limited to 8 questions a task" in screen(results)


def test_every_setting_is_told_known_or_not():
    results = make_results(6, 1)
    settings = results["settings"]
    settings |= {"metrics": {"mmlu": "acc,none", "gsm8k": "exact_match,strict-match"}, "new": {"a": True, "b": None}}
    told = "\n".join(tables.notes(results))
    for words in (
        "lm-eval 0.4.13, transformers 5.23.0",
        "task versions: arc_challenge 1.0",
        "gsm8k 3.0",
        "shots: arc_challenge 25, hellaswag 10",
        "metrics: mmlu acc, gsm8k exact_match/strict-match",
        "seeds: random 0, numpy 1234, torch 1234, fewshot 1234",
        "chat template off; BOS off; prompts up to 4096 tokens",
        "dtype bfloat16; device cuda; backend hf; batch size 8; processes 2",
        "new a on, b None",
    ):
        assert words in told
    results["settings"] = {"dtype": "float32", "max_length": None}
    assert tables.notes(results)[-1] == "dtype float32"
    results["rows"][0]["scores"] = {c: {**s, "n": 120} for c, s in results["rows"][0]["scores"].items() if "n" in s}
    assert tables.notes(results)[-1] == "questions: 120; dtype float32"


def test_names_are_shown_as_they_are_not_read_as_markup():
    results = make_results(3, 2, average=False)
    results["rows"][1]["name"] = "[red]model"
    assert "[red]model" in screen(results)
