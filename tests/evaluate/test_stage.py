"""Several models in one table: what is written, what is printed, and what is never compared."""

import gc
import io
import json
import statistics
import weakref

import numpy as np
import pytest
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from scipy import stats
from soren_align.core.errors import UserError
from soren_align.evaluate.report.results import write_summary
from soren_align.evaluate.run import workers
from soren_align.evaluate.run.stage import evaluate, preflight, print_results
from soren_align.evaluate.stats.paired import read_points
from soren_align.evaluate.suite.tasks import num_questions
from soren_align.recipe import Eval
from tests.support.lm_eval_reference import ZERO_SHOT
from tests.support.tiny_models import start_of

QUICKSTART = Eval(suite="quickstart")
COLUMNS = ["zoo_mc", "zoo_gen", "preference"]


@pytest.fixture(scope="module")
def stage(models, tmp_path_factory):
    output = tmp_path_factory.mktemp("output") / "eval"
    screen = io.StringIO()
    console = Console(file=screen, width=80)
    results = evaluate([("base", models[0]), ("SFT", models[1])], QUICKSTART, output, device="cpu", console=console)
    print_results(results, output, console)
    return results, output, screen.getvalue()


@pytest.mark.rest
def test_results_json_is_what_was_returned_and_says_how_to_repeat_it(stage, models):
    results, output, _ = stage
    assert json.loads((output / "results.json").read_text()) == results
    keys = ["format", "title", "suite", "rows", "published", "settings", "notes", "about", "points_sha256"]
    assert list(results) == keys
    assert [(row["name"], row["model"]) for row in results["rows"]] == [
        ("base", str(models[0])),
        ("SFT", str(models[1])),
    ]
    for row in results["rows"]:
        assert list(row["scores"]) == COLUMNS
        assert all(list(score)[:5] == ["value", "stderr", "low", "high", "n"] for score in row["scores"].values())
        assert [score.get("chance") for score in row["scores"].values()] == [25, None, 50]
    settings = results["settings"]
    assert settings["versions"]["lm-eval"].startswith("0.4.")
    assert settings["num_fewshot"] == dict.fromkeys(COLUMNS, 0)
    assert settings["seeds"] == {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
    assert {key: settings[key] for key in ("batch_size", "chat_template", "bos", "dtype", "device")} == {
        "batch_size": 60, "chat_template": True, "bos": False, "dtype": "float32", "device": "cpu",
    }  # fmt: skip


def test_each_question_is_kept_and_the_scores_follow_from_them(stage):
    results, output, _ = stage
    metric = {"zoo_mc": "acc", "zoo_gen": "exact_match", "preference": "acc"}
    for row in results["rows"]:
        for column in COLUMNS:
            lines = (output / "samples" / row["name"] / f"{column}.jsonl").read_text().splitlines()
            points = [json.loads(line)[metric[column]] for line in lines]
            first = json.loads(lines[0])
            assert first["prompt"].startswith("<|user|>\n")
            assert (first["task"], first["doc_id"]) == (column if column != "preference" else "zoo_preference", 0)
            assert len(first["choices"]) == len(first["filtered_resps"])
            assert len(points) == row["scores"][column]["n"] == 120
            assert row["scores"][column]["value"] == pytest.approx(100 * statistics.fmean(points))


def test_the_points_are_those_of_the_samples(stage):
    results, output, _ = stage
    rows = read_points(output)
    assert list(rows) == ["base", "SFT"]
    for row in results["rows"]:
        for column, metric in zip(COLUMNS, ("acc", "exact_match", "acc"), strict=True):
            lines = (output / "samples" / row["name"] / f"{column}.jsonl").read_text().splitlines()
            assert rows[row["name"]][column].each.tolist() == [json.loads(line)[metric] for line in lines]
            assert rows["base"][column].prompts == rows["SFT"][column].prompts


def test_the_difference_is_that_of_the_scores_and_its_interval_holds_it(stage):
    base, later = stage[0]["rows"]
    assert "differences" not in base
    for column, d in later["differences"].items():
        assert d["value"] == pytest.approx(later["scores"][column]["value"] - base["scores"][column]["value"])
        assert d["low"] <= d["value"] <= d["high"]
        assert 0 <= d["p"] <= d["p_holm"] <= 1


def test_the_summary_is_in_fractions(stage, tmp_path):
    write_summary(stage[0], tmp_path / "summary.json")
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["base", "SFT"]
    for row, full in zip(rows, stage[0]["rows"], strict=True):
        assert list(row) == ["name", *COLUMNS]
        assert all(row[c] == pytest.approx(full["scores"][c]["value"] / 100) for c in COLUMNS)


def test_an_evaluation_leaves_no_rows_of_an_earlier_one(stage, models, tmp_path):
    quiet = Console(file=io.StringIO())
    evaluate([("old", models[0])], QUICKSTART, tmp_path, device="cpu", console=quiet)
    evaluate([("new", models[0])], QUICKSTART, tmp_path, device="cpu", console=quiet)
    assert [folder.name for folder in (tmp_path / "samples").iterdir()] == ["new"]
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "points.json", "results.json", "samples", "scores-dark.png", "scores.png", "table.md",
    ]  # fmt: skip


def test_two_rows_of_one_name_are_refused_before_any_work(models, tmp_path):
    with pytest.raises(UserError, match="two models would have the name 'model' in the table"):
        evaluate([("model", models[0]), ("model", models[1])], QUICKSTART, tmp_path)


@pytest.mark.rest
def test_a_batch_that_does_not_fit_is_halved_for_all_rows(models, tmp_path, monkeypatch):
    """Batches change the last digits: a table has one size."""
    real = HFLM._model_call
    calls = []

    def little_memory(self, inputs, **how):
        calls.append(len(inputs))
        if len(inputs) > 20 and len(calls) > 6:  # not before the first row is done
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, inputs, **how)

    alive = weakref.WeakSet()
    load = workers.load_lm

    def watched(*what):
        lm = load(*what)
        gc.collect()
        assert not alive  # neither the row before nor the one that failed still holds memory
        alive.add(lm.model)
        return lm

    monkeypatch.setattr(HFLM, "_model_call", little_memory)
    monkeypatch.setattr(workers, "load_lm", watched)
    screen = io.StringIO()
    how = {"device": "cpu", "cache": tmp_path / "cache", "console": Console(file=screen, width=80)}
    results = evaluate([("base", models[0]), ("SFT", models[1])], QUICKSTART, tmp_path / "eval", **how)
    assert results["settings"]["batch_size"] == 15
    assert "out of memory with batch size 60; all models are evaluated again, with batch size 30" in screen.getvalue()
    assert all(sum(row["num_requests"].values()) == 840 for row in results["rows"])


@pytest.mark.rest
def test_the_base_is_evaluated_once_for_all_runs(models, tmp_path):
    screen = io.StringIO()
    how = {"device": "cpu", "cache": tmp_path / "cache", "console": Console(file=screen, width=80)}
    evaluate([("base", models[0])], QUICKSTART, tmp_path / "first", **how)
    results = evaluate([("base", models[0]), ("SFT", models[1])], QUICKSTART, tmp_path / "second", **how)
    assert [row["num_requests"]["computed"] for row in results["rows"]] == [0, 840]
    assert "120 questions, cached" in screen.getvalue()
    assert "cached    base 840 of 840 requests;" in screen.getvalue()


def test_what_no_evaluation_has_written_is_not_removed(models, tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"samples: was not written by an evaluation"):
        evaluate([("base", models[0])], QUICKSTART, tmp_path, device="cpu", console=Console(file=io.StringIO()))
    assert (tmp_path / "samples" / "thesis.txt").read_text() == "mine"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("limit", "said"),
    [(2, "the first 2 questions"), (5000, "on other data (4 of 1,172"), (None, "on other data (4 of")],
)
def test_what_is_no_result_of_the_benchmarks_is_not_called_one(readers, data_root, tmp_path, limit, said):
    asked = Eval(suite="commonsense-zero-shot", data_root=str(data_root), limit=limit)
    quiet = Console(file=io.StringIO())
    results = evaluate([("base", readers[0])], asked, tmp_path, device="cpu", console=quiet)
    assert results["title"].startswith("Commonsense, zero-shot: ")
    assert said in results["title"]
    assert results["title"].endswith("not the suite's result")
    assert results["title"] in (tmp_path / "table.md").read_text()
    assert results["settings"]["data"] == str(data_root)


def test_preflight_counts_the_questions_and_finds_what_is_missing(readers, data_root, tmp_path):
    asked = Eval(suite="commonsense-zero-shot", data_root=str(data_root))
    start = start_of(readers[0])
    tasks, notices = preflight(asked, *start)
    assert ({c: sum(num_questions(t).values()) for c, t in tasks.items()}, notices) == (dict.fromkeys(ZERO_SHOT, 4), [])
    with pytest.raises(UserError, match="there is no dataset folder"):
        preflight(asked.model_copy(update={"data_root": str(tmp_path)}), *start)
    with pytest.raises(UserError, match="needs vLLM, which is not installed"):
        preflight(asked.model_copy(update={"backend": "vllm"}), *start)


@pytest.mark.rest
def test_repeated_questions_are_reported_and_count_as_one_cluster(models, own_suite, tmp_path):
    """Five times the same 24 answers are no stronger evidence than these."""
    suite, questions = own_suite
    lines = questions.read_text().splitlines()[:24]
    numbered = [json.dumps(json.loads(line) | {"id": i}) for i in range(5) for line in lines]  # as in logs
    questions.write_text("".join(line + "\n" for line in numbered))
    asked = Eval(suite=str(suite), omit=["zoo_gen", "preference"])
    screen = io.StringIO()
    rows = [("base", models[0]), ("SFT", models[1])]
    results = evaluate(rows, asked, tmp_path / "output", device="cpu", console=Console(file=screen, width=500))
    notice = (
        "zoo_mc: 96 of 120 questions have the prompt and the choices of an earlier question (question 25 equals "
        "question 1)"
    )
    assert notice in screen.getvalue()
    difference = results["rows"][1]["differences"]["zoo_mc"]
    assert difference["num_clusters"] == 24
    points = [read_points(tmp_path / "output")[row]["zoo_mc"] for row in ("base", "SFT")]
    assert points[0].clusters.tolist() == [*range(24)] * 5
    once = np.subtract(points[1].each, points[0].each)[:24]
    error = once.std(ddof=1) / 24**0.5  # of equal clusters, CR2's
    assert difference["high"] - difference["low"] == pytest.approx(200 * stats.t.ppf(0.975, 23) * error)
