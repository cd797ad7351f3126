"""Runs with second moments, and decay to the start, resume bit for bit in every mode; three ranks: test_zero_runs.py."""

import pytest
from soren_align.run.folder import RunFolder
from tests.support.trainer_jobs import MOMENTS_OF
from tests.support.trainer_parity import furthest, weights

JOB = "moments"
CASES = [("blocks", "fsdp2", "rows"), *(("moments", mode, kind) for mode, kind in MOMENTS_OF.items())]


@pytest.mark.parametrize(("name", "mode", "kind"), CASES)
def test_two_ranks_resume_bit_for_bit(two_ranks, name, mode, kind):
    whole, killed = (RunFolder(two_ranks[0] / f"{state}-{name}-{mode}") for state in ("whole", "killed"))
    assert killed.read()["resumed_from_steps"] == [2]
    assert furthest(weights(whole.path), weights(killed.path)) == 0
    groups = killed.read()["optimizer"]["groups"]
    assert groups[0]["second_moment"] == kind
    # Decay that took the resume for the start would move other weights: lr times decay is not small.
    assert {group["weight_decay_to"] for group in groups} == {"zero" if name == "blocks" else "start"}
