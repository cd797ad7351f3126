"""A start that is perturbed by as much as rounding: how far, how reproducibly, and what training makes of it."""

import itertools

import pytest
import torch
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.training.model import perturb_
from tests.support.tiny_run import TinyRun, same, stop_after
from tests.support.trainer_jobs import PERTURBED
from tests.support.trainer_parity import ranks_do

ROUNDING = 2.0**-24
"""Of a float32, relative."""
SHORT = ("trainer.max_steps=2", "data.train.limit=32", "trainer.save_strategy=no")


def relative_changes(start, perturbed):
    return {name: (perturbed[name].double() - w.double()).abs() / w.double().abs() for name, w in start.items()}


def weights_of(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("size", [1e-7, 1e-3])
def test_every_weight_changes_by_at_most_its_size_whatever_its_strides(size):
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    model.weight = torch.nn.Parameter(model.weight.detach().T.contiguous().T)
    before = {name: w.detach().clone() for name, w in model.named_parameters()}
    perturb_(model, size, 3)
    for changes in relative_changes(before, dict(model.named_parameters())).values():
        assert changes.max() <= size + ROUNDING
        assert changes.max() > size / 2


@pytest.mark.model
def test_policy_and_reference_of_a_dpo_have_the_same_perturbed_start(tiny_run):
    short = ("trainer.max_steps=1", "data.train.limit=32")
    plain = weights_of(tiny_run("dpo", *short, name="plain").trainer())
    trainer = tiny_run("dpo", *short, "run.perturb={size: 1e-3, seed: 1}").trainer()
    start = weights_of(trainer)
    for name, changes in relative_changes(plain, start).items():
        assert changes[plain[name] != 0].max() <= 1e-3 + ROUNDING
        assert (changes > 0).float().mean() > 0.99, name
    assert same(dict(trainer.ref_model.named_parameters()), start)
    trainer.train()  # step 1 compares the reference with the start


def test_every_mode_of_two_ranks_starts_from_the_bits_of_one_process(rank_pools, tmp_path):
    alone = TinyRun(tmp_path / "alone", "dpo", *PERTURBED).trainer()
    expected = weights_of(alone)
    for starts in ranks_do(rank_pools(2), "perturbed", tmp_path):
        for mode, models in starts.items():
            assert all(same(weights, expected) for weights in models), mode


@pytest.mark.model
def test_it_is_part_of_the_run_and_of_its_identity(tiny_run):
    changes = ("run.perturb=null", "run.perturb.seed=1", "run.perturb.seed=2")
    plain, first, second = (tiny_run("sft", *SHORT, change, name=change) for change in changes)
    for run in (plain, first, second):
        run.train()
    identities = [run.folder.read()["identity"] for run in (plain, first, second)]
    for one, other in itertools.pairwise(identities):
        assert {key for key in one if one[key] != other[key]} == {"starting_weights", "recipe"}
    assert "perturb" not in plain.folder.read()["start"]
    assert first.folder.read()["start"]["perturb"] == {"size": 1e-7, "seed": 1}
    assert "each starting weight changed by at most 1e-07 of itself, seed 1" in first.said.getvalue()


@pytest.mark.model
def test_a_run_resumes_with_its_own_perturbation_only(tiny_run):
    def run(seed):
        return tiny_run("sft", f"run.perturb.seed={seed}", name="stopped")

    whole = tiny_run("sft", "run.perturb.seed=1", name="whole")
    whole.train()
    stop_after(lambda: run(1), 3)
    with pytest.raises(UserError, match=r"run\.perturb\.seed: 2 instead of 1"):
        run(2).train()
    assert run(1).train()
    assert same(run(1).weights(), whole.weights())


@pytest.mark.parametrize(("settings", "words"), [
    (["model.dtype=bfloat16"], "bfloat16 weights would lose this change by rounding; write model.dtype: float32"),
    (["model.quantize=4bit", "model.lora.r=4", "optimizer.aux_lr=null"],
     "4-bit and 8-bit weights cannot change by a rounding error"),
    (["run.parallel=zero2", "trainer.bf16=true"], "the change is lost; write run.parallel: ddp or fsdp2"),
    (["run.perturb.size=0"], r"run\.perturb\.size"),
])  # fmt: skip
def test_weights_that_cannot_have_it_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        recipe.load("quickstart/sft", ["run.perturb.seed=1", *settings])
