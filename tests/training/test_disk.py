"""A full disk, a read-only folder and a file in the way are one sentence each, and no complete checkpoint is lost."""

import errno
import json
import os
from pathlib import Path

import pytest
import safetensors
import torch
from soren_align.core import errors, files
from soren_align.core.errors import ResumableError, UserError, from_os_error
from soren_align.launch import commands
from soren_align.run.folder import RunFolder
from soren_align.training import checkpoints
from tests.support.tiny_run import same
from torch.distributed.checkpoint.api import CheckpointException

SAVED = ("trainer.save_steps=2", "trainer.save_total_limit=1")


@pytest.mark.model
def test_a_disk_that_fills_while_a_checkpoint_is_written_leaves_the_last_one(tiny_run, monkeypatch):
    run = tiny_run("sft", *SAVED)
    original = torch.save

    def save(value, file, *rest, **settings):
        is_second = "checkpoint-4" in str(file)
        return original(value, "/dev/full" if is_second else file, *rest, **settings)

    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(checkpoints, "_refusal", full)
    message = r"/checkpoint-4: No space left on device .*bytes free\). The last complete checkpoint is ch"
    with pytest.raises(ResumableError, match=message):
        run.train()
    assert [path.name for path in run.folder.checkpoints.iterdir()] == ["checkpoint-2"]
    monkeypatch.undo()
    whole, resumed = tiny_run("sft", *SAVED, name="whole"), tiny_run("sft", *SAVED)
    assert whole.train()
    assert resumed.train()
    assert same(whole.weights(), resumed.weights())


def full(path):
    """An OSError as writing on a full disk raises it: without a name."""
    with pytest.raises(OSError, match="No space left") as error, open("/dev/full", "w") as stream:
        stream.write("x" * 100_000)
    assert error.value.filename is None
    return error.value


@pytest.mark.parametrize(
    ("error", "message"),
    [(full(""), "/here: No space left on device (7 bytes free); free space on this disk, or name a folder"),
     (OSError(errno.EDQUOT, "Disk quota exceeded", "/there/file"), "/there/file: Disk quota exceeded; free space of"),
     (OSError(errno.EBUSY, "Busy", "/there"), "/there: Busy; end the process that uses"),
     (FileNotFoundError(errno.ENOENT, "No such file", "/there"), "/there: No such file; restore this file or folder"),
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


@pytest.mark.parametrize("writing", [files.write, files.append])
def test_a_failed_write_names_its_file(tmp_path, monkeypatch, writing):
    monkeypatch.setattr(Path, "open", lambda self, mode, **_: open("/dev/full", mode.replace("x", "w")))  # noqa: SIM115
    with pytest.raises(OSError, match="No space left") as error:
        writing(tmp_path / "metrics.jsonl", "x" * 100_000)
    assert error.value.filename == str(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    "error",
    [safetensors.SafetensorError("Error while serializing: I/O error"), RuntimeError("PytorchStreamWriter failed")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_without_a_number_is_that_of_the_disk_if_it_refuses_a_probe(tmp_path, monkeypatch, error):
    with pytest.raises(type(error)), checkpoints.write_errors(tmp_path / "run"):
        raise error
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(full("")))
    message = r"/run: No space left on device .*bytes free\). No checkpoint is complete; free space"
    with pytest.raises(ResumableError, match=message), checkpoints.write_errors(tmp_path / "run"):
        raise error


@pytest.mark.parametrize(("number", "action"), [
    (errno.EDQUOT, "free space of your quota"), (errno.EINVAL, "name a folder on another file system"),
    (errno.ENOENT, "restore this file or folder"),
])  # fmt: skip
def test_an_error_of_a_checkpoint_that_is_no_full_disk_names_its_own_remedy(tmp_path, number, action):
    message = rf"/run: {os.strerror(number)}\. No checkpoint is complete; {action}"
    with pytest.raises(ResumableError, match=message), checkpoints.write_errors(tmp_path / "run"):
        raise OSError(number, os.strerror(number))


def test_a_full_disk_of_a_sharded_checkpoint_is_a_sentence(tmp_path):
    """torch.distributed.checkpoint has the errors of all ranks in a BaseException."""
    failed = CheckpointException("write", {1: (full(""), None)})
    message = r"/run: No space left on device .*No checkpoint is complete"
    with pytest.raises(ResumableError, match=message), checkpoints.write_errors(tmp_path / "run"):
        raise failed
    other = CheckpointException("read", {0: (ValueError("shapes"), None)})
    with pytest.raises(CheckpointException), checkpoints.write_errors(tmp_path / "run"):
        raise other


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


def test_results_that_cannot_be_written_are_refused_before_the_evaluation(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"--output: .*/file/out cannot be created: .*/file is a file; name another"):
        files.refuse_unwritable(tmp_path / "file" / "out", "--output")
    files.refuse_unwritable(tmp_path / "new" / "out", "--output")
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    message = r"--output: .* is read-only, or you have no permission to write into it; name another"
    with pytest.raises(UserError, match=message):
        files.refuse_unwritable(tmp_path / "new" / "out", "--output")
