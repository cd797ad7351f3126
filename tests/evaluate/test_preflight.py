"""An evaluation that cannot work is found before training, and a trained model always gets a table."""

import io
import json
import re
import shutil

import huggingface_hub
import pytest
from rich.console import Console
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.evaluate.report import tables
from soren_align.evaluate.report.results import read_results
from soren_align.evaluate.run.models import load_tokenizer
from soren_align.evaluate.run.preflight import planned_rows
from soren_align.evaluate.run.stage import evaluate, preflight
from soren_align.launch import commands
from soren_align.planning.plan import plan_training
from soren_align.recipe import Eval
from soren_align.training import run as training
from tests.support import command
from tests.support.edited_files import edit
from tests.support.run_folders import record_run
from tests.support.tiny_models import CHATML, start_of
from transformers import AutoTokenizer

pytestmark = pytest.mark.model

CHAT = Eval(suite="quickstart", limit=4)
COLUMNS = ["zoo_mc", "zoo_gen", "preference"]


@pytest.fixture(scope="module")
def plain(models, tmp_path_factory):
    """A model whose tokenizer has no chat template, as most base models."""
    folder = shutil.copytree(models[0], tmp_path_factory.mktemp("plain") / "base")
    (folder / "chat_template.jinja").unlink()
    return folder


def table(rows, output, options=CHAT):
    screen = io.StringIO()
    results = evaluate(rows, options, output, device="cpu", console=Console(file=screen, width=80))
    return results, screen.getvalue(), (output / "table.md").read_text()


def test_a_base_without_template_is_evaluated_with_the_runs_and_compared(plain, models, tmp_path):
    results, screen, page = table([("base", plain), ("SFT", models[1])], tmp_path / "out")
    reference, _, _ = table([("base", models[0]), ("SFT", models[1])], tmp_path / "reference")
    assert [row["chat_template_of"] for row in results["rows"]] == ["SFT", "SFT"]
    assert results["rows"][0]["scores"] == reference["rows"][0]["scores"]
    assert results["rows"][1]["differences"] == reference["rows"][1]["differences"]
    assert "base is evaluated with the chat template of SFT" in " ".join(screen.split())
    assert "- base was evaluated with the chat template of SFT" in page


def test_rows_of_different_prompts_are_shown_uncompared_or_get_the_runs_template(models, tmp_path):
    other = shutil.copytree(models[1], tmp_path / "other")
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text(template.replace("<|assistant|>", "<|user|>"))
    rows = [("base", models[0]), ("SFT", other)]
    results, screen, page = table(rows, tmp_path / "own")
    assert results["rows"][1]["differences"] == {}
    assert list(results["rows"][1]["unpaired"]) == COLUMNS
    assert "SFT will not be compared with base: their chat templates differ" in screen
    assert page.count("<br>not compared") == 3
    assert "- not compared with base: SFT (its prompts differ, for example by the chat template)" in page
    assert "Holm" not in page
    assert tables.markdown(read_results(tmp_path / "own")) == page
    results, _, page = table(rows, tmp_path / "run", CHAT.model_copy(update={"base_template": "run"}))
    assert list(results["rows"][1]["differences"]) == COLUMNS
    assert "not compared" not in page


def test_without_a_template_anywhere_there_is_a_table_of_plain_prompts(plain, tmp_path):
    again = shutil.copytree(plain, tmp_path / "again")
    rows = [("base", plain), ("SFT", again)]
    with pytest.raises(UserError, match=r"base and SFT: the tokenizer has no chat template.*--base-template none"):
        table(rows, tmp_path / "out")
    results, _, page = table(rows, tmp_path / "out", CHAT.model_copy(update={"base_template": "none"}))
    assert list(results["rows"][1]["differences"]) == COLUMNS
    assert "- SFT was evaluated without a chat template" in page
    line = (tmp_path / "out/samples/base/zoo_mc.jsonl").read_text().splitlines()[0]
    assert "<|user|>" not in json.loads(line)["prompt"]


def test_a_base_without_its_template_is_shown_beside_a_run_with_one(models, tmp_path):
    none = CHAT.model_copy(update={"base_template": "none"})
    results, screen, page = table([("base", models[0]), ("SFT", models[1])], tmp_path / "out", none)
    assert [row["chat_template_of"] for row in results["rows"]] == [None, "SFT"]
    assert "- not compared with base: SFT (only one of the two models was prompted with a chat template)" in page
    assert "will not be compared with base: only one of the two models has a chat template" in " ".join(screen.split())


RECIPE = """
task: sft
model: {{name_or_path: {model}}}
data: {{train: {{path: {data}}}}}
optimizer: {{name: adamw, lr: 1e-3}}
trainer: {{use_cpu: true, bf16: false, max_steps: 1, per_device_train_batch_size: 1}}
run: {{output_dir: {folder}}}
eval: {evaluation}
"""


@pytest.fixture
def made(tmp_path):
    """Write a recipe for plain text, without training data of interest."""

    def make(model, evaluation):
        (tmp_path / "text.jsonl").write_text('{"text": "a b"}\n' * 4)
        settings = json.dumps(evaluation)
        parts = {"model": model, "data": tmp_path / "text.jsonl", "folder": tmp_path / "run", "evaluation": settings}
        return recipe.load_text(RECIPE.format(**parts))

    return make


@pytest.fixture
def short(readers, data_root, tmp_path):
    """A model with a context of 512, and benchmarks in which one answer of PIQA is longer."""
    model = shutil.copytree(readers[0], tmp_path / "short")
    edit(model / "config.json", max_position_embeddings=512)
    root = shutil.copytree(data_root, tmp_path / "data")
    file = root / "baber/piqa/data/validation.jsonl"
    first, *others = file.read_text().splitlines(keepends=True)
    file.write_text(json.dumps(json.loads(first) | {"sol1": "wash it, " * 600}) + "\n" + "".join(others))
    return model, {"suite": "commonsense-zero-shot", "data_root": str(root)}


@pytest.mark.rest
def test_a_run_without_template_is_refused_before_training_and_by_plan(made, plain, monkeypatch):
    def train(*_, **__):
        raise AssertionError("trained for nothing")

    monkeypatch.setattr(training, "train", train)
    asked = made(plain, {"suite": "quickstart"})
    problem = "base and this run: the tokenizer has no chat template, but suite quickstart applies one"
    with pytest.raises(UserError, match=problem):
        commands.train(asked)
    (found,) = plan_training(asked)[0]["problems"]
    assert found.startswith(f"training would not start, because its evaluation cannot run: {problem}")


def test_an_answer_longer_than_the_context_is_found_before_training_and_its_column_left_out(
    made, short, readers, tmp_path, monkeypatch
):
    model, evaluation = short
    monkeypatch.setattr(training, "train", lambda *_, **__: pytest.fail("trained for nothing"))
    with pytest.raises(UserError) as error:
        commands.train(made(model, evaluation))
    for name in ("base", "this run"):
        problem = rf"{name}: piqa: an answer choice of \d+ tokens does not fit the model's context of 512 tokens; omit "
        assert re.search(problem + r"this column: eval\.omit: \[piqa\] \(--omit piqa\)", str(error.value))
    omitted = Eval(**evaluation, omit=["piqa"])
    assert omitted.name == "commonsense-zero-shot-without-piqa"
    results, _, _ = table([("base", model)], tmp_path / "out", omitted)
    assert results["title"].startswith("Commonsense, zero-shot: without piqa, on other data (4 of 1,172 questions")
    assert "piqa" not in results["rows"][0]["scores"]
    with pytest.raises(UserError, match=r"eval\.omit: suite commonsense-zero-shot has no column 'pica'; did you mean"):
        preflight(Eval(**evaluation, omit=["pica"]), *start_of(model))


def test_truncated_prompts_are_a_notice_or_a_problem_if_strict(short, readers):
    model, evaluation = short
    few = Eval(suite="open-llm-leaderboard-v1", data_root=evaluation["data_root"], omit=["mmlu"])
    assert preflight(few, *start_of(model))[1] == [
        "base, this run: the context of 512 tokens truncates the longest prompts of arc_challenge, gsm8k"
    ]
    message = r"arc_challenge: prompts do not fit .* eval\.strict is true; write eval\.strict: false"
    with pytest.raises(UserError, match=message):
        preflight(few.model_copy(update={"strict": True}), *start_of(model))
    assert preflight(few, *start_of(readers[0]))[1] == []


@pytest.mark.rest
def test_a_group_without_clusters_is_a_notice(short, readers, tmp_path):
    (tmp_path / "suite.yaml").write_text(
        f"title: MMLU\ndata_root: {short[1]['data_root']}\n"
        "tasks:\n  - {task: mmlu, metric: acc, file: 'lm-eval:mmlu/default/_mmlu.yaml'}\n"
    )
    _, notices = preflight(Eval(suite=str(tmp_path)), *start_of(readers[0]))
    (notice,) = [notice for notice in notices if "cluster" in notice]
    assert notice.startswith("mmlu: the suite names no cluster for this group of 57 tasks")


def test_every_row_of_the_table_to_come_is_checked(models, tmp_path):
    """base -> SFT -> DPO: the first has another generation config, the last another template."""
    run = tmp_path / "sft"
    base = shutil.copytree(models[0], run / "start")
    (base / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    shutil.copytree(models[1], run / "model")
    record_run(run, base)
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    tokenizer.chat_template = CHATML
    model, start, _ = start_of(run / "model")
    rows = planned_rows(model, start, tokenizer)
    assert [(row.name, row.template_of) for row in rows] == [("base", "base"), ("SFT", "SFT"), ("this run", "this run")]
    assert AutoTokenizer.from_pretrained(run / "model").chat_template != rows[2].tokenizer.chat_template == CHATML
    config = "generation_config.json of {} sets {{}}, but that of base sets {{'repetition_penalty': 1.3}}"
    _, notices = preflight(CHAT, model, start, tokenizer)
    other = "; their chat templates differ, and therefore their prompts "
    other += "(for equal templates, write eval.base_template: run)"
    assert notices == [
        f"SFT will not be compared with base: {config.format('SFT')}",
        f"this run will not be compared with base: {config.format('this run')}{other}",
    ]


def test_other_scores_of_a_column_are_shown(readers, data_root, tmp_path):
    options = Eval(suite="commonsense-zero-shot", data_root=str(data_root))
    results, _, page = table([("base", readers[0]), ("SFT", readers[1])], tmp_path / "out", options)
    base, later = (row["scores"]["piqa"]["also"]["acc"] for row in results["rows"])
    shown = [f"{name} {score['value']:.1f} ± {score['stderr']:.1f}" for name, score in (("base", base), ("SFT", later))]
    assert f"- piqa, acc: {', '.join(shown)}\n" in page
    assert "Holm-corrected for the 7 comparisons in this table; " in page


def test_of_a_start_on_the_hub_no_weights_are_downloaded(models, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, "*.safetensors" in allow_patterns, "*.json" in allow_patterns))
        return str(models[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = recipe.Model(name_or_path="lab/model", revision="v1")
    rows = planned_rows(model, "lab/model", load_tokenizer(models[0]))
    assert [(row.name, row.model) for row in rows] == [("base", "lab/model"), ("this run", "lab/model")]
    assert set(asked) == {("lab/model", "v1", False, True)}


def test_rows_without_weights_and_templates_that_refuse_a_question_are_found_before_any_model_is_loaded(
    models, tmp_path
):
    other = shutil.copytree(models[1], tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ raise_exception('a system message first') }}")
    rows = [("base", models[0]), ("SFT", other)]
    with pytest.raises(UserError) as error:
        table(rows, tmp_path / "out")
    problem = (
        "a question cannot be rendered as a prompt: the chat template: a system message first; choose another chat "
        "template, or omit this"
    )
    assert [line.partition(" column")[0] for line in str(error.value).splitlines()] == [
        f"SFT: {column}: {problem}" for column in COLUMNS
    ]
    (other / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"SFT: .*other has no weights in \.safetensors files"):
        table(rows, tmp_path / "out")


def test_a_run_is_evaluated_when_its_start_is_deleted_and_the_table_states_it(models, tmp_path):
    shutil.copytree(models[1], tmp_path / "mine" / "model")
    record_run(tmp_path / "mine", tmp_path / "deleted")
    options = ("--suite", "quickstart", "--limit", 2, "--output", tmp_path / "out")
    done = command.run("eval", tmp_path / "mine", *options)
    assert done.returncode == 0, done.stderr
    sentence = "the table has no row for the checkpoint that mine was trained from, because the checkpoint is missing"
    assert f"notice {sentence} ({tmp_path}/deleted)" in " ".join(done.stderr.split())
    page = (tmp_path / "out" / "table.md").read_text()
    assert f"- {sentence}\n" in page
    assert str(tmp_path / "deleted") not in page  # it is published with the model's card
    assert [row["name"] for row in read_results(tmp_path / "out")["rows"]] == ["SFT"]
    sentences = []
    rows = planned_rows(*start_of(tmp_path / "mine" / "model"), lambda *each: sentences.append(each))
    assert [row.name for row in rows] == ["SFT", "this run"]
    assert sentences == [(sentence, str(tmp_path / "deleted"))]
