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
