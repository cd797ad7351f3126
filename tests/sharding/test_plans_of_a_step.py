"""A step is planned before it begins: all of it happens or nothing, on every rank."""

import pytest
from tests.support import step_plan_jobs as planned


@pytest.mark.parametrize(("fault", "there", "elsewhere"), [
    ("two dtypes", "use one dtype per group", "use one dtype per group"),
    ("two dtypes on one rank", "use one dtype per group", "the optimizer step failed on another rank"),
    ("another model", "the matrices or their shards differ", "the matrices or their shards differ"),
])  # fmt: skip
def test_a_step_that_cannot_be_planned_changes_nothing_not_even_momentum(ranks, fault, there, elsewhere):
    for rank, (message, unchanged) in enumerate(ranks.run(planned.unplannable_step, fault)):
        assert (there if rank == 1 else elsewhere) in message
        assert unchanged


@pytest.mark.parametrize("with_gradient", [True, False])
def test_replicated_shards_are_refused_with_advice(ranks, with_gradient):
    for message in ranks.run(planned.replicated_shards, with_gradient):
        assert "use fully_shard over one axis" in message


@pytest.mark.parametrize("num_plans", [1, 3, 256])
def test_plans_that_are_left_out_are_made_again(ranks, num_plans):
    for difference, most in ranks.run(planned.many_subsets, num_plans):
        assert difference == 0
        assert most <= num_plans
