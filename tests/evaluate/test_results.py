"""An evaluation replaces what an evaluation wrote, in its own folder, and nothing else."""

import io
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console
from soren_align.core.errors import UserError
from soren_align.core.text import stderr_console
from soren_align.evaluate.report.results import read_results, refuse_foreign, refuse_foreign_summary, write_summary
from soren_align.evaluate.run import stage
from soren_align.evaluate.run.stage import write_results
from soren_align.launch.evaluation import run_evaluation
from soren_align.recipe import Eval
from soren_align.run.folder import RunFolder
from tests.support.result_tables import make_results

SOURCE = {"value": 1.0, "stderr": 0.5, "low": 0.0, "high": 2.0, "n": 4}


def ours(*names):
    """results.json with rows of these names."""
    rows = [{"name": name, "model": f"/models/{name}", "scores": {"acc": SOURCE}} for name in names]
    head = {"format": 1, "title": "t", "suite": "s", "rows": rows}
    return head | {"published": [], "settings": {"data": "hub"}, "notes": []}


def put(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "results.json").write_text(text)
    return folder


def evaluate(output, *names):
    """An evaluation of models that are not there: what it says before any is looked at."""
    rows = [(name, output.parent / "no-model") for name in names or ("base",)]
    stage.evaluate(rows, Eval(suite="quickstart"), output, console=Console(file=io.StringIO()))


@pytest.mark.parametrize(
    "name", ["{}", "../victim", "../../victim", "victim/../../victim", "/", "..", "", "a/b", None, 3]
)
def test_a_folder_that_results_name_is_not_removed(tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.txt").write_text("mine")
    output = put(tmp_path / "out", ours(name.format(victim) if isinstance(name, str) else name))
    (output / "samples").mkdir()
    with pytest.raises(UserError, match=r"results\.json rows\.0\.name: "):
        evaluate(output)
    with pytest.raises(UserError):
        write_results(ours("base"), {}, output)
    assert (victim / "thesis.txt").read_text() == "mine"


def test_a_link_among_the_samples_is_removed_and_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.txt").write_text("mine")
    output = put(tmp_path / "out", ours("base", "SFT"))
    (output / "samples").mkdir()
    (output / "samples" / "base").symlink_to(victim)
    (output / "samples" / "SFT").symlink_to(victim / "thesis.txt")
    write_results(make_results(), {}, output)
    assert (victim / "thesis.txt").read_text() == "mine"
    assert list((output / "samples").iterdir()) == []


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(tmp_path):
    mine = tmp_path / "thesis.txt"
    mine.write_text("mine")
    output = put(tmp_path / "out", ours("base"))
    for name in ("table.md", "scores.png"):
        (output / name).symlink_to(mine)
    for name in ("table.md.part", "scores.png.part", "results.json.part"):
        (output / name).symlink_to(mine)
    write_results(make_results(), {}, output)
    assert mine.read_text() == "mine"
    assert read_results(output) == make_results()


def test_two_evaluations_that_end_together_leave_the_files_of_one(tmp_path):
    """Each in its thread: a lock of the folder is a matter of open files, not of processes."""
    for attempt in range(3):
        output = tmp_path / str(attempt)
        output.mkdir()
        with ThreadPoolExecutor() as threads:
            both = [("base", "SFT"), ("base", "DPO")]
            futures = [
                threads.submit(write_results, ours(*names), {n: {"acc": []} for n in names}, output) for names in both
            ]
        for future in futures:
            future.result()
        rows = [row["name"] for row in (read_results(output) or {})["rows"]]
        assert tuple(rows) in both
        assert sorted(folder.name for folder in (output / "samples").iterdir()) == sorted(rows)


@pytest.mark.parametrize("file", ["results.json", "table.md", "scores.png"])
def test_what_somebody_else_wrote_is_not_replaced(tmp_path, file):
    (tmp_path / file).write_text('{"accuracy": 0.9}')
    with pytest.raises(UserError, match=re.escape(file)):
        evaluate(tmp_path)
    assert (tmp_path / file).read_text() == '{"accuracy": 0.9}'


def test_a_folder_of_samples_that_no_row_of_ours_has_is_not_replaced(tmp_path):
    put(tmp_path, ours("base"))
    (tmp_path / "samples" / "SFT").mkdir(parents=True)
    refuse_foreign(tmp_path, ["base"])
    with pytest.raises(UserError, match=r"samples/SFT: was not written by an evaluation"):
        evaluate(tmp_path, "base", "SFT")


@pytest.mark.parametrize("name", ["a/b", "..", "\x1b[31m", "x" * 300])
def test_a_row_whose_name_is_no_folders_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="cannot be the name of a folder"):
        evaluate(tmp_path / "out", name)


def test_a_place_that_cannot_be_written_to_is_refused_before_a_model_is_asked(tmp_path):
    (tmp_path / "file").write_text("mine")
    for output, reason in ((tmp_path / "file", "not a folder"), (tmp_path / "file" / "out", "file is a file")):
        with pytest.raises(UserError, match=reason):
            evaluate(output)


@pytest.mark.parametrize("damage", [
    lambda r: json.dumps(r)[:-40], lambda r: "[" * 100_000, lambda r: "[]", lambda r: r | {"rows": []},
    lambda r: r | {"settings": {"data": ["hub"]}}, lambda r: r | {"notes": [3]}, lambda r: r | {"title": None},
    lambda r: r | {"rows": [r["rows"][0] | {"scores": {"acc": {"value": "high"}}}]},
    lambda r: {key: value for key, value in r.items() if key != "suite"},
])  # fmt: skip
def test_damaged_results_are_one_sentence(tmp_path, damage):
    put(tmp_path, damage(ours("base")))
    with pytest.raises(UserError, match=r"results\.json") as error:
        evaluate(tmp_path)
    assert len(error.value.problems) == 1
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", ['{"loss": 1}', "notes", json.dumps(ours("base"))])
def test_a_summary_replaces_nothing_but_a_summary(tmp_path, text):
    file = tmp_path / "summary.json"
    refuse_foreign_summary(file)
    write_summary(make_results(), file)
    refuse_foreign_summary(file)
    file.write_text(text)
    with pytest.raises(UserError, match=r"is not a summary of an evaluation.*choose another --summary"):
        refuse_foreign_summary(file)


def test_an_evaluation_refuses_before_a_model_is_asked(tmp_path, monkeypatch):
    def asked(*_, **__):
        raise AssertionError("a model was asked")

    monkeypatch.setattr("soren_align.evaluate.run.lineage.lineages", asked)
    for place in (tmp_path, tmp_path / "thesis.json"):
        (tmp_path / "thesis.json").write_text("mine")
        files = {"output": str(tmp_path / "out"), "summary": str(place)}
        with pytest.raises(UserError, match="choose another --summary"):
            run_evaluation(["m"], Eval(suite="quickstart"), stderr_console(), **files)
    assert (tmp_path / "thesis.json").read_text() == "mine"


def test_results_stay_inside_of_a_runs_folder(tmp_path, monkeypatch):
    run = RunFolder(tmp_path / "run")
    (run.path / "eval").mkdir(parents=True)
    inside = tmp_path / "suites" / "mine" / "tasks"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert stage.output_of(run, Eval(suite="..")) == run.path / "eval" / "mine"
    assert stage.output_of(run, Eval(suite="../suite.yaml")) == run.path / "eval" / "mine"
    assert stage.output_of(run, Eval(suite="../../../suites/mine/")) == run.path / "eval" / "mine"
    with pytest.raises(UserError, match="cannot be such a name"):
        stage.output_of(run, Eval(suite="/suite.yaml"))
    (run.path / "eval" / "quickstart").symlink_to(tmp_path / "suites")
    with pytest.raises(UserError, match="is a symbolic link"):
        stage.output_of(run, Eval(suite="quickstart"))


def test_samples_can_be_read_in_a_terminal_and_control_nothing(tmp_path):
    answer = 'Grüße\x1b[2J \x9b2J \u202e \u2028 \ud800 "'
    sample = {"doc_id": 0, "doc": {}, "target": "Grüße", "arguments": [["Wie?", {}]], "resps": [[answer]]}
    sample |= {"filtered_resps": [answer], "metrics": ["exact_match"], "doc_hash": "0", "exact_match": 0.0}
    write_results(make_results(), {"SFT": {"exact": [sample]}}, tmp_path / "out")
    text = (tmp_path / "out/samples/SFT/exact.jsonl").read_text(encoding="utf-8")
    assert "Grüße" in text
    assert not set(text) & set("\x1b\x9b\u202e\u2028\ud800")
    assert text.splitlines() == [text.strip()]
    assert json.loads(text)["filtered_resps"] == [answer]
    assert list(json.loads(text))[:6] == ["doc_id", "prompt", "choices", "filtered_resps", "target", "exact_match"]
