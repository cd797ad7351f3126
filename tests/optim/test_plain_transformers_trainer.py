"""The factory in a plain transformers.Trainer, on a tiny Llama."""

import pytest
import torch
import transformers
from soren_align.optim import OptimizerFactory
from tests.support.tiny_models import tiny_llama

pytestmark = pytest.mark.model

SETTINGS = {
    "soren": {"name": "soren", "lr": 1e-2, "aux_lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"},
    "muon": {"name": "muon", "lr": 1e-2, "aux_lr": 1e-3},
    "htmuon": {"name": "htmuon", "lr": 1e-2, "aux_lr": 1e-3},
    "adamw": {"name": "adamw", "lr": 1e-3},
}
NUM_MATRICES = 2 * 7  # q, k, v, o, gate, up, down in each block


def llama(tied=True):
    return tiny_llama(32, num_key_value_heads=1, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2)


def trainer(folder, settings, max_steps, accumulation=1):
    tokens = torch.randint(3, 32, (64, 12), generator=torch.Generator().manual_seed(3))
    return transformers.Trainer(
        llama(),
        transformers.TrainingArguments(
            output_dir=str(folder), max_steps=max_steps, per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation, save_steps=2, lr_scheduler_type="constant", report_to=[],
            disable_tqdm=True, use_cpu=True, logging_steps=1),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizer_cls_and_kwargs=(OptimizerFactory, settings),
    )  # fmt: skip


def weights(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


@pytest.mark.rest
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_ends_with_the_same_bits(name, tmp_path):
    whole = trainer(tmp_path / "whole", SETTINGS[name], max_steps=3)
    start = weights(whole)
    whole.train()
    assert all(not torch.equal(p, start[n]) for n, p in whole.model.named_parameters())

    resumed = trainer(tmp_path / "resumed", SETTINGS[name], max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state.global_step == 3
    assert all(torch.equal(p, weights(whole)[n]) for n, p in resumed.model.named_parameters())


@pytest.mark.rest
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", ["soren", "muon", "htmuon"])
def test_each_matrix_is_mapped_once_a_step(name, accumulation, tmp_path):
    run = trainer(tmp_path, SETTINGS[name], max_steps=2, accumulation=accumulation)
    run.train()
    optimizer = run.optimizer.optimizer  # accelerate's wrapper holds ours
    assert type(optimizer).__name__.lower() == name
    assert optimizer.num_maps == 2 * NUM_MATRICES
    assert optimizer.num_guarded == 0
