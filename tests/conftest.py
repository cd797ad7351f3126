"""Shared by all tests: no network, tiny models on one thread, and the user's own cache let alone."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Answers and datasets are kept for the tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOREN_ALIGN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def environment():
    """Commands set variables for torch's libraries; no test leaves any to the next one."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


LONG = (
    "test_resume",
    "test_zero_runs",
    "test_quickstart",
    "test_leaderboard",
    "test_answering",
    "test_fsdp2",
    "test_ddp",
    "test_precision",
    "test_quickstart_lora",
    "test_lora_on_ranks",
    "test_shipped_recipes",
    "test_planned_memory",
)


def pytest_collection_modifyitems(items):
    """The long files first: two processes take a file each in turn, and none shall wait for the other's last one."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
