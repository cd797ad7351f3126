"""A command that ends early prints one message, once for all ranks, and returns the exit code for it."""

import contextlib
import errno
import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from soren_align.core import signals
from soren_align.core.errors import LostRankError, OutOfReach, ResumableError, SilentRankError, UserError, known_failure
from soren_align.core.text import Terminal
from soren_align.launch import commands, exit_codes, torchrun, worker
from soren_align.launch.torchrun import Failure
from soren_align.sharding.ranks import Ranks
from soren_align.training.run import StopOnSignal
from tests.support import command

RANK = {"WORLD_SIZE": "2", "RANK": "1"}


@pytest.fixture
def reported(monkeypatch, capsys):
    """reported(error, environment) returns the exit code and the text on stderr."""

    def call(error, environment, **settings):
        for name in ("WORLD_SIZE", "RANK", "TORCHELASTIC_ERROR_FILE", torchrun.STARTED_HERE):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return exit_codes.report(error, **settings), capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("error", "environment", "expected"),
    [(UserError("write this"), {}, (2, "error: write this\n")),
     (UserError("write this"), RANK, (2, "error: rank 1: write this\n")),
     (OSError(28, "No space left on device", "/x"), {}, (2, "/x")),
     (KeyboardInterrupt(), {}, (130, "stopped; rerun the same command to resume\n")),
     (LostRankError("another rank failed"), RANK, (1, "rank 1: another rank failed\n")),
     (ValueError("a defect"), RANK, (1, "rank 1: ValueError: a defect\n"))],
    ids=["user", "user on a rank", "disk", "signal", "lost rank", "defect on a rank"],
)  # fmt: skip
def test_each_error_has_its_exit_code_and_message(reported, error, environment, expected):
    code, text = reported(error, environment)
    assert code == expected[0]
    assert expected[1] in text


OF_THE_MACHINE = {
    "full disk": OSError(errno.ENOSPC, "No space left on device"),
    "quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "broken disk": OSError(errno.EIO, "Input/output error"),
    "permissions": PermissionError(errno.EACCES, "Permission denied", "/data/chat.jsonl"),
    "memory": MemoryError(),
    "torch's memory": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    "oneDNN's memory": RuntimeError("could not create a primitive"),
    "GPU's memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "torch's files": RuntimeError("unable to open file <run/a> in read-only mode: Too many open files (24)"),
    "threads": RuntimeError("can't start new thread"),
    "lost rank": ResumableError("another rank failed"),
    "offline": OutOfReach("owner/data: the hub cannot be reached"),
}


@pytest.mark.parametrize("name", OF_THE_MACHINE)
def test_a_failure_of_the_machine_is_resumable(name):
    assert isinstance(known_failure(OF_THE_MACHINE[name]), ResumableError)


def test_a_defect_is_no_failure_of_the_machine():
    assert known_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert known_failure(KeyError("loss")) is None


def test_a_command_that_cannot_resume_does_not_advise_it(reported):
    assert reported(KeyboardInterrupt(), {}, resumable=False) == (130, "stopped\n")


def test_a_defect_in_a_single_process_is_raised_with_its_traceback(reported):
    with pytest.raises(ValueError, match="a defect"):
        reported(ValueError("a defect"), {})


@pytest.mark.parametrize("started_here", [True, False])
def test_a_rank_records_its_error_and_prints_it_only_for_a_foreign_launcher(reported, tmp_path, started_here):
    file = tmp_path / "error.json"
    environment = RANK | {"TORCHELASTIC_ERROR_FILE": str(file)} | ({torchrun.STARTED_HERE: "1"} if started_here else {})
    code, text = reported(UserError("write this"), environment)
    assert code == 2
    assert text == ("" if started_here else "error: rank 1: write this\n")
    assert "write this" in json.loads(file.read_text())["message"]["message"]


def failure(exitcode, timestamp=0, message="", trace=""):
    kinds = {type.__name__: type for type in (UserError, ResumableError, LostRankError, SilentRankError)}
    record = {"message": message, "extraInfo": {"py_callstack": trace}}
    if kind := kinds.get(message.partition(":")[0]):
        record |= {"kind": kind.kind, "resumable": issubclass(kind, ResumableError)}
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, message=record)


SILENT = "SilentRankError: another rank did not answer for 20 s."
LOST = "LostRankError: another rank failed (closed)"


@pytest.mark.parametrize(("failures", "code", "message", "is_resumable"), [
    # the ranks that torchrun ended by SIGTERM, or that lost a neighbour earlier, are not the cause
    ({0: failure(1, 1, LOST), 1: failure(-signal.SIGKILL, 2)}, 1,
     "rank 1 was killed by SIGKILL (out of memory, perhaps)", True),
    ({0: failure(-signal.SIGTERM, 1), 1: failure(-signal.SIGSEGV, 2)}, 1, "rank 1 was killed by SIGSEGV; the other",
     True),
    ({0: failure(-64 - 1)}, 1, "rank 0 was killed by signal 65; the other", True),
    ({0: failure(1, 1), 1: failure(2, 2, "UserError: write this: now")}, 2, "write this: now", False),
    ({0: failure(2, 2, "ResumableError: the disk is full")}, 2, "the disk is full", True),
    ({0: failure(-signal.SIGTERM, 1), 1: failure(130, 2, "KeyboardInterrupt: ")}, 130, "stopped; rerun", False),
    ({0: SimpleNamespace(exitcode=130, timestamp=0, message="no file")}, 130, "", False),
    ({0: failure(1, 2), 1: failure(1, 1, trace="Traceback: here\n")}, 1,
     "Traceback: here\nrank 1 failed with exit code 1; the other ranks were stopped", False),
    ({0: failure(1, 1, LOST), 1: failure(1, 2, "TypeError: x", trace="Traceback: here\n")}, 1,
     "Traceback: here\nrank 1 failed", False),
    ({0: SimpleNamespace(exitcode=1, timestamp=0, message="no file")}, 1, "rank 0 failed with exit code 1; the", False),
    # torchrun kills a rank that was stopped (SIGSTOP) 30 seconds after the others have noticed
    ({0: failure(1, 5, SILENT), 1: failure(-signal.SIGKILL, 35)}, 1, "rank 1 did not answer for 20 s.", True),
    ({0: failure(1, 5, SILENT), 1: failure(-signal.SIGKILL, 4)}, 1, "rank 1 was killed by SIGKILL", True),
    ({0: failure(1, 5, SILENT), 1: failure(1, 6, LOST)}, 1, "another rank did not answer for 20 s.", True),
])  # fmt: skip
def test_the_rank_that_failed_first_is_the_one_reported(monkeypatch, failures, code, message, is_resumable):
    def run(_):
        raise torchrun.ChildFailedError.__new__(torchrun.ChildFailedError)

    monkeypatch.setattr(torchrun.ChildFailedError, "failures", failures, raising=False)
    monkeypatch.setattr(torchrun.torchrun, "run", run)
    found = torchrun.start(2, ["run"])
    assert (found.code, found.is_resumable) == (code, is_resumable)
    assert found.message.startswith(message)


def test_a_signal_to_the_launcher_advises_to_rerun(monkeypatch):
    def run(_):
        raise torchrun.SignalException("stopped", signal.SIGINT)

    monkeypatch.setattr(torchrun.torchrun, "run", run)
    message = "3 processes stopped by SIGINT; rerun the same command to resume"
    assert torchrun.start(3, ["run"]) == Failure(130, message)


SLOW_WORKER = """
import pathlib, signal, sys, time

def save(*_):
    time.sleep(3)
    pathlib.Path(sys.argv[1]).touch()
    sys.exit(130)

signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1] + ".started").touch()
time.sleep(600)
"""


@pytest.mark.process
@pytest.mark.parametrize(("seconds", "is_saved"), [(1, False), (200, True)])
def test_a_rank_that_saves_for_seconds_is_killed_only_after_the_timeout(monkeypatch, tmp_path, seconds, is_saved):
    script, saved, parse = tmp_path / "worker.py", tmp_path / "saved", torchrun.torchrun.parse_args
    script.write_text(SLOW_WORKER)

    def parse_args(arguments):
        args = parse(arguments)
        args.module, args.training_script, args.training_script_args = False, str(script), [str(saved)]
        return args

    def stop():
        while not (tmp_path / "saved.started").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    monkeypatch.setattr(torchrun, "SHUTDOWN_SECONDS", seconds)
    monkeypatch.setattr(torchrun.torchrun, "parse_args", parse_args)
    before = {number: signal.getsignal(number) for number in (*signals.stop_signals(), signal.SIGQUIT)}
    try:
        threading.Thread(target=stop, daemon=True).start()
        assert torchrun.start(1, []).code == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert saved.exists() == is_saved


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hangups(monkeypatch):
    """SIGHUP and SIGINT as a shell starts a command, also if the tests run under nohup or in the background."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_outside_of_training_ends_a_command_with_one_line(monkeypatch, hangups, number):
    def load(*_, **__):
        signal.raise_signal(number)
        return 0  # of a command that ignores it

    monkeypatch.setattr(commands, "train", load)
    before = signal.getsignal(number)
    result = command.run("sft", "quickstart/sft")
    assert (result.returncode, result.stderr) == (130, "stopped; rerun the same command to resume\n")
    assert signal.getsignal(number) == before


def test_a_signal_while_an_error_is_reported_changes_nothing(monkeypatch, tmp_path):
    """Of a rank that lost another one: torchrun sends it SIGTERM at about the same time."""

    def lose(*args):
        raise LostRankError("another rank failed")

    def record(error):
        os.kill(os.getpid(), signal.SIGTERM)
        recorded.append(error)

    recorded: list[Exception] = []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(worker, "train_here", lose)
    monkeypatch.setattr(torchrun, "record_error", record)
    assert worker.main([str(tmp_path), "--timeout", "1"]) == 1
    assert [type(error) for error in recorded] == [LostRankError]


def test_under_nohup_sighup_is_ignored(monkeypatch, hangups):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(commands, "train", lambda *_: signal.raise_signal(signal.SIGHUP) or 0)
    assert command.run("sft", "quickstart/sft").returncode == 0
    monkeypatch.setattr(torchrun.torchrun, "run", lambda _: None)
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    torchrun.start(2, ["run"])
    assert "SIGHUP" not in os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE")


def test_a_stop_while_torch_loads_is_recorded(monkeypatch, tmp_path, hangups):
    run, requeue = tmp_path / "run", tmp_path / "requeue"
    monkeypatch.setenv("SOREN_ALIGN_STOPPED", str(requeue))
    monkeypatch.setattr(commands, "train_here", lambda *_: signal.raise_signal(signal.SIGTERM) or 0)
    result = command.run("sft", "quickstart/sft", "--set", f"run.output_dir={run}")
    assert result.returncode == 130
    assert json.loads((run / "run.json").read_text())["last_error"] == "stopped by a signal"
    assert requeue.exists()


class Control:
    should_save = should_training_stop = False


@pytest.fixture
def stop(hangups):
    """StopOnSignal in a training of one process."""
    callback = StopOnSignal(Ranks())
    callback.on_train_begin(None, None, None)
    yield callback
    callback.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_training_stops_after_the_step_and_at_once_on_a_second_ctrl_c(stop, number, capfd):
    signal.raise_signal(number)
    control = Control()
    assert ("Ctrl-C again stops at once" in capfd.readouterr().err) is (number == signal.SIGINT)
    stop.on_step_end(None, None, control)
    assert control.should_save
    assert control.should_training_stop
    # Slurm sends SIGTERM twice when it pre-empts a job, a closed terminal SIGHUP.
    with pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else contextlib.nullcontext():
        signal.raise_signal(number)


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_output_after_the_terminal_was_closed_is_dropped(kind):
    reader, writer = os.openpty() if kind == "terminal" else os.pipe()
    with os.fdopen(writer, "w") as stream:
        console = Terminal(file=stream, width=80)
        console.print("before")
        assert os.read(reader, 100).split() == [b"before"]
        os.close(reader)
        for text in ("after", "and later"):
            console.print(text)
