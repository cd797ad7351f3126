"""Runs with second moments resume bit for bit under every mode, and on another number of ranks under ZeRO."""

import pytest
from soren_align.run.folder import RunFolder
from tests.support import command
from tests.support.tiny_run import TinyRun
from tests.support.trainer_jobs import FOR_TWO_OR_THREE, MOMENTS
from tests.support.trainer_parity import furthest, ranks_do, weights

JOB = "moments"
MODES = ("ddp", "fsdp2", "zero2", "zero3")


def assert_resumed(folder, name, kind):
    whole, killed = (RunFolder(folder / f"{state}-{name}") for state in ("whole", "killed"))
    assert killed.read()["resumed_from_steps"] == [2]
    assert furthest(weights(whole.path), weights(killed.path)) == 0
    assert killed.read()["optimizer"]["groups"][0]["second_moment"] == kind


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MOMENTS)
def test_two_ranks_resume_bit_for_bit(two_ranks, kind, mode):
    assert_resumed(two_ranks[0], f"{kind}-{mode}", kind)


def test_two_ranks_resume_blocks_of_weights_bit_for_bit(rank_pools, tmp_path):
    ranks_do(rank_pools(2), "blocks", tmp_path)
    assert_resumed(tmp_path, "blocks-fsdp2", "rows")


@pytest.fixture(scope="module")
def three_ranks(rank_pools, two_ranks):
    """The same folder after three ranks have gone on with its runs under ZeRO."""
    folder, _ = two_ranks
    for mode in ("zero2", "zero3"):
        for kind in MOMENTS:
            done = command.run_process("reshard", folder / f"freed-{kind}-{mode}")
            assert done.returncode == 0, done.stderr
    ranks_do(rank_pools(3), "freed_moments", folder)
    return folder


# Elements near zero are divided by their own size, and so is the rounding of their gradients, summed in another order.
@pytest.mark.parametrize(("kind", "tolerance"), [("rows", 2e-6), ("elements", 2e-5)])
def test_three_ranks_go_on_where_two_have_left(three_ranks, tmp_path, kind, tolerance):
    alone = TinyRun(tmp_path / "alone", "sft", *FOR_TWO_OR_THREE, *MOMENTS[kind][:1])
    alone.train()
    for mode in ("zero2", "zero3"):
        run = RunFolder(three_ranks / f"freed-{kind}-{mode}")
        assert (run.read()["processes"], run.read()["resumed_from_steps"]) == (3, [2])
        assert furthest(weights(alone.folder.path), weights(run.path)) <= tolerance
