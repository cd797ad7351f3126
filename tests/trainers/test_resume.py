"""Killed at any moment and started again, a run ends with the weights of an uninterrupted one, bit for bit."""

import json
import os
import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from soren_align import shipped
from soren_align.errors import UserError
from soren_align.lock import LockedError
from soren_align.run_folder import RunFolder
from tests.support import command
from tests.support.trainer_parity import logged

pytestmark = pytest.mark.model


def weights(folder):
    return load_file(folder.model / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Kill(BaseException):
    pass


def stop_after(run, step, monkeypatch):
    """Train and die after `step`, as rudely as one process can."""
    from soren_align.trainers.attached_optimizer import OptimizerCheck

    original = OptimizerCheck.on_optimizer_step

    def dying(self, args, state, control, **kwargs):
        original(self, args, state, control, **kwargs)
        if state.global_step == step:
            raise Kill

    with monkeypatch.context() as patch:
        patch.setattr(OptimizerCheck, "on_optimizer_step", dying)
        with pytest.raises(Kill):
            run().train()


@pytest.mark.parametrize("task", ["sft", "dpo"])
@pytest.mark.parametrize("optimizer", ["soren", pytest.param("htmuon", marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_weights_and_losses_of_an_uninterrupted_one(tiny_run, monkeypatch, task, optimizer):
    name = f"optimizer.name={optimizer}"
    whole = tiny_run(task, name, name="whole")
    whole.train()
    stop_after(lambda: tiny_run(task, name), 3, monkeypatch)
    resumed = tiny_run(task, name)
    resumed.train()
    assert resumed.folder.read()["resumed_from_steps"] == [2]
    assert same(weights(whole.folder), weights(resumed.folder))

    assert logged(whole.folder) == logged(resumed.folder)


def test_a_resumed_run_packs_the_same_sequences(tiny_run, monkeypatch):
    packed = ("sft", "trainer.packing=true", "trainer.max_length=128", "trainer.packing_strategy=bfd")
    whole = tiny_run(*packed, name="whole")
    whole.train()
    stop_after(lambda: tiny_run(*packed), 3, monkeypatch)
    resumed = tiny_run(*packed)
    resumed.train()
    assert resumed.folder.read()["resumed_from_steps"] == [2]
    assert same(weights(whole.folder), weights(resumed.folder))


def test_a_checkpoint_that_was_not_completely_written_is_passed_over(tiny_run, monkeypatch):
    whole = tiny_run(name="whole")
    whole.train()
    stop_after(tiny_run, 4, monkeypatch)
    folder = tiny_run().folder
    (folder.checkpoints / "checkpoint-4").mkdir(exist_ok=True)
    (folder.checkpoints / "checkpoint-4" / "model.safetensors").write_bytes(b"half")
    (folder.checkpoints / "checkpoint-4" / "soren_align.json").unlink(missing_ok=True)
    resumed = tiny_run()
    resumed.train()
    assert "checkpoint-4 is incomplete; removed" in resumed.said.getvalue()
    assert resumed.folder.read()["resumed_from_steps"] == [2]
    assert same(weights(whole.folder), weights(resumed.folder))


@pytest.mark.parametrize("lost", ["optimizer.pt", "scheduler.pt", "model.safetensors", "rng_state.pth"])
def test_a_checkpoint_with_a_lost_file_is_refused(tiny_run, monkeypatch, lost):
    stop_after(tiny_run, 3, monkeypatch)
    (tiny_run().folder.checkpoints / "checkpoint-2" / lost).unlink()
    with pytest.raises(UserError, match=f"checkpoint-2: {lost} missing or truncated"):
        tiny_run().train()


class Hostile:
    """Makes a folder where it is unpickled."""

    def __init__(self, made):
        self.made = str(made)

    def __reduce__(self):
        return os.mkdir, (self.made,)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickle_in_a_checkpoint_runs_no_code_and_is_refused_in_words(tiny_run, tmp_path, monkeypatch, name):
    stop_after(tiny_run, 3, monkeypatch)
    checkpoint = tiny_run().folder.checkpoints / "checkpoint-2"
    torch.save(Hostile(tmp_path / "made"), checkpoint / name)
    record = json.loads((checkpoint / "soren_align.json").read_text())
    record["files"][name] = (checkpoint / name).stat().st_size
    (checkpoint / "soren_align.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="checkpoint-2: contains more than tensors and plain data, and is not loaded"):
        tiny_run().train()
    assert not (tmp_path / "made").exists()


def test_a_checkpoint_of_other_data_or_other_weights_is_refused(tiny_run, monkeypatch):
    stop_after(tiny_run, 3, monkeypatch)
    seal = tiny_run().folder.checkpoints / "checkpoint-2" / "soren_align.json"
    record = json.loads(seal.read_text())
    for key, value in (("data", {**record["origin"]["data"], "sha256": "f00"}), ("start", "f00")):
        seal.write_text(json.dumps({**record, "origin": {**record["origin"], key: value}}))
        with pytest.raises(UserError, match="belongs to another run"):
            tiny_run().train()
    seal.write_text(json.dumps(record))
    assert tiny_run().train()


def test_a_template_that_has_changed_in_its_file_is_refused(tiny_run, tmp_path, monkeypatch):
    file = tmp_path / "mine.jinja"
    text = shipped.resolve("shipped:recipes/quickstart/base/chat_template.jinja").read_text()
    file.write_text(text)
    asked = ("sft", f"model.chat_template={file}")
    stop_after(lambda: tiny_run(*asked), 3, monkeypatch)
    file.write_text(text + "{# the same #}")
    with pytest.raises(UserError, match=r"belongs to another run:\n  chat_template_sha256: '\w+' there, '\w+' here"):
        tiny_run(*asked).train()
    file.write_text(text)
    assert tiny_run(*asked).train()


def test_a_checkpoint_by_path_must_be_ours(tiny_run, tmp_path):
    (tmp_path / "strange").mkdir()
    with pytest.raises(UserError, match=r"no complete checkpoint of soren-align"):
        tiny_run("sft", f"run.resume={tmp_path / 'strange'}").train()


def test_old_checkpoints_go_only_after_the_new_one_is_sealed(tiny_run, monkeypatch):
    from soren_align.trainers import checkpoints

    original, seen = checkpoints.mark_complete, []

    def watching(checkpoint, origin):
        seen.append(sorted(p.parent.name for p in checkpoint.parent.glob("checkpoint-*/soren_align.json")))
        original(checkpoint, origin)

    monkeypatch.setattr(checkpoints, "mark_complete", watching)
    run = tiny_run("sft", "trainer.save_total_limit=1")
    run.train()
    assert seen == [[], ["checkpoint-2"], ["checkpoint-4"]]
    assert [p.name for p in run.folder.checkpoints.glob("checkpoint-*")] == ["checkpoint-6"]


def start(folder, *overrides):
    sets = [f"run.output_dir={folder.path}", "trainer.max_steps=60", "trainer.save_steps=5", *overrides]
    return command.start("sft", "quickstart/sft", "--no-eval", *command.overrides(*sets))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run by start()."""
    folder = RunFolder(tmp_path_factory.mktemp("uninterrupted") / "run")
    assert start(folder).wait() == 0
    return folder


@pytest.mark.process
def test_five_kills_at_random_moments_change_nothing(tmp_path, whole):
    killed = RunFolder(tmp_path / "killed")
    rng = random.Random(2026)
    kills, moments = 0, []
    while kills < 5:
        process = start(killed)
        # Half of the kills fall anywhere from the first second on, half into the training itself.
        if kills % 2:
            wait_for(lambda: any(killed.checkpoints.glob("checkpoint-*")), process)
            moments.append(rng.uniform(0, 1))
        else:
            moments.append(rng.uniform(0, 10))
        time.sleep(moments[-1])
        if process.poll() is not None:
            break  # it was done before the kill: nothing is left to interrupt
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    if (killed.read() or {}).get("status") != "finished":  # the last kill may fall between that and the process's end
        process = start(killed)
        assert process.wait() == 0, process.stderr.read()
    assert killed.read()["status"] == "finished"
    assert same(weights(whole), weights(killed)), f"kills after {moments}"


@pytest.mark.process
def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path, whole):
    stopped = RunFolder(tmp_path / "stopped")
    process = start(stopped)
    wait_for(lambda: stopped.metrics.is_file() and stopped.metrics.stat().st_size, process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert "rerun the same command to resume" in process.stderr.read()
    assert start(stopped).wait() == 0
    assert same(weights(whole), weights(stopped))


@pytest.mark.process
def test_two_processes_do_not_share_a_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    first = start(folder)
    wait_for(lambda: (folder.path / ".lock").exists(), first)
    time.sleep(0.2)
    second = start(folder)
    assert second.wait() == 2
    assert "another process is running or evaluating this run" in second.stderr.read()
    first.kill()
    first.wait()


def test_a_run_whose_lock_was_removed_stops_before_it_writes_a_checkpoint(tiny_run, monkeypatch):
    """Another command may train in the folder now."""
    from soren_align.trainers.attached_optimizer import OptimizerCheck

    original = OptimizerCheck.on_optimizer_step

    def removing(self, args, state, control, **kwargs):
        original(self, args, state, control, **kwargs)
        if state.global_step == 3:
            (run.folder.path / ".lock").unlink()

    run = tiny_run()
    with monkeypatch.context() as patch:
        patch.setattr(OptimizerCheck, "on_optimizer_step", removing)
        with pytest.raises(LockedError, match=r"its lock was removed or taken over.*; this one stops"):
            run.train()
    assert [checkpoint.name for checkpoint in run.folder.complete_checkpoints()] == ["checkpoint-2"]
    assert tiny_run().train()


def wait_for(condition, process, seconds=600):
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_kill_around_the_saving_of_the_model_changes_nothing(tiny_run, monkeypatch, moment):
    """The last checkpoint stands, run.json says "training", and the model folder is not there yet, or is already."""
    from soren_align.trainers import training

    whole = tiny_run(name="whole")
    whole.train()
    original = training._save_model

    def dying(*args):
        if moment == "after":
            original(*args)
        raise Kill

    with monkeypatch.context() as patch:
        patch.setattr(training, "_save_model", dying)
        with pytest.raises(Kill):
            tiny_run().train()
    resumed = tiny_run()
    assert resumed.train()
    assert resumed.folder.read()["training"]["steps"] == 6
    assert same(weights(whole.folder), weights(resumed.folder))
