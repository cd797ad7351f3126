"""Two ranks of a host take the steps of one, and what a host shards in a way that is not supported is refused."""

import pytest
from tests.support import host_jobs
from tests.support.parity_configurations import TOLERANCE, farthest, reference
from tests.support.toy import NUM_STEPS, Run

NUM_MATRICES = 14


@pytest.mark.parametrize("sets_strategy", [True, False])
def test_two_ranks_of_accelerate_take_the_steps_of_one(rank_pools, sets_strategy):
    run = Run()
    expected, norms, num_maps = reference(run)
    assert min(norms) > 1.2 * run.clip, "the clip must bind in every step"
    assert num_maps == NUM_STEPS * NUM_MATRICES
    results = rank_pools(2).run(host_jobs.accelerate, run, sets_strategy)
    if sets_strategy:  # each matrix is mapped on one rank
        assert max(farthest(result.weights, expected) for result in results) <= TOLERANCE
        assert sum(result.num_maps for result in results) == num_maps
    else:
        assert max(farthest(weights, expected) for weights, _ in results) <= TOLERANCE
        assert [maps for _, maps in results] == [num_maps, num_maps]


def test_fsdp1_is_refused_by_its_name_on_every_rank(rank_pools):
    for errors in rank_pools(2).run(host_jobs.refusal_of_fsdp1):
        assert len(errors) == 2
        assert all("FSDP1" in error and "use FSDP2" in error for error in errors)
