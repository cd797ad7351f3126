"""Pre-training: plain texts from random weights, and a validation perplexity that is exact."""

import math

import pytest
import torch
from soren_align.core.errors import UserError
from soren_align.publish.card import card
from tests.support.tiny_run import TinyRun
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.model
HELD_OUT = ("data.train.limit=300", "data.eval={fraction: 0.04}", "trainer.per_device_eval_batch_size=4")


def mean_token_loss(run, texts, max_length):
    """In float64, each text by itself: (the mean loss of all predicted tokens, their number)."""
    model = AutoModelForCausalLM.from_pretrained(run.folder.model, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(run.folder.model)
    losses = []
    for text in texts:
        ids = torch.tensor([tokenizer(text + tokenizer.eos_token)["input_ids"][:max_length]])
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)
        losses += [-float(log_probs[0, i - 1, ids[0, i]]) for i in range(1, ids.shape[1])]
    return sum(losses) / len(losses), len(losses)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A run whose last evaluation during training is two steps before its end; it is only read."""
    folder = tmp_path_factory.mktemp("pretrained")
    evaluated = (*HELD_OUT, "trainer.eval_strategy=steps", "trainer.eval_steps=4", "trainer.max_length=24")
    run = TinyRun(folder / "run", "pretrain", *evaluated)
    assert run.train()
    return run


def test_the_perplexity_is_of_all_held_out_tokens(pretrained):
    texts = pretrained.prepare().splits.eval.dataset["text"]
    assert len(texts) % 4, "a batch that is not full: batches count by their tokens"
    loss, num_tokens = mean_token_loss(pretrained, texts, 24)
    validation = pretrained.folder.read()["training"]["validation"]
    assert validation["num_tokens"] == num_tokens
    assert validation["loss"] == pytest.approx(loss, rel=1e-5)
    assert validation["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_the_end_is_evaluated_and_shown(pretrained):
    losses = {log["step"]: log["eval_perplexity"] for log in pretrained.metrics() if "eval_loss" in log}
    assert sorted(losses) == [4, 6]
    assert losses[6] < losses[4]
    assert f"validation perplexity {losses[6]:.2f}, on" in " ".join(pretrained.said.getvalue().split())
    assert f"validation perplexity | {losses[6]:.2f}, of" in card(pretrained.folder, "run")


@pytest.mark.parametrize("number", [1, 100, 10**6])
def test_the_first_examples_with_so_many_tokens_are_evaluated(tiny_run, number):
    run = tiny_run("pretrain", *HELD_OUT, f"data.eval_tokens={number}", "trainer.max_length=24")
    setup = run.prepare()
    whole = tiny_run("pretrain", *HELD_OUT, "trainer.max_length=24", name="whole").prepare().tokens.eval
    lengths = [min(len(ids), 24) - 1 for ids in whole["input_ids"]]
    expected = next((n for n in range(1, len(lengths)) if sum(lengths[:n]) >= number), len(lengths))
    assert setup.tokens.eval["input_ids"] == whole["input_ids"][:expected]
    assert (number == 10**6) == (expected == len(lengths))


@pytest.mark.rest
def test_a_killed_run_is_resumed_bit_for_bit(resumed):
    packed = ("trainer.packing=true", "trainer.packing_strategy=wrapped", "trainer.max_length=32")
    whole, run = resumed(5, "pretrain", *HELD_OUT, *packed)
    assert whole.folder.read()["training"]["validation"] == run.folder.read()["training"]["validation"]


def test_conversations_are_refused(tiny_run):
    run = tiny_run("pretrain", "data.train.path=shipped:recipes/quickstart/data/chat_train.jsonl")
    with pytest.raises(UserError, match=r"chat_train.jsonl has chat messages .*, but pretrain needs plain texts"):
        run.prepare()


def test_a_loss_beyond_all_floats_has_an_infinite_perplexity(pretrained):
    trainer = pretrained.trainer()
    trainer.model.get_output_embeddings().weight.data *= 1e6
    metrics = trainer.evaluate()
    assert 709 < metrics["eval_loss"] < math.inf
    assert metrics["eval_perplexity"] == math.inf
