"""Shared by all tests: no network, tiny models on one thread, and the user's own cache and runs let alone."""

import gc
import os
import sys

import pytest

from tests.support import tiers
from tests.support.rank_pool import RankPool

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


@pytest.fixture(scope="session", autouse=True)
def working_folder(tmp_path_factory):
    """An empty folder, not the clone's: `make demo` and its reader leave runs there, which recipes name."""
    folder = tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(autouse=True)
def environment(working_folder):
    """Commands set variables for torch's libraries; no test leaves any to the next one, nor files in its folder."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    assert not os.listdir(working_folder)


@pytest.fixture(scope="session")
def rank_pools(tmp_path_factory):
    """rank_pools(n) -> the RankPool of n ranks, started when it is first used."""
    folder, pools = tmp_path_factory.mktemp("ranks"), {}

    def pool(num_ranks):
        if num_ranks not in pools:
            pools[num_ranks] = RankPool(num_ranks, folder)
        return pools[num_ranks]

    yield pool
    for started in pools.values():
        started.stop()


@pytest.fixture(params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request, rank_pools):
    """The RankPool of two ranks, then that of three."""
    return rank_pools(request.param)


LONG = (*("test_zero_runs", "test_resume", "test_demo", "test_leaderboard", "test_answering", "test_parity"),
        *("test_precision", "test_ddp", "test_fsdp2", "test_lora_on_ranks", "test_planning", "test_shipped_recipes"),
        *("test_planned_memory", "test_lora", "test_fuzz", "test_training", "test_memory", "test_doctor", "test_soak"),
        *("test_second_moments", "test_wheel", "test_own_data", "test_architectures"))  # fmt: skip
"""The longest files, which come first: two processes take one file at a time, and none waits long at the end."""


def pytest_configure(config):
    for name, meaning in (tiers.TIERS | {"sample": tiers.SAMPLE, "slow": tiers.SLOW, "rest": tiers.REST}).items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    tiers.assign_tiers(items)
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


class Libraries:
    """Leaves the objects of imported modules out of garbage collections.

    Each Trainer asks for a full collection, which with them takes 0.35 of the 0.85 s of a tiny training.
    """

    num_modules = 0

    def freeze(self):
        """Free garbage, and leave out what is alive, if 100 modules were imported since the last time."""
        if len(sys.modules) >= self.num_modules + 100:
            gc.collect()
            gc.freeze()
            self.num_modules = len(sys.modules)


LIBRARIES, GUARD = Libraries(), tiers.ProcessGuard()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()  # 10,000 tests, all of which stay: 7 of 31 s
    try:
        return (yield)
    finally:
        gc.enable()
        LIBRARIES.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    (tier,) = (mark.name for mark in item.iter_markers() if mark.name in tiers.TIERS)
    with GUARD.during(tier):
        done = yield
    LIBRARIES.freeze()
    return done
