"""The commands answer quickly, refuse clearly, and never show a traceback for a user's mistake."""

import json
import os

import pytest
from soren_align import __version__
from soren_align.core import shipped
from soren_align.study.config import load_study

from tests.support.command import imported, run
from tests.support.run_folders import add_results, finished_run


@pytest.fixture
def bad(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("task: sft\noptimizer: {nam: soren}\ntrainer: {learning_rate: 1e-3}\n")
    return str(file)


def test_a_bad_recipe_is_refused_with_exit_code_2(bad):
    assert "bad.yaml:2 optimizer.nam: unknown key; did you mean 'name'?" in run("sft", bad, code=2).stderr


@pytest.mark.process
@pytest.mark.sample
def test_help_and_refusals_do_not_import_torch(bad, tmp_path):
    (tmp_path / "suite.yaml").write_text("title: Mine\ntasks: [{task: mine}]\n")
    suite, model = str(tmp_path / "suite.yaml"), str(shipped.ROOT / "recipes/quickstart/base")
    others = [["plan", "quickstart/sft", "--set", f"eval.suite={suite}"]]
    others.append(["plan", "quickstart/sft", "--set", "model.name_or_path=owner/nowhere", "model.init_seed=null"])
    others.append(["eval", model, "--suite", suite, "--output", str(tmp_path / "out")])
    for arguments in (
        ["--help"], ["sft", bad], ["schema"], ["recipes"], ["docs", "data"], ["chat", "nowhere/"], *others,
    ):  # fmt: skip
        code = f"from soren_align.cli.app import main; main({arguments!r})"
        assert not imported(code, ["torch", "transformers", "trl", "datasets"]), arguments


@pytest.mark.process
def test_show_and_runs_import_nothing_that_they_do_not_need(tmp_path):
    add_results(finished_run(tmp_path / "runs/a"))
    needless = "torch numpy matplotlib ruamel.yaml jinja2 concurrent.futures rich.live soren_align.core.document "
    needless += "soren_align.recipe"
    for arguments in (["runs"], ["show"]):
        code = f"from soren_align.cli.app import main; assert main({arguments!r}) == 0"
        assert not imported(code, needless.split(), cwd=tmp_path)


def test_the_version_is_printed():
    assert run("--version").stdout == f"soren-align {__version__}\n"


def test_only_shipped_recipes_are_copied(tmp_path):
    (tmp_path / "there.yaml").write_text("task: sft\n")
    (tmp_path / "here").mkdir()
    refused = run("recipes", "copy", "../there.yaml", cwd=tmp_path / "here", code=2)
    assert "../there.yaml: is no shipped recipe" in refused.stderr
    assert not list((tmp_path / "here").iterdir())


def test_recipes_lists_what_is_shipped():
    listed = run("recipes").stdout
    lines = [line.split()[0] for line in listed.splitlines() if line]
    assert lines[:2] == ["quickstart/", "sft"]
    names = [name.partition("/") for name in shipped.recipes()]
    many = ("llama-c4", "qwen3-0.6b")
    assert {f"{folder}/" for folder, _, _ in names} | {rest for folder, _, rest in names if folder not in many} <= {
        *lines
    }
    assert "{scratch,pretrained}-{adamw,htmuon,muon,released-exact,released-soren,soren}" in lines
    assert "{60m,135m,350m,1b}-{adamw,htmuon,muon,released-exact,released-soren,soren}" in lines
    assert {*shipped.studies()} <= {*lines}
    assert max(map(len, listed.splitlines())) <= 80


def test_a_copied_study_is_planned_from_any_folder(tmp_path):
    copied = run("recipes", "copy", "quickstart/compare", "mine.yaml", cwd=tmp_path)
    assert "run soren-align compare mine.yaml" in copied.stdout
    modeline, *lines = (tmp_path / "mine.yaml").read_text().splitlines()
    assert modeline == "# yaml-language-server: $schema=study.schema.json"
    assert lines == shipped.studies()["quickstart/compare"].read_text().splitlines()[1:]
    assert json.loads((tmp_path / "study.schema.json").read_text())["title"] == "Study"
    load_study(str(tmp_path / "mine.yaml"))


@pytest.mark.rest
def test_a_copied_recipe_works_from_any_folder(tmp_path):
    run("recipes", "copy", "quickstart/sft", "mine.yaml", cwd=tmp_path, code=0)
    (tmp_path / "elsewhere").mkdir()
    plan = json.loads(run("plan", "../mine.yaml", "--json", cwd=tmp_path / "elsewhere", code=0).stdout)
    assert plan["steps"]["total"] > 0
    assert plan["data"]["num_kept"] == plan["data"]["num_examples"]
    assert not (tmp_path / "elsewhere" / "runs").exists()
    assert (tmp_path / "mine.yaml").read_text().startswith("# yaml-language-server: $schema=recipe.schema.json\n# SFT")
    assert json.loads((tmp_path / "recipe.schema.json").read_text())["title"] == "Recipe"
    assert "exists already" in run("recipes", "copy", "quickstart/sft", "mine.yaml", cwd=tmp_path, code=2).stderr


def test_a_command_leaves_the_environment_as_it_was(tmp_path, monkeypatch):
    monkeypatch.delenv("TRL_EXPERIMENTAL_SILENCE", raising=False)
    monkeypatch.setenv("RANK", "0")
    before = dict(os.environ)
    run("plan", "quickstart/sft", cwd=tmp_path, code=0)
    assert dict(os.environ) == before


def test_a_full_plan_shows_rows_an_example_the_rates_and_the_routing(tmp_path):
    shown = run("plan", "quickstart/sft", "--full", cwd=tmp_path).stdout
    for expected in ("kept", "[[", "learning rate", "linear layer", "1-dimensional", "memory per rank", "run.json"):
        assert expected in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


@pytest.mark.parametrize("problems", [[], ["training would not start"]])
def test_a_plan_ends_with_the_command_that_trains_unless_it_would_not_start(tmp_path, monkeypatch, problems):
    monkeypatch.setattr("soren_align.planning.plan.plan_training", lambda *_: ({"problems": problems}, None))
    monkeypatch.setattr("soren_align.planning.show.print_plan", lambda *_: None)
    words = ["quickstart/sft", "optimizer.lr=1e-3", "run.log_spectra.steps=[1, 2]", "--processes", "2"]
    planned = run("plan", *words, cwd=tmp_path)
    command = "soren-align sft quickstart/sft optimizer.lr=1e-3 'run.log_spectra.steps=[1, 2]' --processes 2"
    assert planned.stdout == ("" if problems else f"next      {command}\n")


def test_plan_refuses_a_batch_that_the_processes_cannot_share(tmp_path):
    overrides = ("--processes", 3, "--set", "run.global_batch_size=64")
    assert "choose a multiple of 3" in run("plan", "quickstart/sft", *overrides, cwd=tmp_path, code=2).stderr


def test_the_schema_is_json_and_is_written_over_nothing_else(tmp_path):
    for kind, title in (("study", "Study"), ("recipe", "Recipe")):
        text = run("schema", kind).stdout
        assert json.loads(text)["title"] == title
        for _ in range(2):
            written = run("schema", kind, "--output", ".", cwd=tmp_path, code=0)
            assert (tmp_path / f"{kind}.schema.json").read_text() == text
        modeline = f"write this first line into a {kind}: # yaml-language-server: $schema={kind}.schema.json"
        assert modeline in written.stdout
    assert run("schema").stdout == text
    (tmp_path / "recipe.schema.json").write_text("{}")
    assert "was not written by this command" in run("schema", "--output", ".", cwd=tmp_path, code=2).stderr
    run("recipes", "copy", "quickstart/sft", cwd=tmp_path, code=0)
    assert (tmp_path / "recipe.schema.json").read_text() == "{}"


def test_docs_lists_the_pages_and_prints_one():
    lines = run("docs").stdout.splitlines()
    sections = [line for line in lines if not line.startswith(" ")]
    assert sections == ["Start", "Guides", "Reference", "Science", "Contributing"]
    pages = [line.split() for line in lines if line.startswith(" ")]
    assert [name for name, *_ in pages] == list(shipped.pages())
    assert ["own-data", "Your", "own", "data"] in pages
    assert all(len(line) <= 80 for line in lines)
    page = shipped.pages()["data"].read_text()
    assert run("docs", "data").stdout == run("docs", "docs/data.md").stdout == page
    assert run("docs", "README").stdout == shipped.pages()["readme"].read_text()
    assert run("docs", "recipes/studies/README.md").stdout == shipped.pages()["recipes/studies"].read_text()
    message = "error: evalution: is no page of the documentation; did you mean 'evaluation'?\n"
    assert run("docs", "evalution", code=2).stderr == message


@pytest.mark.parametrize(("words", "expected"), [
    ("sft quickstart/sft", ["quickstart/sft", "quickstart/sft-lora"]),
    ("recipes copy mistral-7b/rel", ["mistral-7b/released-exact", "mistral-7b/released-soren"]),
    ("eval runs/mine --suite open", ["open-llm-leaderboard-v1", "open-llm-leaderboard-v2"]),
    ("docs opt", ["optimizers"]), ("sp", ["spectrum"]),
    ("plan my.yaml --proc", ["--processes"]),
])  # fmt: skip
def test_the_shell_completes_commands_options_and_shipped_names(words, expected):
    typed = {"COMP_WORDS": f"soren-align {words}", "COMP_CWORD": str(len(words.split()))}
    done = run(env={"_SOREN_ALIGN_COMPLETE": "complete_bash", **typed})
    assert sorted(done.stdout.split()) == expected


@pytest.mark.parametrize(("arguments", "message"), [
    (["sft", "quickstart/stf"], "did you mean 'quickstart/sft'"),
    (["dpo", "quickstart/sft"], "found sft, but the command is dpo; run `soren-align sft`"),
    (["push", "nowhere", "me/zoo"], "nowhere: has no run.json; name a run folder"),
    (["push", "nowhere", "zoo"], "zoo: is no OWNER/NAME"),
    (["recipes", "copy", "nothing"], "nothing: is no shipped recipe or study; run `soren-align recipes` for a list"),
    (["recipes", "copy", "quickstart/sfx"], "did you mean 'quickstart/sft'?"),
    (["eval", "nowhere", "--suite", "quickstart", "--output", "out"], "nowhere"),
    (["eval", "./nowhere", "--suite", "quickstart", "--output", "out"], "contains no run.json (a run), no config.json"),
    (["eval", "owner/model", "--output", "out"], "there is no such folder; correct the path, or add --suite"),
    (["eval", "here", "--output", "out"], "contains no run.json"),
    (["eval", "owner/model", "--suite", "quickstart"], "--output: is required"),
    (["eval", "owner/model", "--suite", "quikstart", "--output", "o"],
     "--suite: no shipped suite has the name 'quikstart', and there is no file "),
    (["eval", "owner/model", "--suite", "quickstart", "--output", "o", "--published", "paper/sfx"],
     "did you mean 'paper/sft'"),
    (["eval", "owner/model", "--suite", "quickstart", "--output", "o", "--data-root", "no"],
     "--data-root: there is no"),
    (["eval", "owner/model", "--suite", "quickstart", "--output", "o", "--backend", "vllm"],
     "needs vLLM, which is not installed"),
    (["eval", "here/model", "--suite", "quickstart", "--output", "o"],
     "here/model: there is no such folder, and the name is not looked up on the hub"),
    (["eval", "owner/model", "--suite", "quickstart", "--output", "o", "--dtype", "int8"], "--dtype: found 'int8'"),
])  # fmt: skip
def test_a_wrong_name_is_a_sentence_and_exit_code_2(tmp_path, arguments, message):
    (tmp_path / "here").mkdir()
    assert message in run(*arguments, cwd=tmp_path, code=2).stderr


@pytest.mark.parametrize(("arguments", "message"), [
    ("compare quickstart/compare --report --jobs 2 --yes",
     "--jobs, --yes: have no effect with --report, which starts no runs; remove these options"),
    ("plan quickstart/compare --full", "--full: has no effect on a study; remove this option"),
    ("plan quickstart/sft --full --json", "--full: has no effect with --json, which prints everything; remove this"),
    ("show --full --json", "--full: has no effect with --json"),
    ("new mine --question a --answer b", "--question, --answer: have no effect without --data; add --data FILE"),
    ("stats a b --json --markdown", "--markdown: has no effect with --json"),
    ("stats a b --metric acc --score s", "--metric: has no effect with --score, which names the column"),
])  # fmt: skip
def test_an_option_without_effect_is_refused(tmp_path, arguments, message):
    refused = run(*arguments.split(), cwd=tmp_path, code=2)
    assert refused.stdout == ""
    assert refused.stderr.startswith(f"error: {message}")
    assert refused.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("variables", "arguments", "message"), [
    ({"WORLD_SIZE": "2"}, (), "WORLD_SIZE is 2, but RANK is not set"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, ("--processes", "4"), "--processes 4: a launcher has already started 2"),
    ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, (), "accelerate launch --cpu starts one process"),
    ({}, ("--processes", "0"), "greater than or equal to 1"),
    ({}, ("--processes", "2", "--set", "run.global_batch_size=64"), "write trainer.per_device_train_batch_size: 32"),
])  # fmt: skip
def test_processes_that_nobody_could_run_are_refused(tmp_path, variables, arguments, message):
    env = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR")) | variables
    assert message in run("sft", "quickstart/sft", *arguments, cwd=tmp_path, env=env, code=2).stderr
    assert not (tmp_path / "runs").exists()
