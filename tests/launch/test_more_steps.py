"""A finished run with more steps is another run: refused with the exact command, which then continues it."""

import json
import re
import shlex

import pytest
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.launch.preparation import prepare
from soren_align.publish import card
from soren_align.run.folder import RunFolder
from tests.support import command
from tests.support.run_folders import finished_run
from tests.support.tiny_run import TinyRun


def refusal(folder, *overrides):
    with pytest.raises(UserError) as error:
        prepare(folder, recipe.load("quickstart/sft", [f"run.output_dir={folder}", *overrides]))
    folder.release()
    return str(error.value)


def commands_in(message):
    joined = message.replace("\\\n", "")  # as a shell does
    return [line.strip() for line in joined.splitlines() if line.startswith("  soren-align")]


@pytest.mark.parametrize(("before", "after", "key", "remaining"), [
    ([], ["trainer.max_steps=900"], "max_steps", "300"),
    (["trainer.max_steps=-1", "trainer.num_train_epochs=2"], ["trainer.max_steps=-1", "trainer.num_train_epochs=4.5"],
     "num_train_epochs", "2.5"),
    (["trainer.max_steps=-1"], ["trainer.max_steps=-1", "trainer.num_train_epochs=5"], "num_train_epochs", "2"),
])  # fmt: skip
@pytest.mark.parametrize("status", ["finished", "trained"])
def test_the_refusal_names_the_command_for_the_remaining_steps(tmp_path, before, after, key, remaining, status):
    folder = finished_run(tmp_path / "run", *before)
    folder.update(status=status)
    (tmp_path / "run-2").mkdir()
    message = refusal(folder, *after)
    words = "this run is complete (600 steps), and its schedule has ended, so the run cannot be extended. To"
    assert f"{folder}: {words}" in message
    lines = message.splitlines()[1:]
    assert max(len(line) for line in lines) < 80 + len(str(tmp_path))
    assert len(lines) == 6
    (words,) = [shlex.split(line) for line in commands_in(message)]
    assert words[:3] == ["soren-align", "sft", str(folder.recipe)]
    assert set(words[3:]) == {
        "--set", f"model.name_or_path={folder.model}", f"run.output_dir={tmp_path / 'run-3'}",
        f"trainer.{key}={remaining}", "trainer.seed=1", "model.init_seed=null",
    }  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
    [["trainer.max_steps=900", "optimizer.lr=1"], ["trainer.max_steps=500"],
     ["trainer.max_steps=-1", "trainer.num_train_epochs=9"]],
    ids=["another recipe", "fewer steps", "another unit"],
)  # fmt: skip
def test_other_changes_are_refused_as_before(tmp_path, overrides):
    folder = finished_run(tmp_path / "run")
    assert not commands_in(refusal(folder, *overrides))


@pytest.mark.rest
@pytest.mark.model
@pytest.mark.parametrize("lora", [
    pytest.param((), id="weights"),
    pytest.param(("model.lora={r: 4}", "optimizer.aux_lr=null"), id="adapter", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_command_continues_the_run_and_the_card_states_it(tmp_path, lora):
    first = TinyRun(tmp_path / "run", "sft", "trainer.max_steps=2", "trainer.save_strategy=no", *lora)
    assert first.train()
    card.write_card(first.folder)
    first.folder.update(status="finished")
    first.folder.release()
    longer = TinyRun(tmp_path / "run", "sft", "trainer.max_steps=5", "trainer.save_strategy=no", *lora)
    with pytest.raises(UserError) as error:
        prepare(longer.folder, longer.recipe)
    longer.folder.release()
    (line,) = commands_in(str(error.value))
    result = command.run(*shlex.split(line)[1:])
    assert result.returncode == 0, result.stderr
    folder = RunFolder(tmp_path / "run-2")
    record = folder.read()
    assert record["start"]["after"] == [{"task": "sft", "steps": 2}]
    assert record["training"]["steps"] == 3
    assert "(starting checkpoint, after 2 steps of SFT)" in " ".join(result.stderr.split())
    page = (folder.model / "README.md").read_text()
    assert re.search(r"rained further by SFT with Soren from \S*run/model, after 2 steps of SFT\.", page), page[:600]
    third = TinyRun(tmp_path / "third", "sft", f"model.name_or_path={folder.model}", "model.init_seed=null",
                    "trainer.max_steps=1", *(lora[1:]), "trainer.save_strategy=no")  # fmt: skip
    assert third.train()
    steps = json.loads((third.folder.path / "run.json").read_text())["start"]["after"]
    assert [run["steps"] for run in steps] == [2, 3]
