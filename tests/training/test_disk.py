"""A full disk, a read-only folder and a file in the way are one sentence each, and no complete checkpoint is lost."""

import errno
import json
import re
from pathlib import Path
from unittest import mock

import pytest
import safetensors
import torch
from soren_align.core import errors, files
from soren_align.core.errors import ResumableError, UserError, from_os_error
from soren_align.launch import commands
from soren_align.run.folder import RunFolder
from soren_align.training import checkpoints, trainer
from tests.support import command
from tests.support.tiny_run import same
from torch.distributed.checkpoint.api import CheckpointException

SAVED = ("trainer.save_steps=2", "trainer.save_total_limit=1")


@pytest.mark.model
@pytest.mark.parametrize("overrides", [
    pytest.param((), id="float32", marks=pytest.mark.slow),
    pytest.param(("model.dtype=bfloat16", "optimizer.compensation=kahan"), id="kahan"),
    pytest.param(("model.lora={r: 4}", "optimizer.aux_lr=null"), id="lora", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_expected_size_is_that_of_the_checkpoint(tiny_run, overrides):
    run = tiny_run("sft", *overrides, "trainer.save_steps=3", "trainer.max_steps=3", "run.lost_updates=warn")
    with mock.patch.object(trainer, "refuse_full_disk", wraps=trainer.refuse_full_disk) as refusing:
        assert run.train()
    expected = refusing.call_args_list[0].args[1]
    (checkpoint,) = run.folder.complete_checkpoints()
    sizes = {f.name: f.stat().st_size for f in checkpoint.iterdir() if f.suffix in (".pt", ".safetensors")}
    size = sum(sizes.values())
    # Names and shapes in the files' headers; LoRA's tensors are tiny.
    assert 0.9 * size - 40_000 < expected <= size, (expected, sizes)


@pytest.mark.rest
@pytest.mark.model
def test_a_full_disk_stops_before_the_checkpoint_and_the_last_one_is_kept(tiny_run, monkeypatch):
    """Then the same command resumes."""
    whole = tiny_run("sft", *SAVED, name="whole")
    assert whole.train()
    run = tiny_run("sft", *SAVED)
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _: 0 if run.folder.complete_checkpoints() else 10**9)
    with pytest.raises(UserError) as error:
        run.train()
    message = str(error.value)
    assert re.fullmatch(
        r".*/run/checkpoints: 0.00 kB are free, but a checkpoint needs (\d|\.)+ [kM]B \(0 and [\d,]+ bytes\). The last "
        r"complete checkpoint is checkpoint-2; free space on this disk, then rerun the same command to resume; or "
        r"choose another run.output_dir",
        message,
    )
    assert [path.name for path in run.folder.checkpoints.iterdir()] == ["checkpoint-2"]
    monkeypatch.undo()
    resumed = tiny_run("sft", *SAVED)
    assert resumed.train()
    assert same(whole.weights(), resumed.weights())


@pytest.mark.model
def test_a_disk_that_fills_while_a_checkpoint_is_written_leaves_the_last_one(tiny_run, monkeypatch):
    run = tiny_run("sft", *SAVED)
    original = torch.save

    def save(value, file, *rest, **settings):
        is_second = "checkpoint-4" in str(file)
        return original(value, "/dev/full" if is_second else file, *rest, **settings)

    monkeypatch.setattr(torch, "save", save)
    message = r"/checkpoint-4: cannot be written completely .*bytes free\). The last complete checkpoint is ch"
    with pytest.raises(UserError, match=message):
        run.train()
    assert [path.name for path in run.folder.checkpoints.iterdir()] == ["checkpoint-2"]


@pytest.mark.model
def test_the_model_too_needs_space(tiny_run, monkeypatch):
    run = tiny_run("sft", "trainer.save_strategy=no", "trainer.max_steps=1")
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _: 5_000)
    message = r"/run: 5.00 kB are free, but the model needs .*No checkpoint is complete; .*to start"
    with pytest.raises(UserError, match=message):
        run.train()
    assert not run.folder.model.exists()


def full(path):
    """An OSError as writing on a full disk raises it: without a name."""
    with pytest.raises(OSError, match="No space left") as error, open("/dev/full", "w") as stream:
        stream.write("x" * 100_000)
    assert error.value.filename is None
    return error.value


@pytest.mark.parametrize(
    ("error", "message"),
    [(full(""), "/here: No space left on device (7 bytes free); free space on this disk, or name a folder"),
     (OSError(errno.EDQUOT, "Disk quota exceeded", "/there/file"), "/there/file: Disk quota exceeded (7 bytes free)"),
     (PermissionError(errno.EACCES, "Permission denied", "/there"), "/there: Permission denied; name another folder"),
     (OSError(errno.EROFS, "Read-only file system", "/there"), "/there: Read-only file system; name another folder"),
     (FileExistsError(errno.EEXIST, "File exists", "/there"), "/there: File exists; remove the file"),
     (OSError(errno.EFBIG, "File too large"),
      "/here: File too large; raise the limit of file sizes (ulimit -f, or the quota of the file system)"),
     (OSError(errno.EMFILE, "Too many open files", "/there"),
      "/there: Too many open files; raise the limit of open files (ulimit -n)"),
     (OSError("Not enough disk space. Needed: 5 GB"), "Not enough disk space. Needed: 5 GB")],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_an_os_error_names_folder_space_and_remedy(monkeypatch, error, message):
    monkeypatch.setattr(errors, "free_bytes", lambda _: 7)
    problem = str(from_os_error(error, "/here"))
    assert problem.startswith(message)
    assert "\n" not in problem


def test_an_error_without_a_place_names_the_fullest_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache" / "not" / "yet"))
    monkeypatch.setattr(errors, "free_bytes", lambda place: 3 if "cache" in str(place) else 10**9)
    assert str(from_os_error(full(""))).startswith(f"{tmp_path}/cache/not/yet: No space left on device (3 bytes free)")


def test_free_bytes_of_a_folder_that_does_not_exist_are_those_of_its_disk(tmp_path):
    assert errors.free_bytes(tmp_path / "not" / "yet") == pytest.approx(errors.free_bytes(tmp_path), rel=0.1)


@pytest.mark.parametrize("writing", [files.write, files.append])
def test_a_failed_write_names_its_file(tmp_path, monkeypatch, writing):
    monkeypatch.setattr(Path, "open", lambda self, mode, **_: open("/dev/full", mode.replace("x", "w")))  # noqa: SIM115
    with pytest.raises(OSError, match="No space left") as error:
        writing(tmp_path / "metrics.jsonl", "x" * 100_000)
    assert error.value.filename == str(tmp_path / "metrics.jsonl")


def test_an_error_of_safetensors_is_a_sentence(tmp_path):
    message = r"/run: No such file or directory .*bytes free\). No checkpoint is complete"
    with pytest.raises(UserError, match=message), checkpoints.write_errors(tmp_path / "run"):
        safetensors.torch.save_file({"a": torch.zeros(3)}, tmp_path / "run" / "missing" / "a.safetensors")


def test_a_full_disk_of_a_sharded_checkpoint_is_a_sentence(tmp_path):
    """torch.distributed.checkpoint has the errors of all ranks in a BaseException."""
    failed = CheckpointException("write", {1: (full(""), None)})
    message = r"/run: No space left on device .*No checkpoint is complete"
    with pytest.raises(ResumableError, match=message), checkpoints.write_errors(tmp_path / "run"):
        raise failed
    other = CheckpointException("read", {0: (ValueError("shapes"), None)})
    with pytest.raises(CheckpointException), checkpoints.write_errors(tmp_path / "run"):
        raise other


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EFBIG, "File too large"),
     safetensors.SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
     RuntimeError("PytorchStreamWriter failed writing file data/0")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize("limit", [5_000, -1], ids=["limited", "unlimited"])
def test_the_remedy_for_a_file_that_may_not_grow_is_its_limit(tmp_path, monkeypatch, error, limit):
    monkeypatch.setattr(checkpoints.resource, "getrlimit", lambda _: (limit, -1))
    is_limited = limit > 0 or "too large" in str(error)
    action = r"raise the limit of file sizes \(ulimit -f.*" if is_limited else "free space on this disk"
    message = rf"/run: .*No checkpoint is complete; {action}, then rerun the same command"
    with pytest.raises(UserError, match=message), checkpoints.write_errors(tmp_path / "run"):
        raise error


def test_another_runtime_error_is_not_a_matter_of_disks(tmp_path):
    with pytest.raises(RuntimeError, match="shapes"), checkpoints.write_errors(tmp_path / "run"):
        raise RuntimeError("shapes cannot be multiplied")


def test_an_os_error_of_a_run_is_recorded_and_a_full_disk_hides_nothing(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.replace(status="training", task="sft", versions={"soren-align": "0"})
    with pytest.raises(UserError, match="/there: Permission denied"), commands._recording_errors(folder):
        raise PermissionError(errno.EACCES, "Permission denied", "/there")
    assert json.loads((tmp_path / "run.json").read_text())["last_error"].startswith("/there: Permission denied")
    monkeypatch.setattr(RunFolder, "update", lambda *_, **__: open("/dev/full", "w").write("x" * 100_000))  # noqa: SIM115
    with pytest.raises(UserError, match="the first error"), commands._recording_errors(folder):
        raise UserError("the first error")
    folder.release()


@pytest.mark.parametrize("name", ["checkpoints", "model.part"])
def test_a_file_in_the_way_is_one_sentence(tmp_path, name):
    (tmp_path / "parent").write_text("a file")
    result = command.run("sft", "quickstart/sft", "--set", f"run.output_dir={tmp_path / 'parent' / name}")
    assert result.returncode == 2
    assert "parent is a file; name another folder" in " ".join(result.stderr.split())


def test_results_that_cannot_be_written_are_refused_before_the_evaluation(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"--output: .*/file/out cannot be created: .*/file is a file; name another"):
        files.refuse_unwritable(tmp_path / "file" / "out", "--output")
    files.refuse_unwritable(tmp_path / "new" / "out", "--output")
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    message = r"--output: .* is read-only, or you have no permission to write into it; name another"
    with pytest.raises(UserError, match=message):
        files.refuse_unwritable(tmp_path / "new" / "out", "--output")
