"""The divergence from the start and the loss on retention examples are those of a float64 reference, also resumed."""

import json
from pathlib import Path

import pytest
import torch
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.recipe import training_part
from soren_align.training.measure.retention import Probe, _groups, evenly, sum_of_kl
from tests.support.tiny_run import assert_trained_alike, stop_after
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
EVALUATED = ("trainer.eval_strategy=steps", "trainer.eval_steps=2", "trainer.max_steps=4", "data.eval.limit=9")
RETAINED = "data.retention.path=shipped:recipes/quickstart/data/chat_test.jsonl"
MEASURED = (*EVALUATED, "run.kl_to_start=20", RETAINED, "data.retention.limit=7")


def lines(run):
    """{step: (kl_to_start, retention_loss)}"""
    return {log["step"]: (log["kl_to_start"], log["retention_loss"]) for log in run.metrics() if "kl_to_start" in log}


def reference(run):
    """Both values of the saved model, in float64 and one example at a time, without this package's tokens."""
    start, model = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
                    for folder in (run.folder.start, run.folder.model))  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(run.folder.model)
    path = recipe.load("quickstart/sft", []).data.eval.path.removeprefix("shipped:")
    pairs = run.recipe.task == "dpo"
    if pairs:
        path = "recipes/quickstart/data/zoo_pairs/test.jsonl"
    kls, losses = [], []
    for held_out, number in ((path, 9), ("recipes/quickstart/data/chat_test.jsonl", 7)):
        is_retention = number == 7
        with (ROOT / held_out).open() as file:
            records = [json.loads(line) for line, _ in zip(file, range(number), strict=False)]
        for record in records:
            turns = record["chosen"] if pairs and not is_retention else record["messages"]
            marked = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
            ids = torch.tensor([marked["input_ids"]])
            places = [i - 1 for i, mark in enumerate(marked["assistant_masks"]) if mark]
            with torch.no_grad():
                p, q = (each(ids).logits[0, places].log_softmax(-1) for each in (start, model))
            if is_retention:
                losses += (-q[range(len(places)), ids[0, [i + 1 for i in places]]]).tolist()
            else:
                kls += (p.exp() * (p - q)).sum(-1).tolist()
    spread = [kls[i] for i in evenly(len(kls), 20)]
    return sum(spread) / len(spread), sum(losses) / len(losses)


def test_the_divergence_is_that_of_float64_and_0_for_equal_logits():
    torch.manual_seed(0)
    before, after = torch.randn(2, 70, 500, dtype=torch.float64)
    before[3, 7] = after[3, 7] = -torch.inf
    p, q = before.softmax(-1), after.softmax(-1)
    exact = float(torch.where(p > 0, p * (p / q).log(), 0.0).sum())
    assert float(sum_of_kl(before.float(), after.float())) == pytest.approx(exact, rel=1e-5)
    assert float(sum_of_kl(before.bfloat16(), before.bfloat16().float())) == 0.0


def test_forward_passes_are_bounded_and_contain_every_probe_once():
    probes = [Probe([0] * length, [*range(1, length)]) for length in (*range(2, 60), 700, 5000)]
    groups = list(_groups(probes))
    assert [probe for group in groups for probe in group] == probes
    for group in groups:
        kept = {position for probe in group for position in probe.positions}
        longest = max(len(probe.ids) for probe in group)
        assert len(group) == 1 or (len(group) * longest <= 4096 and len(group) * len(kept) <= 512)
    assert 1 < len(groups) < 10


@pytest.mark.rest
@pytest.mark.model
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_both_values_are_those_of_a_float64_reference(tiny_run, task):
    run = tiny_run(task, *MEASURED, "optimizer.lr=1e-2")
    assert run.train()
    values = lines(run)
    assert [*values] == [0, 2, 4]
    assert values[0][0] == 0.0 < values[2][0] < values[4][0]
    assert values[4] == pytest.approx(reference(run), rel=1e-4)
    assert not run.folder.start_logits.exists()
    assert run.folder.read()["data"]["retention"]["num_scored"] == 7


@pytest.mark.rest
@pytest.mark.model
def test_they_change_no_weight_and_a_resumed_run_measures_the_same(tiny_run):
    dropout = ("model.lora={r: 4, dropout: 0.3}", "optimizer.aux_lr=null", "trainer.eval_on_start=true")
    silent = tiny_run("sft", *EVALUATED, *dropout, name="silent")
    whole = tiny_run("sft", *MEASURED, *dropout, name="whole")
    assert_trained_alike(silent, whole)

    def measured_run():
        return tiny_run("sft", *MEASURED, *dropout)

    stop_after(measured_run, 3)
    measured_run().train()
    assert lines(measured_run()) == lines(whole)
    assert [*lines(whole)] == [0, 2, 4]


@pytest.mark.rest
@pytest.mark.model
def test_a_resume_without_the_starts_logits_is_refused_with_a_remedy(tiny_run):
    stop_after(lambda: tiny_run("sft", *MEASURED), 3)
    tiny_run().folder.start_logits.unlink()
    with pytest.raises(UserError, match=r"start_logits.safetensors: .* --set run.kl_to_start=0"):
        tiny_run("sft", *MEASURED).train()
    assert tiny_run("sft", *EVALUATED, RETAINED).train()


@pytest.mark.parametrize("key", ["run.kl_to_start=8", RETAINED])
def test_without_evaluations_they_are_refused_and_they_are_no_part_of_the_training(key):
    with pytest.raises(UserError, match=rf"{key.split('=')[0].removesuffix('.path')}: needs evaluations"):
        recipe.load("quickstart/sft", [key, "data.eval=null", "trainer.eval_strategy=null"])
    assert training_part(recipe.load("quickstart/sft", [key])) == training_part(recipe.load("quickstart/sft", []))
