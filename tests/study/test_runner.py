"""A study runs to its end, whatever is killed, and as many runs at a time as one likes give the same bits."""

import errno
import hashlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console
from soren_align.core.errors import DivergedError, ResumableError, UserError
from soren_align.core.text import Terminal
from soren_align.launch import commands
from soren_align.run.folder import RunFolder
from soren_align.study import runner
from soren_align.study.config import first_run, recipe_of_run
from soren_align.study.run_processes import LOCKED, RESUMABLE, SERVER_LOST, start_run, start_server, train_run
from soren_align.study.runs import read_run
from soren_align.training import checkpoints
from tests.launch.test_endings import OF_THE_MACHINE
from tests.support import command
from tests.support.run_folders import lock_of_another_process
from tests.support.study_runs import TINY, end, end_all, progress_of, study_of

SOME_FAILURES = ("full disk", "memory", "lost rank", "offline")  # test_endings has tests of all
NO_DECAY = "set: {optimizer.weight_decay: 0.0, optimizer.aux_weight_decay: 0.0}"
SEARCHED = f"soren: {{{NO_DECAY}, space: {{optimizer.lr: [0.005, 100.0]}}}}"
SHORT = TINY.replace("soren: {}", SEARCHED).replace("trials: 3", "trials: 2")


class _Ended:
    """A process that has ended."""

    def __init__(self, exitcode):
        self.exitcode = exitcode
        self.sentinel, other = os.pipe()
        os.close(other)

    def join(self):
        os.close(self.sentinel)


def train_here(context, recipe, log, processes, gpus):
    """In the place of `start_run`: train in this process."""
    return _Ended(train_run(recipe, processes))


def plain(study):
    """study.json without times, memory, and the loss that is averaged since a resume (`read_curve`)."""
    if isinstance(study, dict):
        return {k: plain(v) for k, v in study.items() if k not in NAMES}
    return [plain(each) for each in study] if isinstance(study, list) else study


@pytest.fixture
def study(tmp_path):
    """The study of TINY, without runs."""
    return study_of(tmp_path)


@pytest.fixture
def ended(study):
    """The same study, whose runs have ended; none is started again."""
    end_all(study, lambda run: 2.0 + run.number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "start_run", None)
        yield study


@pytest.fixture
def machine(study, monkeypatch):
    """machine(faults) -> the Machine on which the study runs."""

    def make(faults):
        made = Machine(study, faults)
        monkeypatch.setattr(runner, "start_run", made)
        return made

    return make


NAMES = ("name", "command", "output_dir", "seconds", "peak_memory_bytes", "load", "train_loss")


def result_of(folder):
    return plain(json.loads((folder / "study.json").read_text()))


def weights_of(folder):
    files = sorted(folder.rglob("model/model.safetensors"))
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def short(folder):
    """The arguments of the command that runs SHORT's study in folder/study."""
    (folder / "short.yaml").write_text(SHORT)
    return ["compare", folder / "short.yaml", "--set", f"output_dir={folder / 'study'}"]


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    """The folder of SHORT's study, whose runs were trained in this process, and what was printed."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "start_run", train_here)
        result = command.run(*short(folder))
    assert result.returncode == 0, result.stderr
    return folder / "study", result


def assert_same_study(one, other):
    assert result_of(one) == result_of(other)
    assert weights_of(one) == weights_of(other)


@pytest.mark.slow
@pytest.mark.model
def test_a_trial_with_learning_rate_100_is_reported_as_diverged_and_ends_no_study(one_by_one):
    folder, printed = one_by_one
    soren = result_of(folder)["candidates"][1]
    assert [run["status"] for run in soren["trials"]] == ["finished", "diverged"] or soren["selected"] == 1
    diverged = next(run for run in soren["trials"] if run["status"] == "diverged")
    assert diverged["parameters"]["optimizer.lr"] == 100.0
    assert "diverged" in printed.stderr
    assert [run["status"] for run in soren["verdict"]] == ["finished"] * 3
    assert max(len(line) for line in printed.stderr.splitlines() if str(folder) not in line) <= 80


@pytest.mark.slow
@pytest.mark.model
def test_a_study_that_has_ended_is_only_read(one_by_one, monkeypatch):
    folder, _ = one_by_one
    monkeypatch.setattr(runner, "start_run", None)
    before = result_of(folder)
    for option in ([], ["--report"]):
        result = command.run(*short(folder.parent), *option)
        assert result.returncode == 0
        assert "\nsoren " in result.stdout
        assert "On held-out loss" in result.stdout
        assert result_of(folder) == before


@pytest.mark.slow
@pytest.mark.model
def test_a_study_on_a_full_disk_stops_and_resumes_to_the_bits_of_an_undisturbed_one(one_by_one, tmp_path, monkeypatch):
    """At three moments of the search and of the final runs."""
    folder, arguments = tmp_path / "study", short(tmp_path)
    monkeypatch.setattr(runner, "start_run", train_here)
    seal = checkpoints.seal

    def failing_after(number):
        room = iter([True] * number)

        def seal_or_fail(checkpoint, *arguments):
            if not next(room, False):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(checkpoint))
            seal(checkpoint, *arguments)

        return seal_or_fail

    for number in (1, 4, 2):  # checkpoints that the disk has room for
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "seal", failing_after(number))
            result = command.run(*arguments)
        assert result.returncode == 2, result.stderr
        assert "the study stopped, and no result is lost" in result.stderr
        assert "bytes free" in result.stderr
        assert not (folder / "study.json").exists()
        statuses = [RunFolder(file.parent).read() for file in folder.glob("*/*/*/run.json")]
        assert sum(bool(record.get("resumable")) and record["status"] != "finished" for record in statuses) == 1
    assert command.run(*arguments).returncode == 0
    assert_same_study(folder, one_by_one[0])


@pytest.mark.process
def test_a_study_killed_three_times_with_two_jobs_has_the_bits_of_one_job(one_by_one, tmp_path):
    """The second kill is of the runs too, as when a machine fails."""
    folder, arguments = tmp_path / "study", [*short(tmp_path), "--jobs", "2"]
    for kill in range(3):
        with (tmp_path / "errors").open("a") as errors:
            process = command.start(*arguments, stderr=errors, start_new_session=True)
        command.wait_for(lambda num=kill: _num_checkpoints(folder) > 3 * num, process)
        if kill == 1:
            os.killpg(process.pid, signal.SIGKILL)
        process.send_signal(signal.SIGINT if kill == 2 else signal.SIGKILL)
        assert process.wait(60) == (130 if kill == 2 else -signal.SIGKILL)
    assert command.run_process(*arguments).returncode == 0
    assert_same_study(folder, one_by_one[0])
    assert len(weights_of(folder)) >= 9


@pytest.mark.process
def test_two_commands_at_once_of_which_one_is_killed_have_the_bits_of_one(one_by_one, tmp_path):
    """Each command takes runs that the other has not, and continues those of the killed one."""
    folder, errors, arguments = tmp_path / "study", tmp_path / "errors", [*short(tmp_path), "--jobs", "1"]
    with errors.open("a") as stream:
        killed, other = (command.start(*arguments, stdout=stream, stderr=stream) for _ in range(2))
        command.wait_for(lambda: _num_checkpoints(folder) > 2, killed)
        killed.kill()
        assert killed.wait(60) == -signal.SIGKILL, errors.read_text()
        assert other.wait(240) == 0, errors.read_text()
    assert_same_study(folder, one_by_one[0])


def _num_checkpoints(folder):
    """Complete ones of all runs; rglob would fail where a run renames a folder meanwhile."""
    return len(list(folder.glob("*/*/*/checkpoints/checkpoint-*/soren_align.json")))


@pytest.mark.process
def test_no_thread_runs_in_the_server_that_runs_are_forked_from():
    """Except that of pyarrow's allocator, jemalloc, which handles forks."""
    code = "import glob, soren_align.launch.preloaded\n"
    code += "print(*(open(file).read() for file in glob.glob('/proc/self/task/*/comm')), sep='')"
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}  # as set_environment without a GPU
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if not name.startswith("jemalloc")] == ["python"]
    assert done.stderr == ""  # of its import, on the terminal of compare


def test_a_run_of_another_command_is_waited_for_and_read(ended, monkeypatch):
    """Two commands share a study by the locks of run folders alone."""
    folder, waits = RunFolder(Path(ended.output_dir) / "verdict/soren/103"), []
    folder.update(status="training", last_error=None)

    def finish(*_, **__):
        waits.append(1)
        if len(waits) == 3:
            folder.update(status="finished")

    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(runner, "wait", finish)
    with lock_of_another_process(folder):
        assert runner.compare(ended, jobs=2) == 0
    assert len(waits) == 3


class Machine:
    """In the place of `start_run`: ends runs at once, with a result or as `faults` say, by folder and attempt.

    A fault is an exit code, or an error that training raises.
    """

    def __init__(self, study, faults):
        self.study, self.faults, self.started = study, {name: [*each] for name, each in faults.items()}, []

    def __call__(self, context, recipe, log, processes, gpus):
        place = Path(recipe.run.output_dir).relative_to(self.study.output_dir).as_posix()
        self.started.append(place)
        (run,) = [run for run in progress_of(self.study).update() if run.folder == place]
        fault = self.faults.get(place, [])[:1]
        if not fault:
            end(self.study, run, 2.0 + run.number)
            return _Ended(0)
        self.faults[place].pop(0)
        if isinstance(fault[0], int):
            return _Ended(fault[0])
        end(self.study, run, 2.0, error="in training")
        folder = RunFolder(log.with_name(run.folder.rpartition("/")[2]))
        folder.update(last_error=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(commands, "train", Mock(side_effect=fault[0]))
            code = train_run(recipe)
        folder.release()
        return _Ended(code)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("place", "name"), [*(("search/adamw/01", name) for name in SOME_FAILURES), ("verdict/soren/102", "full disk")]
)
def test_a_machine_that_fails_stops_the_study_and_ends_no_run(study, machine, name, place):
    host = machine({place: [OF_THE_MACHINE[name]]})
    with pytest.raises(ResumableError, match=rf"no result is lost \(\d+ of \d+ runs have ended\): {place}: .+"):
        runner.compare(study)
    folder = Path(study.output_dir)
    record = RunFolder(folder / place).read()
    assert record["resumable"] is True
    assert host.started[-1] == place  # no other run was started
    assert not (folder / "study.json").exists()
    if place.startswith("search/adamw"):
        assert not (folder / "verdict/adamw").exists()
    runner.report(study)  # concludes nothing of a run that has not ended
    assert {run["status"] for run in runs_of(folder) if run["folder"] == place} == {"running"}
    assert runner.compare(study) == 0
    assert host.started.count(place) == 2
    assert len(host.started) == len(set(host.started)) + 1  # none but this one is repeated
    assert {run["status"] for run in runs_of(folder)} == {"finished"}
    assert not (folder / "earlier").exists()


def runs_of(folder):
    candidates = json.loads((folder / "study.json").read_text())["candidates"]
    return [run for each in candidates for run in (*each["trials"], *each["verdict"])]


def test_a_run_that_cannot_even_write_its_log_stops_the_study(study, machine):
    machine({"search/adamw/00": [RESUMABLE]})
    message = r"search/adamw/00: the log of this run cannot be written, with [\d,]+ bytes free"
    with pytest.raises(ResumableError, match=message):
        runner.compare(study)


@pytest.mark.rest
@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV, 130, SERVER_LOST])
def test_a_killed_run_is_repeated_once_before_any_final_run(study, machine, capsys, code):
    """Then the study stops: the final runs of a selection without it would be trained for nothing."""
    host = machine({"search/adamw/02": [code], "search/soren/02": [code, code, code]})
    with pytest.raises(ResumableError, match=r"search/soren/02: .*, for the second time; .*\(--jobs\)"):
        runner.compare(study)
    assert "search/adamw/02: " in capsys.readouterr().err
    assert host.started.count("search/adamw/02") == host.started.count("search/soren/02") == 2
    assert not any(place.startswith("verdict/soren") for place in host.started)
    assert runner.compare(study) == 0  # killed once more
    assert host.started.count("search/soren/02") == 4
    assert len(host.started) == len(set(host.started)) + 4
    assert not (Path(study.output_dir) / "earlier").exists()


def test_a_terminal_shows_the_ended_runs_of_all_the_time_left_and_the_best_so_far(study):
    progress = progress_of(study)
    for run, loss in zip(progress.update(), (3.0, 2.5, 2.0, 2.75), strict=False):
        end(study, run, loss)
    runs = progress.update()
    console = Console(file=io.StringIO(), width=80, legacy_windows=False)
    console.print(runner._Runner(progress, console, None, 1)._state(runs, 90.0))
    head, bar, names, adamw, soren, running = console.file.getvalue().splitlines()
    assert head == "search 4/6 · final runs 0/6 · about 12 min left"
    assert len(bar) == 80
    assert names.split() == ["best", "so", "far", "lr", "eval_loss"]
    lr = [f"{run.parameters['optimizer.lr']:.3g}" for run in runs]
    assert adamw.split() == ["adamw", lr[2], "2"]
    assert soren.split() == ["soren", lr[1], "2.5"]
    assert running == "running: runs of other commands"


def test_the_last_lines_of_a_study_have_its_report_as_a_link(ended, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(runner, "Terminal", lambda: Terminal(file=out, force_terminal=True, width=80))
    runner.report(ended)
    page = Path(ended.output_dir) / "report.html"
    assert page.is_file()
    last = out.getvalue().splitlines()[-1]
    assert f";{page.as_uri()}\x1b\\" in last
    assert re.sub(r"\x1b(\]8;.*?\x1b\\|\[[\d;]*m)", "", last) == f"report    {page}"


def test_running_runs_end_before_the_study_stops(study, machine):
    host = machine({"search/adamw/00": [OF_THE_MACHINE["full disk"]]})
    with pytest.raises(ResumableError, match=r"\(1 of 12 runs have ended\): search/adamw/00: "):
        runner.compare(study, jobs=2)
    assert host.started == ["search/adamw/00", "search/soren/00"]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("error", "status"),
    [(DivergedError("step 4: NaN"), "diverged"), (UserError("data.train: none can be trained on"), "failed")],
    ids=["diverged", "refused"],
)
def test_divergence_and_a_refused_recipe_end_a_run(study, machine, error, status):
    host = machine({"search/soren/01": [error]})
    for _ in range(2):
        assert runner.compare(study) == 0
    assert host.started.count("search/soren/01") == 1
    (run,) = [run for run in runs_of(Path(study.output_dir)) if run["folder"] == "search/soren/01"]
    assert (run["status"], run["reason"]) == (status, str(error))


@pytest.mark.rest
def test_a_run_that_a_defect_ended_is_tried_again_after_an_update_only(study, machine):
    """Within one version it is a failed trial, so that the study ends; its traceback is in its log."""
    host = machine({"search/soren/01": [IndexError("list index out of range")] * 2})
    for _ in range(2):
        assert runner.compare(study) == 0
    assert host.started.count("search/soren/01") == 1
    folder = RunFolder(Path(study.output_dir) / "search/soren/01")
    assert folder.read()["last_error"] == "IndexError: list index out of range"
    (run,) = [run for run in runs_of(Path(study.output_dir)) if run["folder"] == "search/soren/01"]
    assert run["status"] == "failed"
    folder.update(defect="soren-align 0.0.9")
    for count in (2, 2):
        assert runner.compare(study) == 0
        assert host.started.count("search/soren/01") == count
    folder.update(defect="soren-align 0.0.9")
    assert runner.compare(study) == 0  # without the defect
    assert {run["status"] for run in runs_of(Path(study.output_dir))} == {"finished"}


@pytest.mark.rest
def test_models_of_the_search_are_removed_and_its_runs_are_not_repeated(ended, tmp_path):
    """search.keep_models may be set after the study has ended."""
    folder = Path(ended.output_dir)
    for each in folder.glob("*/*/*"):
        for name in ("model", "checkpoints", "start"):
            (each / name).mkdir()
            (each / name / "model.safetensors").write_bytes(b"0")
    RunFolder(folder / "search/soren/02").update(status="training", last_error="no space left on the disk")
    assert runner.compare(ended) == 0
    before = plain_study(folder)
    assert len(list(folder.rglob("model.safetensors"))) == 12 * 3
    with lock_of_another_process(RunFolder(folder / "search/adamw/00")):
        assert runner.compare(study_of(tmp_path, "search.keep_models=false")) == 0
    assert {file.parts[-5:-2] for file in folder.glob("search/*/*/*/*")} == {
        ("search", "adamw", "00"),  # of a process that has not ended yet
        ("search", "soren", "02"),  # a failed run
    }
    assert len(list(folder.glob("verdict/*/*/*/model.safetensors"))) == 6 * 3
    assert plain_study(folder) == before


def plain_study(folder):
    result = result_of(folder)
    del result["file"]["search"]["keep_models"]
    return result


def test_another_number_of_processes_is_refused_before_a_run_starts(ended):
    RunFolder(Path(ended.output_dir) / "search/soren/02").update(status="training", processes=2)
    with pytest.raises(UserError, match="the study's runs have 2 processes each, not 1; rerun with --processes 2"):
        runner.compare(ended)


@pytest.mark.process
def test_a_run_of_two_processes_records_them_and_is_not_repeated(tmp_path):
    study = study_of(tmp_path, "set.trainer.max_steps=3", "set.trainer.save_steps=3")
    run = first_run(study, "soren")
    folder, recipe = RunFolder(tmp_path / "study" / run.folder), recipe_of_run(study, run)
    context = start_server(on_gpus=False)
    for expected in (0, LOCKED):  # of the second command: the run has ended in the meantime
        process = start_run(context, recipe, tmp_path / "log", 2, [])
        process.join(240)
        assert process.exitcode == expected, (tmp_path / "log").read_text()
    record = folder.record()
    assert (record["status"], record["processes"], record.get("last_error")) == ("finished", 2, None)
    assert (record["identity"]["processes"], record["identity"]["global_batch_size"]) == (2, 16)
    assert "16 examples per step: 2 processes x 8 examples" in (tmp_path / "log").read_text()
    assert read_run(run, folder, "eval_loss").status == "finished"


def test_a_folder_of_something_else_is_refused(study):
    Path(study.output_dir).mkdir()
    (Path(study.output_dir) / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is neither empty nor a study's folder"):
        runner.compare(study)


def test_a_report_of_a_study_that_was_not_started_is_refused(study):
    with pytest.raises(UserError, match="no study's folder"):
        runner.report(study)


def test_a_study_killed_before_its_first_run_continues(study):
    progress_of(study)
    assert [run.status for run in progress_of(study).update()] == ["waiting"] * 6


@pytest.mark.parametrize(("yes", "answer", "trials"), [(True, None, 5), (False, True, 5), (False, False, 3)])
def test_the_search_is_extended_at_an_edge_before_any_final_run(study, monkeypatch, yes, answer, trials):
    started, ask = [], Mock(return_value=answer)

    def train(context, recipe, log, processes, gpus):
        started.append(Path(recipe.run.output_dir).relative_to(study.output_dir).as_posix())
        (run,) = [run for run in progress_of(study).update() if run.folder == started[-1]]
        end(study, run, 2.0 + abs(math.log(run.parameters["optimizer.lr"] / (0.3 if "soren" in run.folder else 0.01))))
        return _Ended(0)

    monkeypatch.setattr(runner, "start_run", train)
    monkeypatch.setattr(runner, "Confirm", SimpleNamespace(ask=ask))
    monkeypatch.setattr(runner, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    terminal = Terminal(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(runner, "stderr_console", lambda: terminal)
    assert runner.compare(study, yes=yes) == 0
    assert ask.call_count == (0 if yes else 1)
    assert [place.split("/")[0] for place in started] == ["search"] * 2 * trials + ["verdict"] * 6
    assert runner.compare(study) == 0  # nobody is asked again after the final runs
    assert ask.call_count == (0 if yes else 1)
