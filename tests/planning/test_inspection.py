"""`soren-align plan MODEL`: a model's training from its config alone."""

import io
import json
import os

import pytest
from soren_align.cli import app
from soren_align.core.errors import UserError
from soren_align.core.text import Terminal
from soren_align.planning.inspection import ALWAYS, inspect_model, print_inspection
from soren_align.recipe import load_for_model
from tests.support import command
from tests.support.architectures import config_of
from tests.support.tiny_models import BASE
from transformers import AutoTokenizer

pytestmark = pytest.mark.model
REFUSED = {"qwen2_vl", "t5"}
SECONDS = 2


def folder_of(tmp_path, name, **changes):
    config_of(name, **changes).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(tmp_path)
    return tmp_path


def inspected(folder, *overrides, num_ranks=8):
    return inspect_model(load_for_model(str(folder), list(overrides)), num_ranks)


def messages(inspection, when=ALWAYS):
    return [problem["message"] for problem in inspection["problems"] if problem["when"] == when]


@pytest.mark.rest
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba", "gemma3"])
def test_an_architecture_is_inspected_in_two_seconds(name, tmp_path):
    folder = folder_of(tmp_path, name)
    start = sum(os.times()[:4])  # CPU time, which other work on the machine does not change much
    inspection = inspected(folder)
    assert sum(os.times()[:4]) - start < SECONDS
    assert sum(row["numel"] for row in inspection["routing"]) == inspection["model"]["num_trained_parameters"]
    others = [message for message in messages(inspection) if "has no weights" not in message]
    assert len(others) == (name == "gemma3")
    assert all("model.freeze: ['model.vision_tower.*', 'model.multi_modal_projector.*']" in text for text in others)
    text = io.StringIO()
    print_inspection(inspection, Terminal(file=text, width=80))
    tables = [line for line in text.getvalue().splitlines() if line.startswith(" ")]
    assert max(map(len, tables)) <= 80 or "problem" in text.getvalue()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_no_causal_language_model_is_refused_in_one_sentence(name, tmp_path):
    with pytest.raises(UserError, match="name a causal language model"):
        inspected(folder_of(tmp_path, name))


def test_the_states_are_those_of_a_plan(tmp_path, planned):
    plan, _ = planned("quickstart/sft", "run.parallel=zero2", num_ranks=2)
    (states,) = [part["num_bytes"] for part in plan["processes"]["memory"] if part["name"] == "optimizer states"]
    config_of("llama").save_pretrained(tmp_path)
    inspection = inspected(BASE, num_ranks=2)
    rows = {row["optimizer"]: row for row in inspection["state_bytes_per_gpu"]}
    assert rows["soren"]["zero2"] == states
    assert rows["adamw"]["ddp"] > 1.5 * rows["soren"]["ddp"] > rows["soren"]["zero3"]


@pytest.mark.process
def test_a_model_in_the_cache_of_the_hub_is_inspected_offline(tmp_path):
    """The cache has a folder per commit, of links to files that are named by their hashes."""
    files = folder_of(tmp_path / "files", "phi3")
    cached, commit = tmp_path / "cache/models--owner--tiny", "0123456789abcdef0123456789abcdef01234567"
    for folder in ("refs", "blobs", f"snapshots/{commit}"):
        (cached / folder).mkdir(parents=True)
    (cached / "refs/main").write_text(commit)
    for number, file in enumerate(files.iterdir()):
        blob = file.rename(cached / f"blobs/{number:040x}")
        (cached / f"snapshots/{commit}" / file.name).symlink_to(f"../../blobs/{blob.name}")
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    settings = {"env": environment, "is_fork": False}  # read on import
    inspection = json.loads(command.run_process("plan", "owner/tiny", "--json", code=0, **settings).stdout)
    assert (inspection["model"]["class"], inspection["problems"]) == ("Phi3ForCausalLM", [])
    assert inspection["tokens"]["template"]["end_is_eos"]
    missing = command.run_process("plan", "owner/other", code=2, **settings)
    assert "model owner/other: is neither a folder nor in the cache, and HF_HUB_OFFLINE" in missing.stderr


def test_a_template_is_judged_by_the_token_that_ends_its_answers(tmp_path):
    folder = folder_of(tmp_path, "llama")
    assert inspected(folder)["tokens"]["template"]["end_is_eos"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tokenizer.chat_template.replace("content + '<|end|>'", "content + '<|user|>'")
    tokenizer.save_pretrained(folder)
    inspection = inspected(folder)
    words = "answers end with <|user|>, but the model stops at <|end|>: add model.eos_token"
    assert any(words in notice for notice in inspection["notices"])
    assert not inspection["tokens"]["template"]["end_is_eos"]
    assert inspected(folder, "model.eos_token=<|user|>")["tokens"]["template"]["end_is_eos"]
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    (problem,) = messages(inspected(folder), "conversations")
    assert "has no chat template; set model.chat_template" in problem


def test_a_config_alone_is_enough_for_all_but_the_tokens(tmp_path):
    config_of("qwen3_moe").save_pretrained(tmp_path)
    inspection = inspected(tmp_path)
    assert inspection["tokens"] is None
    assert "has no tokenizer_config.json" in messages(inspection)[0]
    assert inspection["fused"] == [
        {"layer": "gate_up_proj", "projections": ["gate", "up"], "is_split": True, "remedy": None, "tensors": 2}
    ]


def test_tokens_without_an_embedding_stop_every_training(tmp_path):
    (weights, message) = messages(inspected(folder_of(tmp_path, "llama", vocab_size=3)))
    assert "has no weights" in weights
    assert "the model's vocab_size is only 3" in message


def test_every_group_of_parameters_has_the_reason_of_its_route(tmp_path):
    inspection = inspected(folder_of(tmp_path, "gpt2"), "optimizer.aux=['*.c_proj.weight']")
    reasons = {row["reason"]: (row["rule"], row["tensors"]) for row in inspection["routing"]}
    assert reasons["named by aux '*.c_proj.weight'"] == ("adamw", 4)
    assert reasons["linear layer"] == ("spectral", 4)
    assert inspection["tied"] == [["transformer.wte.weight", "lm_head.weight"]]


@pytest.mark.parametrize(("name", "is_model"), [
    ("Qwen/Qwen2.5-3B", True), ("quickstart/sftt", False), ("my/plan.yaml", False), ("sft", False)])  # fmt: skip
def test_a_mistyped_recipe_is_not_taken_for_a_model_of_the_hub(name, is_model):
    assert app._is_model(name) == is_model
