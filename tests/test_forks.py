"""A command that is a fork (tests/support/forks.py) ends as one that is an interpreter."""

import signal

import pytest

from tests.support import command

pytestmark = pytest.mark.process


@pytest.mark.parametrize("arguments", [["recipes"], ["sft", "none.yaml"]], ids=" ".join)
def test_a_fork_has_the_folder_the_outputs_and_the_exit_code_of_an_interpreter(tmp_path, arguments):
    fork, interpreter = (command.run_process(*arguments, cwd=tmp_path, is_fork=is_fork) for is_fork in (True, False))
    assert fork == interpreter
    assert fork.stdout + fork.stderr


def test_a_fork_takes_signals(tmp_path):
    process = command.start("sft", "quickstart/sft", "--no-eval", f"--set=run.output_dir={tmp_path}/run")
    assert process.poll() is None
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.stderr.close()
