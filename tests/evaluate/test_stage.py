"""Several models in one table: what is written, what is printed, and what is never compared."""

import io
import json
import statistics

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from soren_align.evaluate import evaluate, summary
from soren_align.recipe import UserError

from .conftest import make_model

COLUMNS = ["zoo_mc", "zoo_gen", "preference"]


@pytest.fixture(scope="module")
def stage(models, tmp_path_factory):
    output = tmp_path_factory.mktemp("output") / "eval"
    screen = io.StringIO()
    console = Console(file=screen, width=80)
    results = evaluate([("base", models[0]), ("SFT", models[1])], "quickstart", output, device="cpu", console=console)
    return results, output, screen.getvalue()


def test_results_json_is_what_was_returned_and_says_how_to_repeat_it(stage, models):
    results, output, _ = stage
    assert json.loads((output / "results.json").read_text()) == results
    assert list(results) == ["title", "suite", "rows", "settings"]
    assert [(row["name"], row["model"]) for row in results["rows"]] == [
        ("base", str(models[0])),
        ("SFT", str(models[1])),
    ]
    for row in results["rows"]:
        assert list(row["scores"]) == COLUMNS
        assert all(list(score) == ["value", "stderr", "n"] for score in row["scores"].values())
    settings = results["settings"]
    assert settings["versions"]["lm-eval"].startswith("0.4.")
    assert settings["num_fewshot"] == dict.fromkeys(COLUMNS, 0)
    assert settings["seeds"] == {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
    assert {key: settings[key] for key in ("batch_size", "chat_template", "bos", "dtype", "device")} == {
        "batch_size": 60,
        "chat_template": True,
        "bos": False,
        "dtype": "float32",
        "device": "cpu",
    }


def test_each_question_is_kept_and_the_scores_follow_from_them(stage):
    results, output, _ = stage
    metric = {"zoo_mc": "acc", "zoo_gen": "exact_match", "preference": "acc"}
    for row in results["rows"]:
        for column in COLUMNS:
            lines = (output / "samples" / row["name"] / f"{column}.jsonl").read_text().splitlines()
            points = [json.loads(line)[metric[column]] for line in lines]
            assert len(points) == row["scores"][column]["n"] == 120
            assert row["scores"][column]["value"] == pytest.approx(100 * statistics.fmean(points))


def test_the_difference_is_that_of_the_scores_and_its_interval_holds_it(stage):
    base, later = stage[0]["rows"]
    assert "differences" not in base
    for column, d in later["differences"].items():
        assert d["value"] == pytest.approx(later["scores"][column]["value"] - base["scores"][column]["value"])
        assert d["low"] <= d["value"] <= d["high"]
        assert 0 <= d["p"] <= d["p_holm"] <= 1


def test_the_page_has_a_row_a_model_and_the_numbers_of_the_results(stage):
    results, output, _ = stage
    page = (output / "table.md").read_text()
    assert "| model | zoo_mc | zoo_gen | preference |" in page
    base, later = results["rows"]
    score, d = later["scores"]["zoo_mc"], later["differences"]["zoo_mc"]
    assert f"| base | {base['scores']['zoo_mc']['value']:.1f} ± " in page
    cell = f"{score['value']:.1f} ± {score['stderr']:.1f}<br>{d['value']:+.1f} [{d['low']:+.1f}, {d['high']:+.1f}]"
    assert f"| SFT | {cell}<br>" in page
    assert f"lm-eval {results['settings']['versions']['lm-eval']}" in page


def test_the_terminal_shows_whole_cells_in_eighty_columns(stage):
    _, output, screen = stage
    assert max(len(line.rstrip()) for line in screen.splitlines()) <= 80
    rows = [line for line in (output / "table.md").read_text().splitlines() if line.startswith(("| base", "| SFT"))]
    cells = [part.strip() for row in rows for cell in row.split("|") for part in cell.split("<br>")]
    assert [part for part in cells if part not in screen] == []
    assert "evaluated base in" in screen
    assert "evaluated SFT in" in screen
    assert not [line for line in screen.splitlines() if "…" in line]


def test_the_summary_is_in_fractions(stage):
    rows = summary(stage[0])["rows"]
    assert [row["name"] for row in rows] == ["base", "SFT"]
    for row, full in zip(rows, stage[0]["rows"], strict=True):
        assert list(row) == ["name", *COLUMNS]
        assert all(row[c] == pytest.approx(full["scores"][c]["value"] / 100) for c in COLUMNS)


def test_an_evaluation_leaves_no_rows_of_an_earlier_one(stage, models, tmp_path):
    quiet = Console(file=io.StringIO())
    evaluate([("old", models[0])], "quickstart", tmp_path, device="cpu", console=quiet)
    evaluate([("new", models[0])], "quickstart", tmp_path, device="cpu", console=quiet)
    assert [folder.name for folder in (tmp_path / "samples").iterdir()] == ["new"]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["results.json", "samples", "table.md"]


def test_models_that_were_asked_in_other_words_are_not_compared(models, tmp_path):
    other = make_model(tmp_path / "other", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|assistant|>", "<|user|>")
    tokenizer.save_pretrained(other)
    rows = [("base", models[0]), ("SFT", other)]
    with pytest.raises(UserError, match="zoo_mc: SFT was asked in other words than base"):
        evaluate(rows, "quickstart", tmp_path / "eval", device="cpu", console=Console(file=io.StringIO()))
    assert not (tmp_path / "eval").exists()


def test_two_rows_of_one_name_are_refused_before_any_work(models, tmp_path):
    with pytest.raises(UserError, match="two models would stand in the table as 'model'"):
        evaluate([("model", models[0]), ("model", models[1])], "quickstart", tmp_path)
