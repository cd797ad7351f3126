"""QLoRA: the base is quantized in SFT, in DPO on that adapter, in evaluation, and before a merge."""

import importlib.util
import json
import shutil

import pytest
import torch
from soren_align.evaluate.run.backends import BackendSettings, load_lm
from soren_align.planning.inputs import count_frozen
from soren_align.run.quantized import quantization_of
from soren_align.training import adapters
from tests.support import command
from tests.support.tiny_run import TinyRun, same
from tests.training.test_lora import LORA, WORDS
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.model

TYPES = {"4bit": ("nf4, double quantization", "float32", "uint8"), "8bit": ("int8", "float16", "int8")}


@pytest.fixture(scope="module", params=["4bit", "8bit"])
def sft(request, tmp_path_factory):
    """A trained run on a quantized base, which tests only read."""
    folder = tmp_path_factory.mktemp(request.param) / "sft"
    run = TinyRun(folder, "sft", *LORA, f"model.quantize={request.param}", "run.save_dtype=float32")
    assert run.train()
    return run


def logits(model):
    with torch.no_grad():
        return model.eval()(WORDS).logits


@pytest.mark.rest
def test_dpo_on_the_adapter_of_a_quantized_sft_is_quantized_throughout(tiny_run, sft):
    first, quantize = sft, sft.recipe.model.quantize
    second = tiny_run("dpo", f"model.name_or_path={sft.folder.model}", "optimizer.aux_lr=null", name="dpo")
    assert second.train()
    assert second.recipe.model.quantize == quantize
    kind, computed, stored = TYPES[quantize]
    for run in (first, second):
        record = run.folder.read()
        quantized = record["quantization"]
        assert (quantized["type"], quantized["compute_dtype"], quantized["num_layers"]) == (kind, computed, 14)
        copy = 9472 if run is second else 0  # of the adapter: the reference
        assert (quantized["num_weights"], record["parameters"]["total"]) == (94_208, 111_744 + copy)
        assert record["parameters"]["dtype"] == sorted(["float32", stored])
        assert run.losses()[-1] < run.losses()[0]
    assert second.losses()[0] == pytest.approx(0.6931, abs=1e-3)  # the reference is the adapter on the same base
    assert {tensor.dtype for tensor in second.weights().values()} == {torch.float32}


def test_the_merge_is_the_evaluated_model_which_is_quantized(tmp_path, sft):
    run = TinyRun(shutil.copytree(sft.folder.path, tmp_path / "copy"), "sft")
    quantize = sft.recipe.model.quantize
    tolerance = {"4bit": 1e-5, "8bit": 0.02}[quantize]  # LLM.int8 rounds activations too
    evaluated = load_lm(run.folder.model, None, BackendSettings("hf", "float32", "cpu", 4)).model
    assert (quantization_of(evaluated) or {})["quantize"] == quantize
    merged = AutoModelForCausalLM.from_pretrained(adapters.merge(run.folder), dtype=torch.float32)
    config = json.loads((run.folder.merged / "config.json").read_text())
    assert "quantization_config" not in config
    assert quantization_of(merged) is None
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    assert (logits(evaluated) - logits(merged)).abs().max() < tolerance
    whole = AutoModelForCausalLM.from_pretrained(run.folder.start, dtype=torch.float32)
    (run.folder.model / "base_quantization.json").unlink()
    on_whole = load_lm(run.folder.model, None, BackendSettings("hf", "float32", "cpu", 4)).model
    assert (logits(on_whole) - logits(merged)).abs().max() > 2e-3  # the base as it was before quantization is another
    assert (logits(whole) - logits(merged)).abs().max() > 2e-3


@pytest.mark.rest
def test_weights_are_computed_with_in_the_precision_of_the_run(tiny_run):
    run = tiny_run("sft", *LORA, "model.quantize=4bit", "trainer.bf16=true", "model.dtype=bfloat16")
    assert run.train()
    record = run.folder.read()
    assert (record["quantization"]["compute_dtype"], record["quantization"]["dtype"]) == ("bfloat16", "bfloat16")
    assert record["first_step"]["matrices"]["dtype"] == "float32"


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_a_forward_pass_in_eval_mode_changes_no_quantized_weight(tiny_run, quantize):
    """bitsandbytes repacks 4-bit weights then, on CPUs with AVX512-BF16, with scales rounded to bfloat16."""
    trainer = tiny_run("sft", *LORA, f"model.quantize={quantize}").trainer()
    trainer.model.train()
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    first = trainer.model(WORDS).logits
    trainer.model.eval()
    with torch.no_grad():
        trainer.model(WORDS)
    trainer.model.train()
    assert torch.equal(trainer.model(WORDS).logits, first)
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_a_plan_counts_the_bytes_that_are_loaded(tiny_run, quantize):
    run = tiny_run("sft", *LORA, f"model.quantize={quantize}")
    model = run.trainer().model
    config = AutoConfig.from_pretrained(run.folder.start)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
        outline = adapters.add_empty_adapter(outline, run.recipe, str(run.folder.start))
    numel, num_bytes = count_frozen(run.recipe, outline)
    quantized = quantization_of(model) or {}
    whole = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    loaded = quantized["num_bytes"] + sum(p.numel() * p.element_size() for p in whole)
    assert num_bytes == loaded
    assert numel == quantized["num_weights"] + sum(p.numel() for p in whole)


@pytest.mark.parametrize("command_of", [("eval", "--suite", "quickstart"), ("chat", "--prompt", "hi"), ("merge",)])
def test_without_bitsandbytes_an_adapter_on_quantized_weights_is_refused_before_torch_is_loaded(
    sft, command_of, monkeypatch
):
    find, (name, *options) = importlib.util.find_spec, command_of
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "bitsandbytes" else find(n, *a))
    done = command.run(name, sft.folder.path, *options)
    assert done.returncode == 2
    sentence = 'needs bitsandbytes, which is not installed; run `pip install "soren-align[quantize]"`'
    assert f"{sft.folder.model}: {sentence}" in done.stderr
    assert "Loading" not in done.stderr


@pytest.mark.rest
def test_a_killed_quantized_run_resumes_to_the_weights_of_an_uninterrupted_one(tmp_path, sft):
    folder = shutil.copytree(sft.folder.path, tmp_path / "killed")
    quantize = f"model.quantize={sft.recipe.model.quantize}"
    killed = TinyRun(folder, "sft", *LORA, quantize, "run.save_dtype=float32")
    killed.forget_the_end()
    assert killed.train()
    assert killed.folder.read()["resumed_from_steps"] == [4]
    assert same(killed.weights(), sft.weights())
