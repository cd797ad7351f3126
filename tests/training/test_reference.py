"""DPO's reference is the starting model: its cached log-probabilities are of no other, and step 1 shows it."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from datasets import Dataset
from soren_align import SorenDPOTrainer
from soren_align.core.errors import UserError
from soren_align.training import reference
from soren_align.training import trainer as trl_trainers
from tests.support.tiny_models import make_model
from transformers import AutoModelForCausalLM
from trl import DPOConfig

pytestmark = pytest.mark.model
PRECOMPUTED = "trainer.precompute_ref_log_probs=true"
ONE_STEP = ("trainer.max_steps=1", "data.train.limit=32", "trainer.save_strategy=no")
REFUSAL = "step 1: the reference model is not the starting model"


def one_key():
    """All reference log-probabilities under one key, as TRL has it under ZeRO 3.

    Not that of the ranks' job for the same (trainer_jobs.py): they have one cache, and the first run would find its.
    """
    return mock.patch.object(trl_trainers, "reference_key", return_value="1" * 64)


def references(trainer):
    dataset = trainer.train_dataset
    return torch.tensor([dataset["ref_chosen_logps"], dataset["ref_rejected_logps"]])


@pytest.mark.parametrize("setting", ["trainer.bf16=true", "model.init_seed=1"])
def test_log_probabilities_of_other_settings_are_computed_anew(tiny_run, setting):
    first = references(tiny_run("dpo", PRECOMPUTED, *ONE_STEP, name="first").trainer())
    second = references(tiny_run("dpo", PRECOMPUTED, *ONE_STEP, setting, name="second").trainer())
    assert not torch.equal(first, second)


def test_the_same_run_elsewhere_reads_the_same_log_probabilities(tiny_run):
    first = references(tiny_run("dpo", PRECOMPUTED, *ONE_STEP, name="first").trainer())
    with mock.patch.object(trl_trainers.SorenDPOTrainer, "compute_ref_log_probs", side_effect=AssertionError):
        assert torch.equal(references(tiny_run("dpo", PRECOMPUTED, *ONE_STEP, name="second").trainer()), first)


@pytest.mark.parametrize("suffix", [".arrow", ".json"])
def test_damaged_log_probabilities_are_computed_again(tiny_run, capsys, suffix):
    trainer = tiny_run("dpo", PRECOMPUTED, *ONE_STEP, name="first").trainer()
    first, files = references(trainer), [Path(entry["filename"]) for entry in trainer.train_dataset.cache_files]
    (file,) = (file for file in files if file.name.startswith("cache-"))
    content = bytearray((damaged := file.with_suffix(suffix)).read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert torch.equal(references(tiny_run("dpo", PRECOMPUTED, *ONE_STEP, name="second").trainer()), first)
    printed = "".join(capsys.readouterr().err.split())  # a notice is wrapped
    assert "".join(f"{file}: the content differs from what was saved".split()) in printed


@pytest.mark.rest
@pytest.mark.parametrize(("loss", "precision"), [("sigmoid", ()), ("ipo", ("trainer.bf16=true",))])
def test_a_run_with_another_models_log_probabilities_stops_at_step_1(tiny_run, loss, precision):
    settings = (PRECOMPUTED, *ONE_STEP, f"trainer.loss_type=[{loss}]", *precision)
    with one_key():
        tiny_run("dpo", *settings, "model.init_seed=1", name="first").train()
        with pytest.raises(UserError, match=f"{REFUSAL}.*cached log-probabilities of another model"):
            tiny_run("dpo", *settings, "model.init_seed=2", name="second").train()


def test_a_reference_that_is_another_model_stops_the_run(tiny_run):
    trainer = tiny_run("dpo", *ONE_STEP).trainer()
    with torch.no_grad():
        trainer.ref_model.lm_head.weight.mul_(1.01)
    with pytest.raises(UserError, match=f"{REFUSAL}.*precompute_ref_log_probs: true"):
        trainer.train()


def test_the_reference_of_a_hub_model_has_its_revision(tiny_run, tmp_path, monkeypatch):
    """TRL loads it by the model's name alone."""
    cached = tmp_path / "hub" / "models--owner--tiny"
    (cached / "refs").mkdir(parents=True)
    for seed, (name, commit) in enumerate([("main", "a" * 40), ("older", "b" * 40)]):
        (cached / "refs" / name).write_text(commit)
        make_model(cached / "snapshots" / commit, seed)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = ("model.name_or_path=owner/tiny", "model.init_seed=null", "model.revision=older")
    trainer = tiny_run("dpo", *ONE_STEP, *hub).trainer()
    for weight, reference_weight in zip(trainer.model.parameters(), trainer.ref_model.parameters(), strict=True):
        assert torch.equal(weight, reference_weight)


@pytest.mark.rest
def test_dropout_of_the_policy_alone_is_no_other_reference(tiny_run):
    """Attention's: TRL switches only layers of dropout off. The precomputed reference has none."""
    trainer = tiny_run("dpo", PRECOMPUTED, *ONE_STEP).trainer()
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    trainer.train()


def test_a_reference_of_the_users_is_not_checked(tmp_path):
    policy, other = (make_model(tmp_path / str(seed), seed) for seed in (0, 1))
    examples = [{"prompt": "The", "chosen": " otter", "rejected": " owl"}] * 4
    args = DPOConfig(str(tmp_path / "out"), max_steps=1, use_cpu=True, bf16=False, report_to=[], save_strategy="no")
    settings = {"args": args, "train_dataset": Dataset.from_list(examples)}
    SorenDPOTrainer(str(policy), AutoModelForCausalLM.from_pretrained(other), **settings).train()


@pytest.mark.rest
def test_a_resumed_run_is_not_checked(tiny_run):
    steps = ("trainer.max_steps=2", "trainer.save_steps=1", "trainer.warmup_steps=0")  # else the first has a rate of 0
    run = tiny_run("dpo", PRECOMPUTED, "data.train.limit=64", *steps)
    run.train()
    run.forget_the_end()
    run.train()
    assert run.folder.read()["resumed_from_steps"] == [1]


@pytest.mark.parametrize(
    ("dtype", "reward"), [(torch.float32, 1e-3), (torch.float16, 0.02), (torch.bfloat16, 0.15)], ids=str
)
def test_the_limits_are_those_of_rounding(dtype, reward):
    """For 32 pairs of 500 tokens, a usual step, at a usual beta. Another model is several nats away: 0.1 and more."""
    model = torch.nn.Linear(1, 1, dtype=dtype)
    model.config = SimpleNamespace(get_text_config=SimpleNamespace)
    trainer = SimpleNamespace(beta=0.1, model=model, args=SimpleNamespace(bf16=False, fp16=False))
    limit = reference.reward_limit(trainer, num_tokens=500, num_pairs=32)
    errors = 0.1 * reference.ROUNDING[dtype] * torch.randn(1000, 32, 500, generator=torch.Generator().manual_seed(0))
    assert errors.sum(-1).mean(-1).abs().max() < limit < reward
