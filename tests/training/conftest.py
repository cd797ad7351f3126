import pytest

from tests.support.tiny_run import TinyRun


@pytest.fixture
def tiny_run(tmp_path):
    def make(task="sft", *overrides, name="run"):
        return TinyRun(tmp_path / name, task, *overrides)

    return make
