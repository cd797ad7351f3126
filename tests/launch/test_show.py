"""`show`, `runs` and `curves` read the files of runs alone: what they print and draw."""

import json
import math

import pytest
from PIL import Image
from soren_align.cli.app import main
from soren_align.core.errors import UserError
from soren_align.launch import show
from soren_align.run.curves import HELD_OUT, LOSS, MAX_POINTS, braille, read_curves
from soren_align.run.folder import RunFolder, metrics_line, parse_metrics, read_metrics
from soren_align.run.record import divergence
from tests.support.run_folders import add_results, finished_run, lock_of_another_process


def write_metrics(file, *lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path):
    folder = finished_run(tmp_path / "runs" / "a")
    losses = [{"step": step, "loss": 4 / step} for step in range(1, 101)]
    held_out = [{"step": step, "eval_loss": loss} for step, loss in ((40, 0.2), (60, 0.1), (100, 0.3))]
    write_metrics(folder.metrics, *losses, *held_out)
    add_results(folder)
    return folder


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_a_curve_has_few_points_with_the_mean_of_all_values_and_the_exact_lowest(tmp_path):
    losses = [math.sin(i) + 2 for i in range(10 * MAX_POINTS)]
    write_metrics(tmp_path / "m", *({"step": i, LOSS: v, HELD_OUT: v} for i, v in enumerate(losses)))
    curves = read_curves(tmp_path / "m")
    values = [value for _, value in curves[LOSS]]
    assert MAX_POINTS <= len(values) < 2 * MAX_POINTS
    assert math.fsum(values) / len(values) == pytest.approx(math.fsum(losses) / len(losses), rel=1e-2)
    assert curves.best == (losses.index(min(losses)), min(losses))
    assert curves.last == (len(losses) - 1, losses[-1])


def test_damaged_lines_and_values_are_left_out(tmp_path):
    damaged = '{"step": 3, "loss": "x"}\n[1]\n{"step": null}\n{"step": 1e999, "loss": 1}\n{"loss": 2}\n\xff\n{"st'
    lines = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n{"step": 2, "loss": Infinity}\n'
    (tmp_path / "m").write_text(lines + damaged, encoding="latin-1")
    assert read_curves(tmp_path / "m")[LOSS] == [(1, 2.0)]
    assert read_curves(tmp_path / "missing").by_key == {}
    assert [line["step"] for line in read_metrics(tmp_path / "m")] == [1, 2, 2, 3]


def test_what_is_not_finite_is_a_text_in_metrics_jsonl_and_a_number_again(tmp_path):
    line = metrics_line({"step": 1, "loss": math.inf, "low": -math.inf, "eval_loss": math.nan, "x": 0.5, "n": None})
    values = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert values == {"step": 1, "loss": "Infinity", "low": "-Infinity", "eval_loss": "NaN", "x": 0.5, "n": None}
    again = parse_metrics(line)
    assert (again["loss"], again["low"], math.isnan(again["eval_loss"])) == (math.inf, -math.inf, True)
    assert divergence([again]) == "the loss at the end is NaN or infinite"
    (tmp_path / "metrics.jsonl").write_text(line)
    assert RunFolder(tmp_path).drop_measurements_after(1, [again]) == []  # the checkpoint's log is the same
    assert (tmp_path / "metrics.jsonl").read_text() == line
    assert parse_metrics('{"step": 1, "completion": "NaN"}')["completion"] == "NaN"


def test_a_chart_shows_the_line_the_evaluations_and_the_lowest():
    line = [(step, 10 - step) for step in range(11)]
    assert braille(line, 25, 3, [(2, 8), (10, 0)], (10, 0)) == [
        "10 ⠉⠑⠒⠤o⢄⣀",
        "          ⠉⠉⠢⠤⢄⣀⡀",
        " 0              ⠈⠉⠉⠒⠢⠤⠤*",
        "   0                  10",
    ]


@pytest.mark.parametrize(
    ("losses", "is_said"), [((0.3, 0.1, 0.2), True), ((0.3, 0.2, 0.1), False), ((0.1, 0.1005), False)]
)
def test_a_rise_of_the_held_out_loss_is_said(tmp_path, losses, is_said):
    write_metrics(tmp_path / "m", *({"step": 10 * i, HELD_OUT: loss} for i, loss in enumerate(losses)))
    expected = ["the held-out loss was lowest at step 10 (0.1), and was 0.2 at step 20"] if is_said else []
    assert read_curves(tmp_path / "m").describe() == expected


def test_show_prints_status_curve_scores_and_next_commands(run, capsys, monkeypatch):
    monkeypatch.chdir(run.path.parent.parent)
    assert main(["show", "runs/a"]) == 0
    text = capsys.readouterr().out
    assert "runs/a: SFT, finished" in text
    assert "the held-out loss was lowest at step 60 (0.1), and was 0.3 at step 100" in " ".join(text.split())
    assert "curve     loss, o held-out loss, * lowest held-out loss" in text
    assert [line.split() for line in text.splitlines() if line.startswith("SFT  ")] == [["SFT", "100.0", "±", "0.0"]]
    assert "\nSFT is right on 120 of 120 zoo_mc questions (before: 24).\n" in text
    assert "next      soren-align chat runs/a --compare start" in text
    assert all(len(line) <= 80 for line in text.splitlines() if "pytest" not in line)  # the start is a long path


def test_show_of_a_run_that_has_not_ended_names_the_command_that_resumes_it(run, capsys, tmp_path, monkeypatch):
    run.update(status="training", last_error="stopped by a signal")
    with lock_of_another_process(run):
        show.show(str(run))
    text = capsys.readouterr().out
    assert "notice    another process is training this run\n" in text
    assert "soren-align sft" not in text
    show.show(str(run))
    text = capsys.readouterr().out
    assert "last error: stopped by a signal" in " ".join(text.split())
    assert "notice    this run was interrupted; the next command resumes it\n" in text
    assert f"next      soren-align sft {run.recipe}\n" in text
    monkeypatch.chdir(run.path.rename(tmp_path / "-rf").parent)
    assert show.next_commands(RunFolder("-rf"), {"status": "training", "task": "sft"})[1] == [
        "soren-align sft ./-rf/recipe.yaml"
    ]


def test_show_as_json_holds_the_record_the_curves_the_scores_and_the_samples(run, capsys):
    run.samples.write_text('{"step": 5, "prompt": "Why?", "completion": "So."}\n{"step": 6, "prom')
    show.show(str(run), as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert values["run"]["status"] == "finished"
    assert values["lowest_held_out_loss"] == [60, 0.1]
    assert len(values["curves"][LOSS]) == 100
    assert values["evaluations"][0]["rows"][1]["scores"]["zoo_mc"]["value"] == 100
    assert values["samples"] == [{"step": 5, "prompt": "Why?", "completion": "So."}]


def test_runs_are_listed_with_both_losses_and_a_table_of_scores_for_each_suite(run, capsys, monkeypatch):
    held_out = {"num_examples": 9, "evaluations": [{"step": 0, "loss": 4.5}, {"step": 600, "loss": 0.25}]}
    other = finished_run(run.path.parent / "study" / "trials" / "b", training={"held_out": held_out})
    add_results(other, suite="own")
    add_results(other)
    (run.path.parent / "loop").symlink_to(run.path.parent)
    (run.path.parent / "c").mkdir()
    (run.path.parent / "c" / "run.json").write_text("{")
    monkeypatch.chdir(run.path.parent.parent)
    show.runs("runs", as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert [value["run"] for value in values] == ["runs/a", "runs/c", "runs/study/trials/b"]
    assert values[2]["scores"] == {"own": {"zoo_mc": 100.0}, "quickstart": {"zoo_mc": 100.0}}
    show.runs("runs")
    text, line = capsys.readouterr().out, "run.json:1 cannot be read as JSON: Expecting property name"
    date = run.record()["started"][:10]
    assert [line.split() for line in text.splitlines() if line] == [
        ["training", "held-out"],
        ["run", "status", "task", "started", "steps", "loss", "loss"],
        ["runs/a", "finished", "sft", date, "600", "0.0023", "-"],
        ["runs/c", "damaged"],
        ["runs/study/trials/b", "finished", "sft", date, "600", "0.0023", "0.25"],
        ["damaged", "runs/c:", *line.split()],
        ["enclosed", "in", "double", "quotes;", "correct", "the", "file,", "or", "restore", "a", "copy"],
        ["quickstart,", "%", "zoo_mc"],
        ["runs/a", "100.0"],
        ["runs/study/trials/b", "100.0"],
        ["own,", "%", "zoo_mc"],
        ["runs/study/trials/b", "100.0"],
    ]


def edit_results(run, change):
    """Call `change` with each row of the run's results, and write the results."""
    file = run.evaluation("quickstart") / "results.json"
    results = json.loads(file.read_text())
    for row in results["rows"]:
        change(row)
    file.write_text(json.dumps(results))


@pytest.mark.parametrize("command", ["show", "curves"])
def test_without_any_run_a_sentence_names_a_command_that_makes_one(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main([command]) == 2
        message = capsys.readouterr().err
        words = "has no runs; name another folder, or train with `soren-align sft quickstart/sft`"
        assert message.startswith(f"error: runs: {words}")
        (tmp_path / "runs").mkdir(exist_ok=True)


def test_after_too_few_questions_more_questions_come_next_and_no_upload(run, capsys):
    for num_questions, is_enough in ((19, False), (20, True)):
        edit_results(run, lambda row, num=num_questions: row["scores"]["zoo_mc"].update(n=num))
        show.show(str(run))
        text = " ".join(capsys.readouterr().out.split())
        reason = "too few questions to compare models; add questions to the suite quickstart, 20 or more, and"
        assert (f"notice zoo_mc: {reason}" in text, "push" in text) == (not is_enough, is_enough)
        assert text.endswith(f"soren-align eval {run}") == (not is_enough)


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({"path": "faq.csv", "columns": {"instruction": "question", "output": "answer"}}, " --data faq.csv"),
        ({"path": "my faq.jsonl", "columns": {}, "layout": "Alpaca instructions and outputs, as turns"},
         " --data 'my faq.jsonl'"),
        ({"path": "a.csv", "columns": {"instruction": "ask", "output": "reply"}},
         " --data a.csv --question ask --answer reply"),
        ({"path": "chat.jsonl", "layout": "chat messages"}, None),
        ({"path": "owner/name", "columns": {"instruction": "question", "output": "answer"}}, None),
    ],
)  # fmt: skip
def test_after_a_training_without_scores_the_way_to_scores_comes_next(tmp_path, capsys, monkeypatch, changes, command):
    monkeypatch.chdir(tmp_path)
    run = finished_run("runs/a")
    data = run.record()["data"]
    run.update(data={**data, "train": {**data["train"], **changes}})
    show.show("runs/a")
    text = capsys.readouterr().out
    assert "notice    no scores yet: " in text
    expected = f"new NAME --model runs/a/start{command}" if command else "eval runs/a --suite SUITE"
    assert text.endswith(f"          soren-align {expected}\n")
    assert "push" not in text
    run.update(skipped_suite="my questions")
    show.show("runs/a")
    assert capsys.readouterr().out.endswith("          soren-align eval runs/a --suite 'my questions'\n")


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_folder_without_runs_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"no such folder|has no runs"):
        show.runs(str(tmp_path / name))


def test_the_curves_of_runs_are_one_picture_for_a_light_and_one_for_a_dark_page(run, tmp_path, capsys):
    other = finished_run(tmp_path / "runs" / "b")
    lines = [{"step": 1, "loss": 3, "rewards/margins": 0.1}, {"step": 2, "loss": 1, "rewards/margins": 2}]
    write_metrics(other.metrics, *lines)
    picture = tmp_path / "two.png"
    show.curves([str(run), str(other)], output=str(picture))
    assert "0.1 at step 60" in capsys.readouterr().out
    first = picture.read_bytes()
    show.curves([str(run), str(other)], output=str(picture))
    assert picture.read_bytes() == first
    light, dark = (Image.open(tmp_path / name).convert("L") for name in ("two.png", "two-dark.png"))
    assert light.size == dark.size
    assert light.getpixel((0, 0)) == 255
    assert dark.getpixel((0, 0)) < 40


@pytest.mark.parametrize("output", ["curves.pdf", "missing/curves.png"])
def test_curves_are_refused_where_they_cannot_be_written(run, output):
    with pytest.raises(UserError, match="--output"):
        show.curves([str(run)], output=output)
