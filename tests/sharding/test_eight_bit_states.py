"""8-bit states on several ranks: the blocks and their scales are those of one process, wherever a matrix lies."""

import pytest

from soren_align.sharding.geometry import flat_partitions
from soren_align.sharding.strategies import shared_blocks
from tests.support import toy_jobs as jobs


@pytest.mark.parametrize("name", ["soren", "adamw"])
def test_ranks_round_as_one_process(ranks, name):
    """With gradients whose sums are exact, so that no number lies on the other side of a code's bound."""
    alone = jobs.with_exact_gradients(None, None, name)
    for way in ("DDP", 1, 2, 3):
        for weights in ranks.run(jobs.with_exact_gradients, way, name):
            for key, weight in alone.items():  # AdamW's fused kernel rounds the end of a tensor otherwise
                assert (weights[key] - weight).abs().max() <= 1e-8, (way, key)


def test_shards_end_within_blocks_here():
    """Else the test above would show nothing of the blocks that ranks share."""
    shapes = {n: (p.shape[0], p.shape[1]) for n, p in jobs.Given().layers.named_parameters() if p.ndim == 2}
    for num_ranks in (2, 3):
        assert any(shared_blocks(flat_partitions(shapes, num_ranks)))


def test_a_block_that_shards_cut_is_counted_once_and_a_small_matrix_has_none():
    shapes = {"large": (64, 100), "small": (4, 500), "last": (64, 100)}  # 14800 numbers
    layout = flat_partitions(shapes, 5, partition_numel=2960)
    # Shards end at 2960, 5920, 8880 (of last: 480), 11840 (3440): blocks 11, 23, 1, 13.
    assert shared_blocks(layout) == [{11: 0, 23: 1}, {}, {1: 2, 13: 3}]
    assert [len(s) for s in shared_blocks(flat_partitions({"even": (64, 128)}, 2))] == [0]
    assert shared_blocks(flat_partitions({"tiny shards": (64, 65)}, 50, partition_numel=100))[0].keys() == set(
        range(17)
    )
