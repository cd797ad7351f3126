"""A run folder may be a stranger's: it is held by one process, and nothing outside of it is touched."""

import errno
import json
import math
import os
import re
import subprocess
import sys
from functools import partial

import pytest
from soren_align import recipe
from soren_align.cli import app
from soren_align.core.errors import UserError, from_os_error
from soren_align.core.text import stderr_console
from soren_align.launch import commands, evaluation
from soren_align.launch.preparation import prepare
from soren_align.publish.card import write_card
from soren_align.publish.push import push
from soren_align.run import lock
from soren_align.run.folder import RunFolder
from soren_align.run.record import divergence

from tests.support.run_folders import finished_run, lock_of_another_process

LOCKED = "another process is training or evaluating this run"


@pytest.fixture
def make(tmp_path):
    def _make(*overrides):
        return recipe.load("quickstart/sft", [f"run.output_dir={tmp_path / 'run'}", *overrides])

    return _make


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    yield folder
    folder.release()


@pytest.fixture
def elsewhere(tmp_path):
    """Somebody's files, which must be there in the end."""
    there = tmp_path / "elsewhere"
    (there / "checkpoint-5").mkdir(parents=True)
    (there / "checkpoint-5" / "weights").write_text("years of work")
    return there


@pytest.fixture
def prepared(make, folder):
    """The folder of a run that begins."""
    prepare(folder, make())
    return folder


@pytest.fixture
def finished(folder):
    finished_run(folder.path)
    return folder


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture
def started(monkeypatch):
    """The work that commands start, which is not done."""
    names = []
    monkeypatch.setattr(commands, "train_here", lambda *_: names.append("train") or 0)
    monkeypatch.setattr(evaluation, "run_evaluation", lambda *_, **__: names.append("evaluate"))
    return names


# -- one process at a time ---------------------------------------------------------------------------------------------


def test_a_second_start_is_refused_and_changes_nothing(make, folder, started):
    assert commands.train(make("trainer.max_steps=3")) == 0
    before = contents(folder.path)
    for overrides in (["trainer.max_steps=4"], ["trainer.max_steps=4", "run.overwrite=true"]):
        with lock_of_another_process(folder), pytest.raises(UserError, match=LOCKED):
            commands.train(make(*overrides))
    assert contents(folder.path) == before
    assert started == ["train"]


def test_a_run_folder_is_held_while_torch_loads_and_free_afterwards(make, folder, monkeypatch):
    held = []
    monkeypatch.setattr(commands, "train_here", lambda *_: held.append(folder.is_locked()) or 0)
    for _ in range(2):  # as two commands in one process
        commands.train(make())
    assert held == [True, True]
    assert not folder.is_locked()
    with lock_of_another_process(folder):
        pass  # would wait for ever


@pytest.mark.parametrize("command", [commands.reshard, commands.merge, lambda run: evaluation.evaluate([run], {})])
def test_commands_on_a_run_that_is_running_are_refused(finished, started, command):
    with lock_of_another_process(finished), pytest.raises(UserError, match=LOCKED):
        command(str(finished))


@pytest.mark.process
def test_a_folder_is_held_through_exec_and_not_by_children(folder):
    # 40 and 41: a traceback ends a process with 1
    check = "import sys; from soren_align.run.folder import RunFolder as R; sys.exit(40 + R(sys.argv[1]).is_locked())"
    hold = ("import os, sys; from soren_align.run import folder, lock; folder.RunFolder(sys.argv[1]).lock(create=True);"
            f"os.execve(sys.executable, [sys.executable, '-c', {check!r}, sys.argv[1]], "
            "os.environ | lock.keep_through_exec())")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", hold, str(folder)]).returncode == 41
    folder.lock(create=True)  # the other process has ended
    assert subprocess.run([sys.executable, "-c", check, str(folder)]).returncode == 40


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_without_flock_the_refusal_names_the_way_on(folder, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with pytest.raises(UserError, match=r"the file system has no locks .*; choose another folder, or set SOREN_ALIGN"):
        folder.lock(create=True)
    monkeypatch.setenv("SOREN_ALIGN_LOCKS", "off")
    folder.lock(create=True)
    assert folder.is_locked()


def test_a_lock_that_a_broken_disk_refuses_is_no_missing_lock(folder, monkeypatch):
    monkeypatch.setattr(lock.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale")))
    with pytest.raises(OSError, match="Stale") as error:
        folder.lock(create=True)
    assert str(from_os_error(error.value)) == f"{folder}/.lock: Stale; check the disk, or the network file system"


def test_ranks_hold_a_folder_whose_launcher_was_killed(prepared, make):
    prepared.release()
    with lock_of_another_process(prepared, ".lock-ranks"), pytest.raises(UserError, match=LOCKED):
        prepare(prepared, make())
    prepare(prepared, make())


def test_the_first_rank_holds_a_folder_beside_its_launcher(prepared):
    prepared.release()
    with lock_of_another_process(prepared):
        prepared.lock(as_rank=True)
        assert lock.is_held(prepared.path / ".lock-ranks")
        assert not lock.is_held(prepared.path / ".lock")
        prepared.lock(as_rank=True)  # again, after exec


def test_a_run_is_evaluated_by_several_processes_and_not_trained_meanwhile(finished, started, make):
    with lock_of_another_process(finished, shared=True):
        evaluation.evaluate([str(finished)], {})
        with pytest.raises(UserError, match=LOCKED):
            prepare(finished, make("run.overwrite=true"))
    assert started == ["evaluate"]


# -- nothing outside of it ---------------------------------------------------------------------------------------------


def test_a_linked_folder_is_unlinked_and_not_followed_when_a_run_is_replaced(make, prepared, elsewhere):
    prepared.checkpoints.symlink_to(elsewhere)
    (prepared.path / "recipe.yaml.part").symlink_to(elsewhere / "checkpoint-5" / "weights")
    before = contents(elsewhere)
    with pytest.raises(UserError, match="is a symbolic link to"):
        prepare(prepared, make())
    prepared.clear()
    prepare(prepared, make("run.overwrite=true"))
    assert contents(elsewhere) == before
    assert not prepared.checkpoints.exists()
    assert recipe.load(str(prepared.recipe)) == make("run.overwrite=true")


@pytest.mark.parametrize("name", ["checkpoints", "model", "start", "eval", "metrics.jsonl", "run.json", "model.part"])
def test_a_link_among_what_runs_write_is_refused_before_anything_is_written(make, prepared, elsewhere, name):
    entry = prepared.path / name
    if entry.exists():
        entry.rename(elsewhere / name)
    before, link = contents(elsewhere), elsewhere / name if (elsewhere / name).exists() else elsewhere
    entry.symlink_to(link)
    with pytest.raises(UserError, match=rf"{name}: is a symbolic link to"):
        prepare(prepared, make())
    assert contents(elsewhere) == before


def test_a_folder_of_checkpoints_that_may_not_be_read_is_no_empty_one(make, prepared, monkeypatch):
    prepared.metrics.touch()
    (prepared.checkpoints / "checkpoint-2").mkdir(parents=True)
    (prepared.checkpoints / "checkpoint-2" / "soren_align.json").touch()

    def refuse(path, original):
        if str(path) == str(prepared.checkpoints):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path)

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, partial(refuse, original=getattr(os, name)))
    with pytest.raises(PermissionError):
        prepare(prepared, make())
    assert prepared.metrics.is_file()


def test_a_run_that_is_half_cleared_is_still_a_run(make, prepared, monkeypatch):
    prepared.model.mkdir()

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", denied)
        with pytest.raises(PermissionError):
            prepare(prepared, make("run.overwrite=true"))
    prepare(prepared, make("run.overwrite=true"))
    assert prepared.read()["status"] == "training"


def test_a_start_that_was_killed_in_its_first_write_is_begun_again(make, folder):
    folder.path.mkdir()
    for name in (".lock", ".lock-ranks", "run.json.part", "run.json.4711.part"):
        (folder.path / name).touch()
    prepare(folder, make())
    assert folder.read()["status"] == "training"


def test_a_models_folder_with_another_tools_run_json_is_a_model(tmp_path, started):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "run.json").write_text('{"run_id": "sweep-7"}')
    evaluation.evaluate([str(tmp_path / "model")], {"suite": "quickstart"}, output=str(tmp_path / "out"))
    assert started


# -- a stranger's files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [[], ["run.overwrite=true"]], ids=["resume", "overwrite"])
def test_a_folder_with_another_tools_run_json_is_left_alone(make, folder, overrides):
    folder.model.mkdir(parents=True)
    (folder.model / "weights").write_text("years of work")
    (folder.path / "run.json").write_text('{"status": "training", "task": "sft", "run_id": "sweep-7"}')
    before = contents(folder.path)
    with pytest.raises(UserError, match=r"run.json: was not written by soren-align"):
        prepare(folder, make(*overrides))
    assert contents(folder.path) == before


DAMAGED = {"truncated": '{"status": "trai', "empty": "", "a list": "[1, 2]", "deep": "[" * 100_000,
           "not UTF-8": b"\xff\xfe{}", "foreign": '{"status": "finished"}'}  # fmt: skip


COMMANDS = {
    "sft": lambda run: commands.train(recipe.load("quickstart/sft", [f"run.output_dir={run}"])),
    "reshard": commands.reshard,
    "merge": commands.merge,
    "eval": lambda run: evaluation.evaluate([run], {}),
    "push": lambda run: push(run, "me/zoo"),
    "card": lambda run: write_card(RunFolder(run)),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_damaged_run_json_is_one_sentence_in_every_command(finished, started, content, command):
    (finished.path / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"run\.json"):
        command(str(finished))
    assert not started


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_run_of_another_format_is_refused_with_one_sentence(finished, started, command):
    record = {"format_version": 1, "status": "training", "task": "sft", "versions": {"soren-align": "0.0.9"}}
    (finished.path / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError) as raised:
        command(str(finished))
    sentence = r"\S+run\.json: format_version: 1 instead of 2; restore this file, which was edited or written by .*"
    assert re.fullmatch(sentence + "another version of soren-align", str(raised.value))
    assert not started


def test_an_edited_run_json_is_refused_until_its_hash_is_removed(finished):
    file, record = finished.path / "run.json", finished.read()
    edited = json.loads(file.read_text()) | {"device": "an abacus"}
    file.write_text(json.dumps(edited))
    with pytest.raises(UserError, match=r"run\.json: the content differs from what was saved .* line record_sha256"):
        finished.read()
    del edited["record_sha256"]
    file.write_text(json.dumps(edited))
    assert finished.read() == record | {"device": "an abacus"}
    for task in (None, "sing", ["sft"]):
        file.write_text(json.dumps(edited | {"task": task}))
        with pytest.raises(
            UserError, match=r"run\.json: task: .* instead of sft or dpo or kto or pretrain; restore this file"
        ):
            finished.read()


def test_a_recipe_yaml_of_another_version_is_one_sentence(finished):
    finished.recipe.write_text("task: sft\noptimizer: {kind: soren}\n")
    with pytest.raises(UserError, match=r"recipe\.yaml: not a recipe that this version of soren-align can read"):
        evaluation.evaluate([str(finished)], {})


def test_metrics_that_cannot_be_read_are_dropped_line_by_line(folder):
    folder.path.mkdir()
    lines = [b'{"step": 1}', b'{"step": "x"}', b"[]", b"\xff", b'{"loss": 1}', b"[" * 100_000, b'{"step": 2}']
    folder.metrics.write_bytes(b"\n".join(lines))
    folder.drop_measurements_after(1)
    assert folder.metrics.read_text() == '{"step": 1}\n'


# -- what decides the weights ------------------------------------------------------------------------------------------


def test_a_changed_parallel_config_of_the_same_name_is_another_recipe(make, folder, tmp_path):
    config = tmp_path / "mine.json"
    config.write_text('{"zero_optimization": {"stage": 2}}')
    made = make(f"run.parallel={config}", "run.global_batch_size=64")
    prepare(folder, made)
    (folder.checkpoints / "checkpoint-5").mkdir(parents=True)
    (folder.checkpoints / "checkpoint-5" / "soren_align.json").write_text("{}")
    prepare(folder, made)
    config.write_text('{"zero_optimization": {"stage": 1}}')
    with pytest.raises(UserError, match=r"run\.parallel\.zero_optimization\.stage: 1 instead of 2"):
        prepare(folder, made)


# -- the operating system ----------------------------------------------------------------------------------------------


def test_a_working_directory_that_is_not_utf_8_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    monkeypatch.chdir(tmp_path / os.fsdecode(b"caf\xe9"))
    assert app.main(["runs"]) == 2
    assert "the path of the working directory is not UTF-8; rename that folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [UserError("loading failed"), OSError(errno.ENOSPC, "No space left on device", "/run/eval")]
)
def test_an_evaluation_that_fails_leaves_a_trained_model_and_a_way_to_evaluate_it(make, folder, monkeypatch, error):
    def fail(*_, **__):
        raise error

    finished_run(folder)
    folder.update(status="trained")
    monkeypatch.setattr(evaluation, "run_evaluation", fail)
    with pytest.raises(UserError, match=r"(loading failed|No space left)(.|\n)*Only the evaluation failed") as raised:
        commands._finish(folder, make(), stderr_console(), evaluate_here=True)
    assert f"soren-align eval {folder}" in str(raised.value)
    assert folder.record()["status"] == "trained"


# -- a training that diverged ------------------------------------------------------------------------------------------


def lines_of(held_out, training):
    """metrics.jsonl: held_out by step; training losses at steps 1, 2, ..."""
    lines = [{"step": step, "eval_loss": loss} for step, loss in held_out.items()]
    return sorted([*lines, *({"step": i, "loss": loss} for i, loss in enumerate(training, 1))], key=lambda x: x["step"])


@pytest.mark.parametrize(("held_out", "training", "reason"), [
    ({0: 5.0, 6: 9.0}, [6.0, 9.0], "the held-out loss was 5 at the start, rose to 9, and was 9 at the end"),
    ({0: 5.0, 6: 4.8}, [60.0, 4.9], "the held-out loss was 5 at the start, rose to 60, and was 4.8 at the end"),
    ({0: 5.0, 3: 80.0, 6: 70.0}, [90.0, 75.0],
     "the held-out loss was 5 at the start, rose to 80, and was 70 at the end"),
    ({0: 5.0, 6: math.nan}, [6.0, 5.0], "the loss at the end is NaN or infinite"),
    ({0: 5.0, 6: 8.0}, [4.0, 0.1], None),  # learned by heart
    ({0: 5.0, 6: 4.0}, [60.0, 4.0], None),  # recovered
    ({}, [5.128, 20.0, 45.0, 38.25], "the training loss was 5.128 in the first log and 38.25 in the last one"),
    ({6: 9.0}, [5.0, 9.0], "the training loss was 5 in the first log and 9 in the last one"),
    ({}, [5.0, math.inf], "the loss at the end is NaN or infinite"),
    ({}, [1.0, 2.5, 2.0, 3.5, 2.4, 1.4], None),  # of single examples
    ({}, [5.0], None),
    ({}, [], None),
])  # fmt: skip
def test_a_training_diverged_if_its_loss_rose_and_stayed_high(held_out, training, reason):
    assert divergence(lines_of(held_out, training)) == reason


@pytest.mark.rest
@pytest.mark.model
@pytest.mark.parametrize("held_out", ["yes", "no"])
def test_a_training_that_diverged_is_no_success(make, folder, capfd, held_out):
    """Exit code 1, said in the last lines, in run.json and in the card; not evaluated, and not resumed or published."""
    short = ["trainer.max_steps=4", "trainer.warmup_steps=0", "trainer.logging_steps=1"]
    short += ["optimizer.lr=9.9", "optimizer.aux_lr=9.9"]
    short += ["trainer.per_device_train_batch_size=4", "trainer.eval_strategy=no"]
    if held_out == "yes":
        short[-1] = "trainer.eval_strategy=steps"
        short += ["trainer.eval_steps=4", "trainer.eval_on_start=true", "data.eval.limit=20"]
    assert commands.train(make(*short)) == 1
    record = folder.read()
    assert (record["status"], record["last_error"]) == ("diverged", None)
    reason = "the held-out loss was " if held_out == "yes" else "the training loss was "
    assert record["training"]["diverged"].startswith(reason)
    printed = capfd.readouterr().err
    assert f"diverged  {reason}" in printed
    assert "smaller optimizer.lr" in printed
    assert "done" not in printed
    assert f"**Training diverged, and this model is broken: {reason}" in (folder.model / "README.md").read_text()
    assert not (folder.path / "eval").exists()
    with pytest.raises(UserError, match=r"diverged: .*; train again with a smaller optimizer.lr"):
        commands.train(make(*short))
    with pytest.raises(UserError, match=r"diverged: .*; train again with a smaller optimizer.lr"):
        push(str(folder.path), "me/mine")


def test_a_failure_is_recorded_if_the_disk_has_room_and_removed_or_the_run_does_not_resume(tmp_path, monkeypatch):
    run = finished_run(tmp_path / "run")
    run.record_failure(ValueError("a defect"))
    assert (run.record()["last_error"], "defect" in run.record()) == ("ValueError: a defect", True)
    monkeypatch.setattr("soren_align.run.folder.write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    run.record_failure(UserError("another"))
    with pytest.raises(OSError, match="full"):
        run.forget_failure()
    monkeypatch.undo()
    run.forget_failure()
    assert run.record()["last_error"] is None
    assert not {"diverged", "resumable", "defect"} & run.record().keys()
