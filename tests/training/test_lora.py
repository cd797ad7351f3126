"""A few steps with LoRA adapters: what is trained, what is saved, what is the reference, what goes on."""

import json
import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from soren_align.core.errors import UserError
from soren_align.evaluate.run.lineage import lineage
from soren_align.optim import route, routing_table
from soren_align.publish.card import card
from soren_align.recipe import adapter_config
from soren_align.training import adapters
from soren_align.training import run as training
from soren_align.training.model import starting_checkpoint
from tests.support.tiny_run import same
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.model

LORA = ("model.lora={r: 4}", "optimizer.lr=2e-2", "optimizer.aux_lr=null", "optimizer.adjust_lr_fn=null",
        "optimizer.weight_decay=0")  # fmt: skip
FACTOR = "LoRA factor (extension, not in the paper)"
WORDS = torch.arange(3, 40)[None]


@pytest.fixture
def sft(tiny_run):
    run = tiny_run("sft", *LORA, name="sft")
    assert run.train()
    return run


@pytest.fixture
def second(tiny_run, sft):
    """DPO that goes on with the adapter of SFT."""
    return tiny_run("dpo", f"model.name_or_path={sft.folder.model}", "optimizer.aux_lr=null", name="dpo")


def adapted(folder):
    base = AutoModelForCausalLM.from_pretrained(adapters.base_model(str(folder))[0], dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(folder))


def test_only_the_factors_are_trained_and_each_is_mapped_once(sft):
    said = sft.folder.read()
    assert said["routing"] == [{"rule": "spectral", "reason": FACTOR, "tensors": 28, "matrices": 28, "numel": 9472}]
    assert (said["parameters"]["trainable"], said["parameters"]["dtype"]) == (9472, ["float32"])
    assert (said["optimizer"]["num_matrices"], said["optimizer"]["maps_per_step"]) == (28, 28)
    assert said["optimizer"]["groups"][0]["adjust_lr_fn"] == "match_rms_measured"
    lines = [line for line in sft.metrics() if "loss" in line]
    assert all(line["update_rms"] > 0 for line in lines[1:])  # the warm-up's first step has a rate of 0
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_model_without_weights_is_outlined_as_it_would_be_trained(sft, second):
    for run in (sft, second):
        start, _ = starting_checkpoint(run.recipe, run.folder)
        config = AutoConfig.from_pretrained(adapters.base_model(start)[0])
        with torch.device("meta"):
            model = adapters.add_empty_adapter(AutoModelForCausalLM.from_config(config), run.recipe, start)
        assert routing_table(route(model)) == sft.folder.read()["routing"]


def test_the_adapter_remembers_a_base_that_stays(sft):
    said = adapter_config(sft.folder.model)
    assert said["base_model_name_or_path"] == str(sft.folder.start.resolve())
    names = {file.name for file in sft.folder.model.iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"}
    assert not names & {"README.md", "model.safetensors", "training_args.bin"}
    moved = sft.folder.path.rename(sft.folder.path.with_name("elsewhere"))
    there = adapter_config(moved / "model")
    assert there["base_model_name_or_path"] == str((moved / "start").resolve())


def test_the_cards_python_runs_for_an_adapter_and_for_a_whole_model(sft, monkeypatch, capsys):
    for folder, is_merged in ((sft.folder.model, False), (adapters.merge(sft.folder), True)):
        snippet = re.search(r"```python\n(.*?)```", card(sft.folder, "zoo", is_merged), re.DOTALL)
        assert ("peft" in snippet[1]) is not is_merged
        monkeypatch.chdir(folder)
        values = {}
        exec(snippet[1], values)
        assert capsys.readouterr().out == f"{values['answer'][0]['generated_text']}\n"


def test_merged_and_unmerged_logits_agree(sft):
    merged = adapters.merge(sft.folder)
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    apart = adapted(sft.folder.model)
    with torch.no_grad():
        logits = apart(WORDS).logits
        assert (whole(WORDS).logits - logits).abs().max() < 1e-5
        with apart.disable_adapter():
            assert (apart(WORDS).logits - logits).abs().max() > 1e-3  # the adapter does something
    assert (merged / "tokenizer_config.json").is_file()
    assert adapters.merge(sft.folder) == merged  # of the same adapter: made again
    assert [name for name, _ in lineage(merged)] == ["base", "SFT"]
    assert lineage(merged)[-1][1] == merged
    (merged / adapters.MERGED_FROM).unlink()
    with pytest.raises(UserError, match="is not a merge of this run's adapter; remove"):
        adapters.merge(sft.folder)


def test_an_embedding_that_is_the_head_too_is_trained_and_merged_as_both(tiny_run):
    whole = "model.lora={r: 4, modules_to_save: [embed_tokens]}"
    run = tiny_run("sft", whole, "optimizer.weight_decay=0", "optimizer.aux_lr=1e-2")
    assert run.train()
    rows = {row["rule"]: row["tensors"] for row in run.folder.read()["routing"]}
    assert rows == {"spectral": 28, "adamw": 1}
    merged = adapters.merge(run.folder)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    start = load_file(run.folder.start / "model.safetensors")["model.embed_tokens.weight"]
    assert (model.lm_head.weight - start).abs().max() > 1e-3
    with torch.no_grad():
        assert (model(WORDS).logits - adapted(run.folder.model)(WORDS).logits).abs().max() < 1e-5


def test_dpo_with_a_new_adapter_has_its_start_as_reference(tiny_run):
    run = tiny_run("dpo", *LORA)
    assert run.train()
    first, *_, last = [line for line in run.metrics() if "loss" in line]
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)  # B = 0: the policy is the reference
    assert last["rewards/margins"] != 0


def test_dpo_goes_on_with_the_adapter_of_sft_and_keeps_a_frozen_copy_as_reference(second, sft):
    assert second.train()
    said = second.folder.read()
    assert said["routing"] == sft.folder.read()["routing"]
    assert said["optimizer"]["groups"][0]["num_tensors"] == 28
    assert second.losses()[0] == pytest.approx(0.6931, abs=1e-4)  # the reference is the adapter, not its base
    assert {f.name for f in second.folder.model.iterdir() if f.is_dir()} == set()
    first, last = sft.weights(), second.weights()
    assert last.keys() == first.keys()
    assert same(load_file(second.folder.checkpoints / "checkpoint-6/ref/adapter_model.safetensors"), first)
    assert not any(torch.equal(last[name], tensor) for name, tensor in first.items())
    assert [name for name, _ in lineage(second.folder.path)] == ["base", "SFT", "DPO"]


@pytest.mark.parametrize("task", [pytest.param("sft", marks=pytest.mark.slow), "dpo"])
def test_a_killed_run_goes_on_to_the_weights_of_an_uninterrupted_one(tiny_run, task, request):
    if task == "sft":
        settings = LORA
    else:
        model = request.getfixturevalue("sft").folder.model
        settings = (f"model.name_or_path={model}", "optimizer.aux_lr=null")
    whole = tiny_run(task, *settings, name="whole")
    whole.train()
    killed = tiny_run(task, *settings, name="killed")
    killed.train()
    killed.forget_the_end()
    assert killed.train()
    assert killed.folder.read()["resumed_from_steps"] == [4]
    assert same(killed.weights(), whole.weights())


def on_narrow(run):
    """What is told of a trained run on a bfloat16 base, and of its parameters."""
    said = run.folder.read()
    assert said["parameters"]["dtype"] == ["bfloat16", "float32"]
    assert said["first_step"]["matrices"]["dtype"] == "float32"
    assert said["first_step"]["matrices"]["fraction_changed"] > 0.9
    assert said["training"]["change_after_saving"]["dtype"] == "float32"
    kept = said["training"]["change_after_saving"]["matrices"]
    assert kept == pytest.approx({"fraction_changed": 1, "projection": 1})
    assert {tensor.dtype for tensor in run.weights().values()} == {torch.float32}
    return said


@pytest.mark.parametrize("bf16", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_on_a_bfloat16_base_the_factors_are_float32_and_lose_nothing(tiny_run, bf16):
    narrow = ("model.dtype=bfloat16", f"trainer.bf16={bf16}")
    first = tiny_run("sft", *LORA, *narrow, name="sft")
    trainer = first.trainer()
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in trainer.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert first.train()
    assert on_narrow(first)["routing"][0]["tensors"] == 28
    assert first.losses()[-1] < first.losses()[0]

    where = f"model.name_or_path={first.folder.model}"
    second = tiny_run("dpo", where, "optimizer.aux_lr=null", *narrow, name="dpo")
    assert second.train()
    assert on_narrow(second)["first_step"]["matrices"]["ulp"] > 0  # no factor begins at 0 any more
    last = second.weights()
    assert not any(torch.equal(last[name], tensor) for name, tensor in first.weights().items())


@pytest.mark.parametrize(("asked", "dtype"), [("null", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")])
def test_save_dtype_is_that_of_the_merge(tiny_run, asked, dtype):
    run = tiny_run("sft", *LORA, f"run.save_dtype={asked}")
    assert run.train()
    assert {tensor.dtype for tensor in run.weights().values()} == {torch.float32}
    assert run.folder.read()["training"]["change_after_saving"]["dtype"] == "float32"
    merged = adapters.merge(run.folder)
    assert {tensor.dtype for tensor in load_file(merged / "model.safetensors").values()} == {getattr(torch, dtype)}
    assert json.loads((merged / "config.json").read_text())["dtype"] == dtype


def test_what_trl_makes_bfloat16_beside_a_quantised_base_is_float32_again(tiny_run, monkeypatch):
    """TRL asks for is_loaded_in_4bit alone, so that a plain base with that mark stands in for a quantised one."""
    load = training.build.load_model

    def marked(*args):
        model = load(*args)
        model.is_loaded_in_4bit = True
        return model

    monkeypatch.setattr(training.build, "load_model", marked)
    trainer = tiny_run("dpo", *LORA).trainer()
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
