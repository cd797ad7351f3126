"""8-bit states on several ranks: blocks are local to a shard, so that ranks round as one process or to a code."""

import pytest
from soren_align.optim.eight_bits import BLOCK, SMALL, new_blocks
from soren_align.sharding.layout import flat_partitions
from tests.support import toy_jobs as jobs


@pytest.mark.parametrize("name", ["soren", "adamw"])
def test_replicas_round_as_one_process(ranks, name):
    """With gradients whose sums are exact, so that no number lies on the other side of a code's bound."""
    alone = jobs.with_exact_gradients(None, None, name)
    for weights in ranks.run(jobs.with_exact_gradients, "DDP", name):
        for key, weight in alone.items():  # AdamW's fused kernel rounds the end of a tensor otherwise
            assert (weights[key] - weight).abs().max() <= 1e-8, key


@pytest.mark.parametrize("name", ["soren", "adamw"])
def test_cut_blocks_are_as_near_to_float32_states_as_those_of_one_process(ranks, name):
    """A block that a shard cuts, or begins, has another scale, never a larger one than the blocks around it, and so
    errors of the same size. The norm of n errors varies by 1 / sqrt(2 n), 1% of 5000: twice as far is another size."""
    exact = jobs.with_exact_gradients(None, None, name, states="float32")
    alone = jobs.with_exact_gradients(None, None, name)
    distances = {key: (weight - exact[key]).norm() for key, weight in alone.items()}
    assert sum(distance > 0 for distance in distances.values()) >= 6, "else 8 bits would change nothing here"
    for way in (1, 2, 3):
        for weights in ranks.run(jobs.with_exact_gradients, way, name):
            for key, weight in exact.items():
                assert (weights[key] - weight).norm() <= 2 * distances[key] + 1e-6, (way, key)


def test_shards_end_within_blocks_here():
    """Else the test above would show nothing."""
    for num_ranks in (2, 3):
        shapes = {n: (p.shape[0], p.shape[1]) for n, p in jobs.Given().layers.named_parameters() if p.ndim == 2}
        weights = flat_partitions(shapes, num_ranks).weights
        assert any(s.offset % BLOCK for weight in weights if weight.numel >= SMALL for s in weight.shards)


def test_a_small_parameter_has_blocks_of_one_number_wherever_it_lies():
    rows, number = new_blocks([(0, 300, 6400), (300, 0, 6400), (300, 100, 2000), (400, 256, 6400)])
    assert rows.tolist() == [[0, 300, 256, 0], [300, 400, 1, 2], [400, 656, 256, 102]]
    assert number == 103
