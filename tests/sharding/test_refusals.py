"""What one rank finds, all ranks raise: none is left waiting in a collective, and nothing has changed."""

import os

import pytest
import torch
from soren_align.core.errors import UserError
from soren_align.sharding.ranks import choose_gpu
from tests.support import toy_jobs as jobs


@pytest.mark.parametrize(("fault", "kind", "there", "elsewhere"), [
    ("nan", "FloatingPointError", "NaN or infinity in the gradient of b", "another rank has an invalid gradient"),
    ("no gradient", "ValueError", *["b: only some ranks have a gradient"] * 2),
    ("another model", "ValueError", *["the matrices or their shards differ between the ranks"] * 2),
])  # fmt: skip
def test_what_one_rank_cannot_use_stops_all_before_anything_changes(ranks, fault, kind, there, elsewhere):
    for rank, answer in enumerate(ranks.run(jobs.refused_step, fault)):
        assert (answer[0], answer[2]) == (kind, True)
        assert (there if rank == 1 else elsewhere) in answer[1]


def test_a_matrix_without_a_gradient_on_any_rank_is_left_alone(ranks):
    for still, moving in ranks.run(jobs.unused_parameter):
        assert torch.equal(still, torch.ones(4, 6))
        assert not torch.equal(moving, torch.ones(4, 6))


def test_an_observer_sees_the_pieces_that_this_rank_updates(ranks):
    answers = ranks.run(jobs.observed_step)
    blocks = torch.arange(4).chunk(ranks.num_ranks)
    for rank, seen in enumerate(answers):
        expected = [("0.weight", (len(blocks[rank]), 6), True)] if rank < len(blocks) else []
        expected += [("1.weight", (1, 4), True)] if rank == 0 else []
        assert sorted(seen) == expected


def test_shards_whose_place_is_unknown_are_refused(ranks):
    for message in ranks.run(jobs.sharded_without_placement):
        assert "set the optimizer's sharding strategy" in message


@pytest.mark.parametrize(("environment", "num_gpus", "gpu"), [
    ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 4, 3),
    ({"LOCAL_RANK": "3"}, 4, 3),  # srun does not set the other
    ({"LOCAL_RANK": "3"}, 1, 0),  # srun --gpus-per-task=1
    ({}, 1, 0),
    ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, None),
    ({"LOCAL_RANK": "3"}, 2, None),
])  # fmt: skip
def test_a_rank_chooses_its_own_gpu_among_the_visible_ones(monkeypatch, environment, num_gpus, gpu):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, environment.get(name, ""))  # so that what the function sets is undone
        if name not in environment:
            monkeypatch.delenv(name)
    if gpu is None:
        with pytest.raises(UserError, match=rf"this machine has \d processes, but only {num_gpus} visible GPUs"):
            choose_gpu(num_gpus)
        return
    assert choose_gpu(num_gpus) == gpu
    assert os.environ.get("LOCAL_RANK", "0") == str(gpu), "accelerate and DeepSpeed choose by it"
