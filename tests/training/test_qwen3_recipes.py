"""Both readings of qwen3-0.6b on a small C4 and a small Qwen3: trained, killed and resumed."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.support.c4_replica import c4
from tests.support.published_tokenizers import qwen
from tests.support.tiny_run import TinyRun
from tests.support.trainer_parity import furthest

from .test_resume import stop_after

pytestmark = pytest.mark.model
NAMES = ("scratch-soren", "pretrained-soren", "pretrained-released-soren", "scratch-htmuon", "pretrained-adamw")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """overrides(recipe's name): a small C4, and a Qwen3 with weights and tokenizer."""
    root = tmp_path_factory.mktemp("qwen3")
    tokenizer = qwen()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    data = [override for override in c4(root / "data") if not override.startswith("model.")]

    def of_recipe(name):
        model = [f"model.name_or_path={root / 'model'}", "model.dtype=float32"]
        model += [f"model.tokenizer={root / 'model'}"] * name.startswith("scratch")
        unused = ("optimizer.compensation", "optimizer.precision") if name.endswith(("adamw", "htmuon")) else ()
        return [*model, *(override for override in data if not override.startswith(unused or "-"))]

    return root / "model", of_recipe


@pytest.mark.parametrize("name", NAMES)
def test_a_small_replica_is_killed_and_resumed(name, overrides, tmp_path, monkeypatch):
    start, of_recipe = overrides
    whole = TinyRun(tmp_path / "whole", f"qwen3-0.6b/{name}", *of_recipe(name))
    whole.train()

    def run():
        return TinyRun(tmp_path / "run", f"qwen3-0.6b/{name}", *of_recipe(name))

    stop_after(run, 5, monkeypatch)
    resumed = run()
    resumed.train()
    assert resumed.folder.read()["resumed_from_steps"] == [4]
    weights, again = (load_file(r.folder.model / "model.safetensors") for r in (whole, resumed))
    assert furthest(weights, again) == 0
    record = whole.folder.read()
    assert record["optimizer"]["num_matrices"] == (0 if name.endswith("adamw") else 2 * 7 + 1)  # the tied embedding too
    is_random = name.startswith("scratch")
    assert whole.folder.start.is_dir() == is_random
    before = load_file((whole.folder.start if is_random else start) / "model.safetensors")
    changed = [key for key in before if not torch.equal(before[key], weights[key])]
    assert len(changed) > len(before) / 2
    assert is_random != torch.equal(
        before["model.embed_tokens.weight"], load_file(start / "model.safetensors")["model.embed_tokens.weight"]
    )
