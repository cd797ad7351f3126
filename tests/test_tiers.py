"""Every test has one tier, and a test of tier unit or model starts no Python process (tests/support/tiers.py)."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from tests.support.rank_pool import RankPool
from tests.support.tiers import TIERS


def test_every_collected_test_has_one_tier(request):
    for item in request.session.items:
        assert sum(mark.name in TIERS for mark in item.iter_markers()) == 1, item.nodeid


def test_a_unit_test_cannot_start_python():
    with pytest.raises(AssertionError, match="a test of tier unit starts python"):
        subprocess.run([sys.executable, "-c", ""])


@pytest.mark.model
def test_a_test_with_a_model_cannot_start_a_process():
    with pytest.raises(AssertionError, match="a test of tier model starts the process"):
        multiprocessing.get_context("spawn").Process(target=print).start()


@pytest.mark.ranks
def test_a_rank_that_dies_or_hangs_fails_its_test_and_no_later_one(tmp_path):
    pool = RankPool(1, tmp_path)
    with pytest.raises(AssertionError, match=r"a rank died in die\(7,\) .*: \[7\]"):
        pool.run(die, 7)
    with pytest.raises(AssertionError, match=r"rank 0 of 1 hangs in sleep\(60,\)"):
        pool.run(sleep, 60, seconds=0.1)
    assert pool.run(answer, 3) == [3]
    pool.stop()


def die(group, code):
    os._exit(code)


def sleep(group, seconds):
    time.sleep(seconds)


def answer(group, number):
    return number
