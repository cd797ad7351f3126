"""A command that ends early prints one message, once for all ranks, and returns the exit code for it."""

import json
import signal
from types import SimpleNamespace

import pytest

from soren_align.errors import UserError
from soren_align.launch import exit_codes, torchrun

LOST = RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Read error [::1]:2: Connection reset by peer. More")
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
    [
        (UserError("write this"), {}, (2, "write this\n")),
        (UserError("write this"), RANK, (2, "rank 1: write this\n")),
        (OSError(28, "No space left on device", "/x"), {}, (2, "/x")),
        (KeyboardInterrupt(), {}, (130, "stopped; rerun the same command to resume\n")),
        (LOST, RANK, (1, "rank 1: lost another rank (Read error [::1]:2: Connection reset by peer); see its output.")),
        (ValueError("a defect"), RANK, (1, "rank 1: ValueError: a defect\n")),
    ],
    ids=["user", "user on a rank", "disk", "signal", "lost rank", "defect on a rank"],
)
def test_each_error_has_its_exit_code_and_message(reported, error, environment, expected):
    code, text = reported(error, environment)
    assert code == expected[0]
    assert expected[1] in text


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
    assert text == ("" if started_here else "rank 1: write this\n")
    assert "write this" in json.loads(file.read_text())["message"]["message"]


def failure(exitcode, timestamp=0, message="", trace=""):
    return SimpleNamespace(
        exitcode=exitcode, timestamp=timestamp, message={"message": message, "extraInfo": {"py_callstack": trace}}
    )


@pytest.mark.parametrize(
    ("failures", "code", "message"),
    [
        # the ranks that torchrun ended by SIGTERM, or that lost a neighbour earlier, are not the cause
        (
            {0: failure(1, 1), 1: failure(-signal.SIGKILL, 2)},
            1,
            "rank 1 was killed by SIGKILL (out of memory, perhaps)",
        ),
        (
            {0: failure(-signal.SIGTERM, 1), 1: failure(-signal.SIGSEGV, 2)},
            1,
            "rank 1 was killed by SIGSEGV; the other",
        ),
        ({0: failure(-64 - 1)}, 1, "rank 0 was killed by signal 65; the other"),
        ({0: failure(1, 1), 1: failure(2, 2, "UserError: write this")}, 2, "write this"),
        ({0: failure(-signal.SIGTERM, 1), 1: failure(130, 2, "stopped")}, 130, "stopped"),
        (
            {0: failure(1, 2), 1: failure(1, 1, trace="Traceback: here\n")},
            1,
            "Traceback: here\nrank 1 failed with exit code 1; the other ranks were stopped",
        ),
        ({0: SimpleNamespace(exitcode=1, timestamp=0, message="no file")}, 1, "rank 0 failed with exit code 1; the"),
    ],
)
def test_the_rank_that_failed_first_is_the_one_reported(monkeypatch, failures, code, message):
    def run(_):
        raise torchrun.ChildFailedError.__new__(torchrun.ChildFailedError)

    monkeypatch.setattr(torchrun.ChildFailedError, "failures", failures, raising=False)
    monkeypatch.setattr(torchrun.torchrun, "run", run)
    found, text = torchrun.start(2, ["run"])
    assert found == code
    assert text.startswith(message)


def test_a_signal_to_the_launcher_advises_to_rerun(monkeypatch):
    def run(_):
        raise torchrun.SignalException("stopped", signal.SIGINT)

    monkeypatch.setattr(torchrun.torchrun, "run", run)
    assert torchrun.start(3, ["run"]) == (130, "3 processes stopped by SIGINT; rerun the same command to resume")
