"""docs/own-data.md: its commands run in the folder of `soren-align new`, its recipe is that folder's."""

import contextlib
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from soren_align import recipe
from soren_align.core import shipped
from soren_align.data import load_split
from soren_align.evaluate.suite.suites import load_suite

from tests.support import command
from tests.support.conversations import split
from tests.support.tiny_models import make_reader

PAGE = Path(__file__).resolve().parent.parent / "docs/own-data.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = [block.group() for block in re.finditer(r"^(?:    .*\n|\n(?=    ))+", TEXT, re.MULTILINE)]
COMMANDS = [line.strip() for block in BLOCKS for line in block.splitlines() if line.startswith("    soren-align")]
NEW = shipped.ROOT / "configs/new"


def words(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of the page's commands, in its order, and the folder."""
    folder = tmp_path_factory.mktemp("own")
    rows = [f"What is in room {number}?,Books about subject {number}." for number in range(60)]
    (folder / "faq").mkdir()
    (folder / "faq/faq.csv").write_text("\n".join(["question,answer", *rows]), encoding="utf-8")
    texts = []
    with contextlib.chdir(folder):
        for number, line in enumerate(COMMANDS):
            result = command.run(*shlex.split(line)[1:], cwd=("faq", None)[number] if number < 2 else "mine", code=0)
            texts.append(result.stdout + result.stderr)
    return SimpleNamespace(texts=texts, folder=folder / "mine")


@pytest.mark.rest
@pytest.mark.model
def test_every_command_of_the_page_prints_what_it_shows(outputs):
    assert len(COMMANDS) == 10
    printed = words("\n".join(outputs.texts))
    shown = [block for block in BLOCKS if "soren-align" not in block]
    assert len(shown) == 3
    for part in re.split(r"\n\n|\n *\.\.\.\n", "\n\n".join(shown)):
        assert words(part) in printed


@pytest.mark.rest
@pytest.mark.model
def test_the_dpos_results_compare_it_with_the_sft_too(outputs):
    results = json.loads((outputs.folder / "runs/dpo/eval/questions/results.json").read_text())
    base, sft, dpo = results["rows"]
    assert (base.get("start"), sft.get("start"), dpo["start"]["name"]) == (None, None, "SFT")
    for column, difference in dpo["start"]["differences"].items():
        assert difference["value"] == dpo["scores"][column]["value"] - sft["scores"][column]["value"]
        assert difference["p_holm"] >= difference["p"]
    assert results["settings"]["task_versions"] == {}
    assert "DPO minus SFT, its start" in (outputs.folder / "runs/dpo/eval/questions/table.md").read_text()


@pytest.mark.model
def test_a_training_without_a_recipe_ends_with_the_loss_before_and_after_and_the_way_to_scores(tmp_path):
    make_reader(tmp_path / "base", chat_template=True)
    rows = [f"{i},What is in room {i}?,Books about subject {i}." for i in range(40)]
    (tmp_path / "faq.csv").write_text("\n".join(["id,ask,reply", *rows]))
    columns = ("--question", "ask", "--answer", "reply")
    options = ("--model", "base", "--data", "faq.csv", *columns, "--output", "runs/faq", "trainer.max_steps=2")
    done = command.run("sft", *options, cwd=tmp_path, code=0)
    record = json.loads((tmp_path / "runs/faq/run.json").read_text())["training"]["held_out"]
    before, after = record["evaluations"]
    assert (before["step"], after["step"]) == (0, 2)
    losses = f"{before['loss']:.3f} before training, {after['loss']:.3f} after it"
    num = record["num_examples"]
    ending = f"result held-out loss {losses}, on {num} examples that were not trained on done"
    assert ending in " ".join(done.stderr.split())
    path = f"soren-align new NAME --model base --data faq.csv {' '.join(columns)}\n"
    assert done.stderr.endswith(f"next      soren-align chat runs/faq --compare start\n          {path}")


def test_the_recipe_of_the_page_is_that_of_new():
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert block == (NEW / "sft.yaml").read_text()


def test_examples_and_questions_of_the_page_can_be_read(tmp_path):
    blocks = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    chat, alpaca, choice, exact, pair = "".join(blocks).splitlines(keepends=True)
    for task, text in (("sft", chat), ("sft", alpaca), ("dpo", pair)):
        (tmp_path / "my.jsonl").write_text(text)
        assert len(load_split(split(tmp_path / "my.jsonl"), task).dataset) == 1
    assert chat in (NEW / "chat.jsonl").read_text()
    assert pair in (NEW / "pairs.jsonl").read_text()
    for kind, text in (("choice", choice), ("exact", exact)):
        assert text in (NEW / f"questions/{kind}/test.jsonl").read_text()


def test_new_writes_into_new_or_empty_folders_only(tmp_path):
    (tmp_path / "empty").mkdir()
    command.run("new", "empty", cwd=tmp_path, code=0)
    names = {file.name for file in (tmp_path / "empty").iterdir()}
    assert names == {file.name for file in NEW.iterdir()} | {"recipe.schema.json"}
    again = command.run("new", "empty", cwd=tmp_path, code=2)
    assert again.stdout == ""
    assert "empty: exists already; name a new folder, or an empty one" in again.stderr
    assert "no: there is no such folder" in command.run("new", "no/where", cwd=tmp_path, code=2).stderr


def test_a_copied_suite_works_from_any_folder(tmp_path):
    copied = command.run("suites", "copy", "quickstart", "mine", cwd=tmp_path)
    assert "run soren-align eval RUN --suite mine" in copied.stdout
    suite = load_suite(tmp_path / "mine")
    assert [task.column for task in suite.tasks] == ["zoo_mc", "zoo_gen", "preference"]
    assert suite.data_folder() == shipped.suites()["quickstart"].parents[2] / "recipes/quickstart/data"
    refused = command.run("suites", "copy", "quikstart", "other", cwd=tmp_path)
    assert "did you mean 'quickstart'?" in refused.stderr
    assert "name of a shipped suite" in command.run("suites", "copy", "quickstart", "quickstart", cwd=tmp_path).stderr


@pytest.mark.parametrize("has_gpu", [True, False])
def test_recipes_for_a_model_of_ones_own_load_and_train_it_on_a_gpu_if_there_is_one(tmp_path, monkeypatch, has_gpu):
    monkeypatch.setattr("soren_align.launch.environment.has_gpu", lambda: has_gpu)
    done = command.run("new", "mine", "--model", "some/model: 0.5B", cwd=tmp_path)
    assert (done.returncode, "no GPU, so the recipes train on the CPU" in done.stderr) == (0, not has_gpu)
    monkeypatch.chdir(tmp_path / "mine")
    sft = recipe.load("sft.yaml")
    assert (sft.model.name_or_path, sft.model.init_seed) == ("some/model: 0.5B", None)
    assert (sft.optimizer.lr, sft.optimizer.aux_lr, sft.trainer["num_train_epochs"]) == (2e-5, 2e-5, 3)
    dpo = yaml.safe_load(Path("dpo.yaml").read_text())
    assert dpo["model"] == {"name_or_path": "runs/sft/model"}
    assert (dpo["optimizer"]["lr"], dpo["trainer"]["num_train_epochs"]) == (5e-7, 1)
    for trainer in (sft.trainer, dpo["trainer"]):
        assert (trainer["bf16"], trainer.get("use_cpu", False)) == (has_gpu, not has_gpu)
