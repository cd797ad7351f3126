"""Second moments on several ranks: each number lies on one rank, and N ranks take the steps of one."""

import functools

import pytest
import torch
from soren_align.optim import Muon
from soren_align.optim.layout import WeightLayout
from soren_align.planning.memory import ModelSizes, Rank
from soren_align.planning.step import step_cost
from soren_align.recipe import OPTIMIZER_SECTIONS, Parallel
from tests.support import toy_jobs as jobs
from tests.support.parity_configurations import TOLERANCE, farthest
from torch import nn

STEPS, MEASURED = 6, {"adjust_lr_fn": "match_rms_measured"}
KINDS = {"rows": {"second_moment": "rows"}, "elements": {"second_moment": "elements"},
         "AdaMuon": {"second_moment": "elements", "map_input": "sign"},
         "bfloat16 momentum": {"momentum_dtype": "bfloat16"}}  # fmt: skip
WAYS = {"DDP": "DDP", "FSDP2": "FSDP2", "ZeRO 1": 1, "ZeRO 2": 2, "ZeRO 3": 3}


@functools.cache
def alone(kind):
    return jobs.with_exact_gradients(None, None, "muon", STEPS, MEASURED | KINDS[kind])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks_take_the_steps_of_one(rank_pools, way, kind):
    """With gradients whose sums over ranks are exact: an element near zero is divided by its own size, and so would be
    the rounding of its gradient (in float64, test_parity has gradients of any kind)."""
    settings = MEASURED | KINDS[kind]
    for weights in rank_pools(3).run(jobs.with_exact_gradients, WAYS[way], "muon", STEPS, settings):
        assert farthest(weights, alone(kind)) <= TOLERANCE


@pytest.mark.parametrize("kind", ["rows", "elements"])
def test_every_replica_has_all_second_moments(ranks, kind):
    """Only the owner rank of a matrix computes them; any rank may save a checkpoint."""
    expected = jobs.second_moments_of_replicas(None, KINDS[kind])
    assert expected.numel() == {"rows": 6 + 9 + 5, "elements": 54 + 54 + 35}[kind]
    for moments in ranks.run(jobs.second_moments_of_replicas, KINDS[kind]):
        torch.testing.assert_close(moments, expected)


def test_the_kinds_differ():
    """Else the comparison would show nothing."""
    kinds = [alone(kind) for kind in KINDS]
    for number, weights in enumerate(kinds):
        assert all(farthest(weights, other) > 1e-3 for other in kinds[:number])


SHAPES = {"a": (8, 12), "b": (16, 4), "experts": (3, 4, 6)}
LAYOUTS = {"experts": WeightLayout(transposed=True)}


def cost(kind, num_ranks, **more):
    mode = Parallel(kind, config={"zero_optimization": {"stage": 3}} if kind == "zero" else {})
    section = OPTIMIZER_SECTIONS["muon"].model_validate({"name": "muon", "lr": 0.1, **more})
    return step_cost(Rank(ModelSizes(SHAPES, 0, weight_layouts=LAYOUTS), mode, num_ranks, section))


@pytest.mark.parametrize(("kind", "num_ranks", "share"), [("ddp", 4, 1), ("zero", 2, 2)])
def test_the_plan_counts_the_bytes_of_the_states(kind, num_ranks, share):
    states = {}
    for second_moment in ("none", "rows", "elements"):
        memory = cost(kind, num_ranks, second_moment=second_moment).memory
        states[second_moment] = sum(part.num_bytes for part in memory if part.name == "optimizer states")
    num_rows, numel = 8 + 16 + 3 * 6, 96 + 64 + 72
    assert states == {"none": 4 * numel / share, "rows": 4 * (numel + num_rows) / share, "elements": 8 * numel / share}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    for second_moment, expected in states.items():
        groups = [{"params": [*parameters.items()], "weight_layouts": LAYOUTS}]
        optimizer = Muon(groups, lr=0.1, second_moment=second_moment)
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        tensors = [tensor for state in optimizer.state.values() for key, tensor in state.items() if key != "step"]
        assert sum(tensor.nbytes for tensor in tensors) == expected * share


def test_replicas_send_second_moments_of_elements_beside_the_weights():
    plain, elements = (cost("ddp", 2, second_moment=kind).bytes_sent_max for kind in ("none", "elements"))
    assert elements == 2 * plain > 0


def test_fsdp2_refuses_moments_of_rows_that_its_shards_do_not_divide(ranks):
    for message in ranks.run(jobs.transposed_under_fsdp2, (6, 9)):
        assert "exp_avg_sq_rows of w, which is stored as [inputs, outputs], is not supported under FSDP2" in message
    expected = jobs.transposed_step((6, 18))
    for weight in ranks.run(jobs.transposed_under_fsdp2, (6, 18)):
        assert (weight - expected).abs().max() <= TOLERANCE
