"""Shared by all tests: no network, tiny models on one thread, and the user's own cache let alone."""

import os

import pytest

from tests.support import tiers
from tests.support.rank_pool import Ranks

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


@pytest.fixture(scope="session", params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request, tmp_path_factory):
    started = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()
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
    "test_demo",
    "test_leaderboard",
    "test_answering",
    "test_fsdp2",
    "test_ddp",
    "test_precision",
    "test_lora_on_ranks",
    "test_shipped_recipes",
    "test_planned_memory",
)
"""The longest files, which come first: with a file at a time for each of two processes, none waits long at the end."""


def pytest_configure(config):
    for name, meaning in (tiers.TIERS | {"sample": tiers.SAMPLE}).items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    tiers.assign_tiers(items)
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


GUARD = tiers.ProcessGuard()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    (tier,) = (mark.name for mark in item.iter_markers() if mark.name in tiers.TIERS)
    with GUARD.during(tier):
        return (yield)
