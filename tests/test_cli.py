"""The commands answer quickly, refuse clearly, and never show a traceback for a user's mistake."""

import json
import subprocess
import sys

import pytest

from soren_align import __version__, shipped
from tests.support.command import run, run_process
from tests.support.cpu_time import cpu_seconds


def least_cpu_seconds(number, *arguments):
    """The least of `number` processes: other work on the machine only adds."""
    times = []
    for _ in range(number):
        before = cpu_seconds()
        run_process(*arguments)
        times.append(cpu_seconds() - before)
    return min(times)


@pytest.fixture
def bad(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("task: sft\noptimizer: {nam: soren}\ntrainer: {learning_rate: 1e-3}\n")
    return str(file)


@pytest.mark.process
@pytest.mark.sample
def test_help_takes_less_than_0_7_cpu_seconds():
    assert least_cpu_seconds(3, "--help") < 0.7


@pytest.mark.process
def test_a_bad_recipe_is_refused_in_less_than_1_5_cpu_seconds(bad):
    assert least_cpu_seconds(3, "sft", bad) < 1.5


@pytest.mark.process
def test_a_bad_recipe_is_refused_with_exit_code_2(bad):
    refused = run_process("sft", bad)
    assert refused.returncode == 2
    assert "bad.yaml:2 optimizer.nam: unknown key; did you mean 'name'?" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.process
@pytest.mark.sample
def test_neither_imports_torch(bad):
    for arguments in (["--help"], ["sft", bad], ["schema"], ["recipes"]):
        code = f"import sys; sys.argv = ['soren-align', *{arguments!r}]\n"
        code += "from soren_align.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        code += "print(sorted(m for m in ('torch', 'transformers', 'trl', 'datasets') if m in sys.modules))"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        assert out.splitlines()[-1] == "[]", arguments


def test_the_version_is_printed():
    assert run("--version").stdout == f"soren-align {__version__}\n"


def test_only_shipped_recipes_are_copied(tmp_path):
    (tmp_path / "there.yaml").write_text("task: sft\n")
    (tmp_path / "here").mkdir()
    refused = run("recipes", "copy", "../there.yaml", cwd=tmp_path / "here")
    assert refused.returncode == 2
    assert "../there.yaml: no shipped recipe" in refused.stderr
    assert not list((tmp_path / "here").iterdir())


def test_recipes_lists_what_is_shipped():
    listed = run("recipes").stdout
    assert all(name in listed for name in shipped.recipes())


def test_a_copied_recipe_works_from_any_folder(tmp_path):
    copied = run("recipes", "copy", "quickstart/sft", "mine.yaml", cwd=tmp_path)
    assert copied.returncode == 0, copied.stderr
    (tmp_path / "elsewhere").mkdir()
    planned = run("plan", "../mine.yaml", "--json", cwd=tmp_path / "elsewhere")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["steps"]["total"] > 0
    assert plan["data"]["kept"] == plan["data"]["rows"]
    assert not (tmp_path / "elsewhere" / "runs").exists()
    again = run("recipes", "copy", "quickstart/sft", "mine.yaml", cwd=tmp_path)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


def test_plan_shows_rows_an_example_the_rates_and_the_routing(tmp_path):
    shown = run("plan", "quickstart/sft", cwd=tmp_path).stdout
    for expected in ("kept", "[[", "learning rates", "linear layer", "1-dimensional", "memory per rank", "run.json"):
        assert expected in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_plan_refuses_a_batch_that_the_processes_cannot_share(tmp_path):
    refused = run("plan", "quickstart/sft", "--processes", "3", "--set", "run.global_batch_size=64", cwd=tmp_path)
    assert refused.returncode == 2
    assert "choose a run.global_batch_size that 3 divides" in refused.stderr


def test_the_schema_is_json():
    assert json.loads(run("schema").stdout)["title"] == "Recipe"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft", "quickstart/stf"], "did you mean 'quickstart/sft'"),
        (["dpo", "quickstart/sft"], "this is a recipe for `soren-align sft`"),
        (["push", "nowhere", "me/zoo"], "nowhere: is no run folder (run.json)"),
        (["push", "nowhere", "zoo"], "zoo: write OWNER/NAME"),
        (["recipes", "copy", "nothing"], "nothing: no shipped recipe; write one of "),
        (["eval", "nowhere", "--suite", "quickstart", "--output", "out"], "nowhere"),
        (["eval", "./nowhere", "--suite", "quickstart", "--output", "out"], "neither a run folder (run.json), nor a"),
        (["eval", "owner/model", "--output", "out"], "--suite: is required"),
        (["eval", "owner/model", "--suite", "quickstart"], "--output: is required"),
        (
            ["eval", "owner/model", "--suite", "quikstart", "--output", "o"],
            "--suite: no suite named 'quikstart', nor such",
        ),
        (
            ["eval", "owner/model", "--suite", "quickstart", "--output", "o", "--quote", "paper/sfx"],
            "did you mean 'paper/sft'",
        ),
        (
            ["eval", "owner/model", "--suite", "quickstart", "--output", "o", "--data-root", "no"],
            "--data-root: there is no",
        ),
        (
            ["eval", "owner/model", "--suite", "quickstart", "--output", "o", "--backend", "vllm"],
            "vLLM is not installed",
        ),
        (["eval", "here/model", "--suite", "quickstart", "--output", "o"], "here/model: there is no such folder"),
        (["eval", "owner/model", "--suite", "quickstart", "--output", "o", "--dtype", "int8"], "--dtype: found 'int8'"),
    ],
)
def test_a_wrong_name_is_a_sentence_and_exit_code_2(tmp_path, arguments, message):
    (tmp_path / "here").mkdir()
    refused = run(*arguments, cwd=tmp_path)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({"WORLD_SIZE": "2"}, (), "WORLD_SIZE is 2 and RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, ("--processes", "4"), "--processes 4: a launcher has already started 2"),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, (), "accelerate launch --cpu starts one process"),
        ({}, ("--processes", "0"), "greater than or equal to 1"),
        (
            {},
            ("--processes", "2", "--set", "run.global_batch_size=64"),
            "write trainer.per_device_train_batch_size: 32",
        ),
    ],
)
def test_processes_that_nobody_could_run_are_refused(tmp_path, environment, arguments, message):
    clean = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    refused = run("sft", "quickstart/sft", *arguments, cwd=tmp_path, env=clean | environment)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_the_package_has_a_version():
    assert __version__.count(".") == 2
