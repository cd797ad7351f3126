"""Experts that transformers stores together take the steps of experts that are matrices of their own."""

import functools
import io

import pytest
import torch

from tests.support import toy_jobs as jobs
from tests.support.experts import MIXTURES, OTHERS, ExpertsRun, reference
from tests.support.parity_configurations import TOLERANCE, farthest
from tests.support.toy import MINIMAX, NUM_STEPS, one_process

expected = functools.cache(lambda architecture: reference(ExpertsRun(architecture=architecture)))
WAYS = {"DDP": (jobs.ddp,), "FSDP2": (jobs.fsdp2,), **{f"ZeRO {n}": (jobs.deepspeed, n) for n in (1, 2, 3)}}


def same_steps(weights, num_maps, architecture, tolerance):
    wanted, num_matrices = expected(architecture)
    assert farthest(weights, wanted) <= tolerance
    assert num_maps == num_matrices * NUM_STEPS


@pytest.mark.model
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, marks=[] if a in ("gpt_oss", "jetmoe") else [pytest.mark.slow]) for a in (*MIXTURES, *OTHERS)],
)
def test_experts_stored_together_take_the_steps_of_experts_apart(architecture):
    weights, norms, optimizer = one_process(ExpertsRun(architecture=architecture))
    same_steps(weights, optimizer.num_maps, architecture, 1e-6)
    assert min(norms) > 0.5, "the clip must bind in every step"


@pytest.mark.model
@pytest.mark.parametrize(("adjust_lr_fn", "workspace_mb"), [("match_rms_measured", 0), ("match_rms_adamw", 16)])
def test_each_half_has_its_own_scale_in_a_batch_and_alone(adjust_lr_fn, workspace_mb):
    settings = {"map": MINIMAX, "adjust_lr_fn": adjust_lr_fn, "lr": 1e-2}
    run = ExpertsRun(settings, architecture="gpt_oss")
    wanted, _ = reference(run)
    weights, _, _ = one_process(ExpertsRun({**settings, "workspace_mb": workspace_mb}, architecture="gpt_oss"))
    assert farthest(weights, wanted) <= 1e-6


SAMPLE = {("mixtral", "DDP"), ("gpt_oss", "ZeRO 2")}
CASES = [pytest.param(architecture, way, marks=[pytest.mark.sample] if (architecture, way) in SAMPLE else [])
         for architecture in MIXTURES for way in WAYS]  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize(("architecture", "way"), CASES)
def test_experts_on_two_ranks_take_the_steps_of_experts_apart(rank_pools, architecture, way):
    job, *stage = WAYS[way]
    results = rank_pools(2).run(job, *stage, ExpertsRun(architecture=architecture))
    for result in results:
        same_steps(result.weights, sum(r.num_maps for r in results), architecture, TOLERANCE)


def step(run, model, optimizer, number):
    (tokens, _) = run.batches(number)
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.model
def test_a_checkpoint_of_experts_continues_bit_for_bit_and_only_if_they_are_stored_so():
    run = ExpertsRun(architecture="gpt_oss")
    model = run.model()
    optimizer = run.optimizer(model)
    step(run, model, optimizer, 0)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed = run.model()
    resumed.load_state_dict(saved["model"])
    again = run.optimizer(resumed)
    again.load_state_dict(saved["optimizer"])
    for each in ((model, optimizer), (resumed, again)):
        step(run, *each, 1)
    assert farthest(dict(resumed.named_parameters()), dict(model.named_parameters())) == 0
    group = saved["optimizer"]["param_groups"][0]
    group["weight_layouts"] = dict.fromkeys(group["weight_layouts"], "linear")
    with pytest.raises(ValueError, match="group 0 weight_layouts"):
        again.load_state_dict(saved["optimizer"])
