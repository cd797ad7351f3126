"""Runs that differ in the optimizer alone have one identity, also after a kill; any other difference shows in it."""

from types import SimpleNamespace

import pytest
import torch
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.recipe import recipe_hash
from soren_align.sharding.ranks import Ranks
from soren_align.training.reference import BatchHash, refuse_other_inputs, weights_digest
from tests.support.tiny_run import stop_after

LORA = ("model.lora={r: 4, dropout: 0.3}", "optimizer.aux_lr=null")
STEP, MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def hash_of(*batches):
    hashed = BatchHash(Ranks())
    for batch in batches:
        hashed.add(batch)
    return hashed.record()["batches"]


def test_each_change_of_a_batch_or_of_the_order_changes_the_hash():
    ids = torch.arange(24).reshape(4, 6)
    first, second = {"input_ids": ids, "labels": ids - 7}, {"input_ids": ids + 1, "labels": ids}
    exchanged, moved = ids.clone(), ids.clone()
    exchanged[[0, 1]] = ids[[1, 0]]
    moved[0, 0], moved[0, 1], moved[2, 0], moved[2, 1] = 1, 0, 13, 12  # sums over values times positions stay equal
    hashes = [
        hash_of(first, second), hash_of(second, first), hash_of(first), hash_of(first, second, second),
        hash_of(first, {**second, "labels": ids + 1}), hash_of({**first, "input_ids": exchanged}, second),
        hash_of({**first, "input_ids": moved}, second), hash_of({**first, "input_ids": ids.reshape(6, 4)}, second),
        hash_of({"input_ids": ids - 7, "labels": ids}, second),
    ]  # fmt: skip
    assert len(set(hashes)) == len(hashes)
    assert hash_of({"labels": ids - 7, "input_ids": ids, "ref_logps": torch.rand(3)}, second) == hashes[0]


def test_the_hash_of_weights_shows_values_names_shapes_and_dtypes():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    whole = weights_digest(model, Ranks())
    assert weights_digest(model, Ranks()) == whole
    with torch.no_grad():
        model[1].weight[2, 3] += 1e-3
    assert weights_digest(model, Ranks()) != whole
    with torch.no_grad():
        model[1].weight[2, 3] -= 1e-3
    assert weights_digest(model.bfloat16(), Ranks()) != whole


def test_ranks_with_other_data_another_tokenizer_or_other_versions_are_refused():
    def setup(sha256="a", words=("x",), **large):
        split = SimpleNamespace(source={"path": "/of/a/host", "sha256": sha256, **large})
        tokenizer = SimpleNamespace(chat_template="", get_vocab=lambda: dict.fromkeys(words, 0))
        return SimpleNamespace(splits=SimpleNamespace(train=split, eval=None), tokenizer=tokenizer)

    def gathered(*setups):
        everyone = []
        for each in setups:
            refuse_other_inputs(each, SimpleNamespace(num_ranks=2, gather=lambda own: everyone.append(own) or [own]))
        refuse_other_inputs(setups[0], SimpleNamespace(num_ranks=2, gather=lambda own: everyone))

    gathered(setup(), setup())
    gathered(setup(sampled=True, tree_sha256="1"), setup(sampled=True, tree_sha256="2"))  # of times too
    for what, other in (("other data", setup("b")), ("another tokenizer", setup(words=("x", "y")))):
        with pytest.raises(UserError, match=rf"rank 1 on .* has {what}, and rank 0 on"):
            gathered(setup(), other)


@pytest.mark.rest
@pytest.mark.model
@pytest.mark.parametrize(("task", "options"), [("sft", LORA), pytest.param("dpo", (), marks=pytest.mark.slow)])
def test_a_resumed_run_of_another_optimizer_has_the_identity_of_an_uninterrupted_one(tiny_run, task, options):
    short = (*options, "trainer.max_steps=4")
    whole = tiny_run(task, *short, name="whole")
    whole.train()

    def other():
        return tiny_run(task, *short, "optimizer.name=muon", "optimizer.lr=1e-4")

    stop_after(other, 3)
    assert other().train()
    record = other().folder.read()
    assert record["resumed_from_steps"] == [2]
    assert record["identity"] == whole.folder.read()["identity"]
    assert record["identity"]["num_batches"] == 4
    loaded = recipe.load_resolved(whole.folder.recipe)
    assert record["identity"]["recipe"] == recipe_hash(loaded)  # the recipe's file has it too


@pytest.mark.rest
@pytest.mark.model
def test_another_seed_has_other_batches_and_another_start_other_weights(tiny_run):
    seeds = ("trainer.seed=0", "trainer.seed=1", "model.init_seed=2")
    first, second, third = (tiny_run("sft", "trainer.max_steps=2", key, name=key) for key in seeds)
    for run in (first, second, third):
        run.train()
    one, other, start = (run.folder.read()["identity"] for run in (first, second, third))
    assert {key for key in one if one[key] != other[key]} == {"batches", "recipe"}
    assert {key for key in one if one[key] != start[key]} == {"starting_weights", "recipe"}
    assert one["precision"]["updated"] == ["float32"]
