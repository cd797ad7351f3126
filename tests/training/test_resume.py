"""Killed at any moment and started again, a run ends with the weights of an uninterrupted one, bit for bit."""

import json
import os
import random
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from soren_align.core import files
from soren_align.core.errors import UserError
from soren_align.core.files import resolve_path
from soren_align.run import folder as run_folder
from soren_align.run.folder import RunFolder, read_seal
from soren_align.run.lock import LockedError
from soren_align.training import checkpoints, saving
from soren_align.training import run as training
from soren_align.training.trainer import SorenTrainerMixin
from tests.support import command
from tests.support.tiny_run import Hostile, Kill, TinyRun, after_step, die, flip_bit, reseal, same, stop_after
from tests.support.trainer_parity import logged, weights
from transformers import Trainer

pytestmark = pytest.mark.model
EVALUATED = ("trainer.eval_strategy=steps", "trainer.eval_steps=2", "data.eval.limit=8")
EVALUATED += ("data.eval.path=shipped:recipes/quickstart/data/chat_test.jsonl",)


def test_a_resume_with_other_versions_says_so_and_records_them(tmp_path):
    run, before = TinyRun(tmp_path / "run"), {"soren-align": "0.0", "torch": "0.1"}
    run.folder.path.mkdir()
    run.folder.replace(status="training", task="sft", versions=before)
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text('{"log_history": []}')
    for _ in range(2):  # the second resume has the versions of the first
        training._report_resume(run.folder, run.console, checkpoint)
    assert run.said.getvalue().count("other versions than before") == 1
    assert f"torch 0.1 -> {torch.__version__.partition('+')[0]}" in " ".join(run.said.getvalue().split())
    assert run.folder.read()["versions_before"] == [before]
    assert run.folder.read()["resumed_from_steps"] == [2, 2]


def stop_around(function, moment, run):
    """Train and die "before" or "after" a function of soren_align.training.run."""
    original = getattr(training, function)

    def dying(*args):
        if moment == "after":
            original(*args)
        die()

    with patch.object(training, function, dying), pytest.raises(Kill):
        run.train()


@pytest.mark.rest
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_resumed_run_has_the_weights_and_losses_of_an_uninterrupted_one(resumed, task):
    whole, run = resumed(3, task)
    assert logged(whole.folder) == logged(run.folder)


@pytest.mark.parametrize("keys", [
    ("trainer.max_length=128", "trainer.packing_strategy=bfd"),
    pytest.param(("trainer.max_length=48", "data.streaming={shuffle_buffer: 60}"), marks=pytest.mark.slow),
], ids=["in memory", "streamed"])  # fmt: skip
def test_a_resumed_run_packs_the_same_sequences(resumed, keys):
    resumed(3, "sft", "trainer.packing=true", *keys)


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_resumed_run_groups_the_same_examples(resumed, task):
    # in the middle of the second epoch
    resumed(5, task, "trainer.train_sampling_strategy=group_by_length", "data.train.limit=24", "data.eval=null")


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_ranks_group_the_same_examples_whatever_they_drew_before(tiny_run, monkeypatch, strategy):
    orders = []
    monkeypatch.setattr(Trainer, "_run_epoch", lambda self, epoch: orders.append(list(self.train_sampler)))
    trainer = tiny_run("sft", f"trainer.train_sampling_strategy={strategy}", "data.eval=null").trainer()
    trainer.state.max_steps = 6
    trainer._get_train_sampler()
    for noise, epoch in ((0, 1), (1, 1), (0, 2)):
        torch.manual_seed(noise)
        trainer._run_epoch(epoch=epoch)
    assert orders[0] == orders[1] != orders[2]


def test_a_checkpoint_that_was_not_completely_written_is_passed_over(tiny_run):
    whole = tiny_run(name="whole")
    whole.train()
    stop_after(tiny_run, 4)
    checkpoint = tiny_run().folder.checkpoints / "checkpoint-4"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "model.safetensors").write_bytes(b"half")
    (checkpoint / "soren_align.json").unlink(missing_ok=True)
    resumed = tiny_run()
    resumed.train()
    assert "checkpoint-4 is incomplete and was removed" in resumed.said.getvalue()
    assert resumed.folder.read()["resumed_from_steps"] == [2]
    assert same(whole.weights(), resumed.weights())


@pytest.mark.parametrize("lost", ["optimizer.pt", "model.safetensors"])
def test_a_checkpoint_with_a_lost_file_is_refused(tiny_run, lost):
    stop_after(tiny_run, 3)
    (tiny_run().folder.checkpoints / "checkpoint-2" / lost).unlink()
    with pytest.raises(UserError, match=f"checkpoint-2: {lost} missing or truncated"):
        tiny_run().train()


def test_a_pickle_in_a_checkpoint_runs_no_code_and_is_refused_in_words(tiny_run, tmp_path):
    stop_after(tiny_run, 3)
    checkpoint = tiny_run().folder.checkpoints / "checkpoint-2"
    torch.save(Hostile(tmp_path / "made"), checkpoint / "optimizer.pt")
    reseal(checkpoint)
    with pytest.raises(UserError, match="checkpoint-2: is not loaded, because it contains more than tensors"):
        tiny_run().train()
    assert not (tmp_path / "made").exists()


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """The folder of a run that was killed after step 5, with two checkpoints."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    stop_after(lambda: TinyRun(folder), 5)
    return folder


@pytest.fixture
def stopped(tiny_run, killed_run):
    """The newer checkpoint of a copy of `killed_run`."""
    folder = tiny_run().folder
    shutil.copytree(killed_run, folder.path)
    return folder.checkpoints / "checkpoint-4"


def test_every_file_of_a_checkpoint_is_verified_by_content(stopped):
    names = checkpoints._names(stopped)
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json"} <= {*names}
    checkpoints.verify(stopped)
    for name in names:
        content = (stopped / name).read_bytes()
        flip_bit(stopped / name)
        remedy = "remove this checkpoint's folder to resume from the previous checkpoint"
        with pytest.raises(UserError, match=f"checkpoint-4: {re.escape(name)}: the content differs .*; {remedy}"):
            checkpoints.verify(stopped)
        (stopped / name).write_bytes(content)
    with (stopped / "optimizer.pt").open("r+b") as stream:
        stream.seek(1000)
        stream.write(bytes(512))
    with pytest.raises(UserError, match=r"checkpoint-4: optimizer\.pt: the content differs from what was saved"):
        checkpoints.verify(stopped)


def test_after_the_remedy_for_a_damaged_checkpoint_the_run_ends_as_an_uninterrupted_one(tiny_run, stopped):
    flip_bit(stopped / "model.safetensors")
    with pytest.raises(UserError, match=r"checkpoint-4: model\.safetensors: the content"):
        tiny_run().train()
    shutil.rmtree(stopped)
    resumed, whole = tiny_run(), tiny_run(name="whole")
    assert resumed.train()
    assert whole.train()
    assert resumed.folder.read()["resumed_from_steps"] == [2]
    assert same(whole.weights(), resumed.weights())


def test_a_checkpoint_is_refused_under_the_name_of_another_step(stopped):
    origin = read_seal(stopped)["origin"]
    renamed = stopped.rename(stopped.with_name("checkpoint-900"))
    message = "checkpoint-900: is the checkpoint of step 4; rename this folder to checkpoint-4"
    with pytest.raises(UserError, match=message):
        checkpoints.check(renamed, origin)


@pytest.mark.parametrize(("name", "finding"), [
    ("soren_align.json", "is no complete checkpoint"),
    ("old", "was not written by this version of soren-align, or is damaged; remove this checkpoint's folder"),
])  # fmt: skip
def test_without_a_seal_that_has_hashes_nothing_is_read(stopped, name, finding):
    record = read_seal(stopped)
    (stopped / "soren_align.json").write_text(json.dumps({"step": record["step"], "origin": record["origin"]}))
    if name == "soren_align.json":
        (stopped / name).unlink()
    for read in (partial(checkpoints.check, origin=record["origin"]), checkpoints.verify, checkpoints.make_universal):
        with pytest.raises(UserError, match=finding):
            read(stopped)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff{}", b"\0" * 512])
def test_a_damaged_seal_is_named_with_its_checkpoint_and_the_remedy(tmp_path, content):
    (tmp_path / "soren_align.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"{tmp_path}/soren_align\.json.*; remove this checkpoint's folder to resume"):
        read_seal(tmp_path)


def test_the_best_checkpoint_is_verified_before_it_becomes_the_model(tiny_run, monkeypatch):
    best = ("trainer.load_best_model_at_end=true", "trainer.eval_strategy=steps", "trainer.eval_steps=2")
    original = SorenTrainerMixin._load_best_model

    def damaged(self):
        flip_bit(Path(self.state.best_model_checkpoint) / "model.safetensors")
        original(self)

    monkeypatch.setattr(SorenTrainerMixin, "_load_best_model", damaged)
    with pytest.raises(UserError, match=r"/checkpoint-\d: model\.safetensors: the content differs from what was saved"):
        tiny_run("sft", *best, "data.eval.limit=8").train()


def test_files_are_on_the_disk_before_the_seal_and_the_status(tiny_run, monkeypatch):
    """And the folders that name them; an older checkpoint is removed after that."""
    events, sync, write = [], os.fsync, files.write

    def fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def writing(path, text):
        if path.name == "soren_align.json" or '"status": "trained"' in text:
            events.append(path)
        write(path, text)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(checkpoints, "write", writing)
    monkeypatch.setattr(run_folder, "write", writing)
    monkeypatch.setattr(saving, "rotate_checkpoints", lambda *_: events.append("rotate"))
    run = tiny_run("sft", "trainer.max_steps=2")
    assert run.train()
    (checkpoint,), (seal, rotation, end) = (
        run.folder.complete_checkpoints(),
        (
            events.index(event)
            for event in (
                run.folder.checkpoints / "checkpoint-2/soren_align.json",
                "rotate",
                run.folder.path / "run.json",
            )
        ),
    )
    entries = {path for path in checkpoint.rglob("*") if path.name != "soren_align.json"}
    assert {*entries, checkpoint} <= {*events[:seal]}
    assert events[rotation - 2 : rotation] == [checkpoint, run.folder.checkpoints]
    exported = {run.folder.path / "model.part" / path.name for path in run.folder.model.iterdir()}
    assert exported | {run.folder.path / "model.part"} <= {*events[rotation:end]}
    assert run.folder.path in events[rotation:end]


@pytest.mark.rest
@pytest.mark.parametrize("damage", ["broken", "changed", "removed"])
def test_lost_lines_of_measurements_are_those_of_the_checkpoint(tiny_run, stopped, damage):
    metrics = tiny_run().folder.metrics
    before = metrics.read_text()
    first, *others = before.splitlines()
    kept = [line for line in before.splitlines() if json.loads(line)["step"] <= 4]
    changed = first.replace('"loss": ', '"loss": 1')
    damages = {"broken": [first[:-4], "[1]", *others, '{"step": 9, "lo'], "changed": [changed, *others]}
    metrics.write_text("".join(line + "\n" for line in damages.get(damage, [])))
    if damage == "removed":
        metrics.unlink()
    resumed = tiny_run()
    assert resumed.train()
    lost = 1 if damage in ("broken", "changed") else len(kept)
    notice = f"metrics.jsonl: {lost} damaged or missing lines were restored from checkpoint-4"
    assert notice in " ".join(resumed.said.getvalue().split())
    assert [*map(json.loads, metrics.read_text().splitlines()[: len(kept)])] == [*map(json.loads, kept)]


@pytest.mark.rest
def test_the_summary_of_a_training_stands_once_in_its_metrics(tiny_run):
    for _ in range(2):
        stop_around("_save_model", "before", tiny_run())
    run = tiny_run()
    assert run.train()
    assert sum("train_runtime" in line for line in run.folder.metrics.read_text().splitlines()) == 1
    assert "damaged" not in run.said.getvalue()


def test_a_checkpoint_of_other_data_or_other_weights_is_refused(tiny_run):
    stop_after(tiny_run, 3)
    seal = tiny_run().folder.checkpoints / "checkpoint-2" / "soren_align.json"
    record = json.loads(seal.read_text())
    for key, value in (("data", {**record["origin"]["data"], "sha256": "f00"}), ("start", "f00")):
        seal.write_text(json.dumps({**record, "origin": {**record["origin"], key: value}}))
        with pytest.raises(UserError, match="belongs to another run"):
            tiny_run().train()
    seal.write_text(json.dumps(record))
    assert tiny_run().train()


def test_a_template_that_has_changed_in_its_file_is_refused(tiny_run, tmp_path):
    file = tmp_path / "mine.jinja"
    text = resolve_path("shipped:recipes/quickstart/base/chat_template.jinja").read_text()
    file.write_text(text)
    asked = ("sft", f"model.chat_template={file}")
    stop_after(lambda: tiny_run(*asked), 3)
    file.write_text(text + "{# the same #}")
    message = r"belongs to another run, because these values differ:\n  chat_template_sha256: '\w+' instead of '\w+'"
    with pytest.raises(UserError, match=message):
        tiny_run(*asked).train()
    file.write_text(text)
    assert tiny_run(*asked).train()


def test_old_checkpoints_go_only_after_the_new_one_is_sealed(tiny_run, monkeypatch):
    original, seen = checkpoints.seal, []

    def watching(checkpoint, *rest):
        seen.append(sorted(p.parent.name for p in checkpoint.parent.glob("checkpoint-*/soren_align.json")))
        original(checkpoint, *rest)

    monkeypatch.setattr(checkpoints, "seal", watching)
    run = tiny_run("sft", "trainer.save_total_limit=1")
    run.train()
    assert seen == [[], ["checkpoint-2"], ["checkpoint-4"]]
    assert [p.name for p in run.folder.checkpoints.glob("checkpoint-*")] == ["checkpoint-6"]


def start(folder, is_fork=True):
    sets = [f"run.output_dir={folder.path}", "trainer.max_steps=60", "trainer.save_steps=5"]
    sets.append("trainer.logging_steps=1")
    return command.start("sft", "quickstart/sft", "--no-eval", *command.overrides(*sets), is_fork=is_fork)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run by start(), in an interpreter."""
    folder = RunFolder(tmp_path_factory.mktemp("uninterrupted") / "run")
    assert start(folder, is_fork=False).wait() == 0
    return folder


@pytest.mark.process
def test_kills_at_random_moments_and_ctrl_c_change_nothing(tmp_path, whole):
    killed, rng, moments = RunFolder(tmp_path / "killed"), random.Random(2026), []
    for is_training, most in ((False, 2), (True, 0.3)):
        process = start(killed)
        # The first kill falls into the start, the second into the training itself.
        if is_training:
            command.wait_for(lambda: any(killed.checkpoints.glob("checkpoint-*")), process)
        moments.append(rng.uniform(0, most))
        time.sleep(moments[-1])
        process.send_signal(signal.SIGKILL)
        process.wait()
    num_lines = len(killed.metrics.read_text().splitlines())
    process = start(killed)
    command.wait_for(lambda: len(killed.metrics.read_text().splitlines()) > num_lines + 1, process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert "rerun the same command to resume" in process.stderr.read()
    process = start(killed)
    assert process.wait() == 0, process.stderr.read()
    assert killed.read()["status"] == "finished"
    assert same(weights(whole.path), weights(killed.path)), f"kills after {moments}"


@pytest.mark.process
def test_two_processes_do_not_share_a_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    first = start(folder)
    command.wait_for(lambda: (folder.path / ".lock").exists(), first)
    time.sleep(0.2)
    second = start(folder)
    assert second.wait() == 2
    assert "another process is training or evaluating this run" in second.stderr.read()
    first.kill()
    first.wait()


def test_a_run_whose_lock_was_removed_stops_before_it_writes_a_checkpoint(tiny_run):
    """Another command may train in the folder now."""
    run = tiny_run()
    message = "the lock of this folder was removed.*This command stops"
    with after_step(3, (run.folder.path / ".lock").unlink), pytest.raises(LockedError, match=message):
        run.train()
    assert [checkpoint.name for checkpoint in run.folder.complete_checkpoints()] == ["checkpoint-2"]
    assert tiny_run().train()


@pytest.mark.rest
@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_kill_around_the_saving_of_the_model_changes_nothing(tiny_run, moment):
    """The last checkpoint stands, run.json says "training", and the model folder is not there yet, or is already.

    The resumed run takes no step, and has the records of those that were taken.
    """
    whole = tiny_run(name="whole")
    whole.train()
    stop_around("_save_model", moment, tiny_run())
    resumed = tiny_run()
    assert resumed.train()
    assert resumed.folder.read()["resumed_from_steps"] == [6]
    assert resumed.folder.read()["training"]["steps"] == 6
    assert resumed.folder.read()["optimizer"] == whole.folder.read()["optimizer"]
    assert whole.folder.read()["optimizer"]["maps_per_step"] > 0
    assert same(whole.weights(), resumed.weights())
