import sys
from pathlib import Path

import pytest

# So that the ranks, too, find jobs.py, and side_by_side.py.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "docs"))

from ranks import Ranks


@pytest.fixture(scope="session", params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request, tmp_path_factory):
    started = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()
