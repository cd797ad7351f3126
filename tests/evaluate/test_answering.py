"""Responses are the same from one process, several, a killed one or the cache, and never another model's."""

import importlib.util
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from soren_align.core.errors import UserError
from soren_align.evaluate.run import requests, workers
from soren_align.evaluate.run.harness import Options, evaluate_model
from soren_align.evaluate.run.requests import make_chunks
from soren_align.evaluate.run.stage import evaluate
from soren_align.evaluate.run.workers import OutOfMemory
from soren_align.evaluate.stats.significance import compare, unpaired
from soren_align.evaluate.suite.suites import load_suite
from soren_align.recipe import Eval
from tests.support.edited_files import edit
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.model

SUITE = load_suite("quickstart")
SILENT = Console(file=io.StringIO())


def resps(answers):
    return {column: [s["filtered_resps"] for s in asked] for column, asked in answers.samples.items()}


@pytest.fixture(scope="module")
def small(models):
    """The suite in batches of 8: many chunks."""
    suite = SUITE.model_copy(update={"batch_size": 8})
    return suite, evaluate_model(models[0], suite, Options(device="cpu"))


def test_chunks_hold_every_request_once_and_requests_of_one_context_together():
    draw = random.Random(0)
    requests = [("x" * draw.randrange(30), f"choice {i}") for i in range(1000)]
    chunks = make_chunks(requests, 32)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(1000))
    chunk_of = {}
    for number, chunk in enumerate(chunks):
        for i in chunk:
            assert chunk_of.setdefault(requests[i][0], number) == number
    longest = [len(requests[chunk[0]][0]) for chunk in chunks]
    assert longest == sorted(longest, reverse=True)
    assert all(len(chunk) == 1 for chunk in make_chunks([(str(i), {}) for i in range(9)], 1))


@pytest.mark.rest
@pytest.mark.process
@pytest.mark.sample
def test_several_processes_give_the_answers_of_one(small, models):
    suite, one = small
    several = evaluate_model(models[0], suite, Options(device="cpu", num_processes=2))
    assert several.prompt_hashes == one.prompt_hashes
    assert several.samples == one.samples
    assert several.scores == one.scores


@pytest.mark.rest
def test_as_adapter_and_merged_the_answers_are_the_same(models, tmp_path, small):
    suite, _ = small
    base, tokenizer = models[0], AutoTokenizer.from_pretrained(models[0])
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    adapter.save_pretrained(tmp_path / "adapter")
    live = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
    live.merge_and_unload().save_pretrained(tmp_path / "merged")
    tokenizer.save_pretrained(tmp_path / "merged")
    found, reference = (evaluate_model(tmp_path / name, suite, Options(device="cpu")) for name in ("adapter", "merged"))
    assert reference.scores != small[1].scores
    assert found.scores == reference.scores
    assert found.prompt_hashes == reference.prompt_hashes
    assert resps(found) == resps(reference)


def test_cached_responses_are_not_computed_again(small, models, tmp_path):
    suite, fresh = small
    first = evaluate_model(models[0], suite, Options(device="cpu", cache=tmp_path))
    again = evaluate_model(models[0], suite, Options(device="cpu", cache=tmp_path))
    assert first.num_requests == {"computed": 840, "cached": 0}
    assert again.num_requests == {"computed": 0, "cached": 840}
    assert again.samples == first.samples == fresh.samples


@pytest.mark.rest
def test_two_models_through_one_cache_never_share_an_answer(small, models, tmp_path):
    suite, _ = small
    first = evaluate_model(models[0], suite, Options(device="cpu", cache=tmp_path))
    second = evaluate_model(models[1], suite, Options(device="cpu", cache=tmp_path))
    assert second.num_requests["cached"] == 0
    assert resps(second) == resps(evaluate_model(models[1], suite, Options(device="cpu")))
    pairs = zip(resps(first)["zoo_mc"], resps(second)["zoo_mc"], strict=True)
    assert not any(a == b for a, b in pairs)


@pytest.mark.rest
@pytest.mark.parametrize("change", ["weights", "template", "generation", "batch size", "dtype"])
def test_all_that_changes_responses_changes_the_cache_file(change, small, models, tmp_path):
    suite, _ = small
    cache, model = tmp_path / "cache", tmp_path / "model"
    shutil.copytree(models[0], model)
    evaluate_model(model, suite, Options(device="cpu", limit=2, cache=cache))
    if change == "weights":
        shutil.copy(models[1] / "model.safetensors", model)
    elif change == "template":
        with (model / "chat_template.jinja").open("a") as stream:
            stream.write("{# another #}")
    elif change == "generation":
        (model / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    elif change == "batch size":
        suite = suite.model_copy(update={"batch_size": 7})
    else:
        suite = suite.model_copy(update={"dtype": "bfloat16"})
    assert evaluate_model(model, suite, Options(device="cpu", limit=2, cache=cache)).num_requests["cached"] == 0
    assert len(list((cache / "responses").iterdir())) == 2


@pytest.mark.process
def test_after_a_kill_no_request_is_computed_twice(models, tmp_path):
    asked = Eval(suite="quickstart", batch_size=1)
    command = [
        sys.executable, "-m", "soren_align", "eval", str(models[0]), "--suite", "quickstart", "--batch-size", "1",
    ]  # fmt: skip
    command += ["--output", str(tmp_path / "killed"), "--cache", str(tmp_path / "cache")]
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    killed = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    file: list[Path] = []
    while not file or file[0].read_bytes().count(b"\n") < 20:
        assert killed.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        file = list((tmp_path / "cache").glob("responses/*.jsonl"))
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    cached = sum(len(json.loads(line)["responses"]) for line in file[0].read_text().splitlines()[1:])
    with file[0].open("a") as stream:
        stream.write('{"chunk": "cut sho')  # as a kill in the middle of a line would
    subprocess.run(command, env=env, check=True, capture_output=True)
    evaluate([(models[0].name, models[0])], asked, tmp_path / "whole", cache=tmp_path / "other", console=SILENT)
    resumed, whole = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("killed", "whole"))
    assert 0 < cached < 840
    assert resumed["rows"][0].pop("num_requests") == {"computed": 840 - cached, "cached": cached}
    assert whole["rows"][0].pop("num_requests") == {"computed": 840, "cached": 0}
    assert resumed == whole
    for file in sorted((tmp_path / "whole").rglob("*.jsonl")):
        assert file.read_bytes() == (tmp_path / "killed" / file.relative_to(tmp_path / "whole")).read_bytes()


@pytest.mark.process
def test_a_process_that_is_killed_ends_the_evaluation_and_says_so(small, models):
    def kill(_column, done, _of):
        if done:
            for child in multiprocessing.active_children():
                child.kill()

    display = types.SimpleNamespace(on_progress=kill, on_score=lambda *_: None)
    with pytest.raises(UserError, match="was killed"):
        evaluate_model(models[0], small[0], Options(device="cpu", num_processes=2), display=display)


@pytest.mark.parametrize(("owner", "name", "error", "words"), [
    (HFLM, "_model_call", OutOfMemory, None), (workers, "load_lm", UserError, "the model itself does not fit"),
])  # fmt: skip
def test_what_does_not_fit_the_memory_is_told_from_other_errors(small, models, monkeypatch, owner, name, error, words):
    def full(*_, **__):
        raise RuntimeError("CUDA out of memory. Tried to allocate 28.00 GiB.")

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(error, match=words):
        evaluate_model(models[0], small[0], Options(device="cpu"))


def test_truncated_prompts_are_counted_and_an_error_if_strict(models, tmp_path, small):
    suite, whole = small
    model = shutil.copytree(models[0], tmp_path / "short")
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [argument for sample in whole.samples["zoo_mc"] for argument in sample["arguments"]]
    lengths = sorted(len(tokenizer(context + choice)["input_ids"]) for context, choice in asked)
    room = lengths[len(lengths) // 2]
    edit(model / "config.json", max_position_embeddings=room - 1)
    only = suite.model_copy(update={"tasks": [suite.tasks[0]]})
    found = evaluate_model(model, only, Options(device="cpu"))
    long = {c for c, choice in asked if len(tokenizer(c + choice)["input_ids"]) > room}
    assert found.truncated == {"zoo_mc": len(long)}
    assert 0 < len(long) < 120
    rows = [("base", evaluate_model(models[0], only, Options(device="cpu"))), ("SFT", found)]
    assert compare(rows, average=False) == [None, {}]
    reason = f"{len(long)} of its prompts were truncated, but 0 of the first model's, because the context lengths"
    assert unpaired(rows[0][1], found) == {"zoo_mc": f"{reason} differ"}
    assert whole.truncated == {}
    edit(model / "config.json", max_position_embeddings=6)
    generated = suite.model_copy(update={"tasks": [suite.tasks[1]]})
    message = "short: zoo_gen: an answer of 6 tokens leaves no room for a prompt in the model's context of 6"
    with pytest.raises(UserError, match=message):
        evaluate_model(model, generated, Options(device="cpu"))
    edit(model / "config.json", max_position_embeddings=room - 1)
    with pytest.raises(UserError, match="short: zoo_mc: prompts do not fit"):
        evaluate_model(model, only, Options(device="cpu", strict=True))


def test_a_repetition_penalty_in_the_models_folder_is_reported_and_not_compared_with_none(models, small, tmp_path):
    """It changes greedy answers, in lm-eval too: Qwen's instruct models have one of 1.05."""
    model = shutil.copytree(models[0], tmp_path / "model")
    said = {"repetition_penalty": 1.3, "do_sample": True, "temperature": 0.7, "eos_token_id": 2}
    (model / "generation_config.json").write_text(json.dumps(said))
    found = [evaluate_model(m, small[0], Options(device="cpu", limit=2)) for m in (models[0], model)]
    assert [answers.settings["generation_config"] for answers in found] == [{}, {"repetition_penalty": 1.3}]
    assert compare([("base", found[0]), ("SFT", found[1])], average=False) == [None, {}]
    reason = "its generation config is {'repetition_penalty': 1.3}, but the first model's is {}"
    assert unpaired(*found) == dict.fromkeys(found[0].points, reason)


def test_in_bfloat16_the_answers_are_lm_evals_too_however_long_the_prompt(readers, data_root):
    """Cast after loading, the rotary frequencies would be rounded, and the words of a long prompt turned."""
    suite = load_suite("open-llm-leaderboard-v1").model_copy(update={"data_root": str(data_root), "batch_size": 1})
    suite = suite.model_copy(update={"tasks": suite.tasks[:1], "average": False, "dtype": "bfloat16"})
    ours = evaluate_model(readers[0], suite, Options(device="cpu"))
    lm = HFLM(pretrained=str(readers[0]), dtype="bfloat16", device="cpu", batch_size=1)
    samples = ours.samples["arc_challenge"]
    theirs = lm.loglikelihood([Instance("loglikelihood", {}, a, 0) for s in samples for a in s["arguments"]])
    assert [r for s in samples for r in s["filtered_resps"]] == theirs


def test_pickled_adapters_and_code_that_comes_with_a_model_are_refused(models, small, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(models[0])}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="save its weights as safetensors"):
        evaluate_model(adapter, small[0], Options(device="cpu"))
    model = shutil.copytree(models[0], tmp_path / "model")
    for key in ("_attn_implementation", "attn_implementation", "_experts_implementation"):
        named = shutil.copytree(models[0], tmp_path / key)
        edit(named / "config.json", **{key: "owner/kernel@main"})
        with pytest.raises(UserError, match=r"config\.json names code on the hub"):
            evaluate_model(named, small[0], Options(device="cpu"))
    theirs = {"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"}
    edit(model / "config.json", auto_map=theirs, model_type="theirs")
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match=r"cannot|can be loaded"):
        evaluate_model(model, small[0], Options(device="cpu"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.rest
def test_a_damaged_cache_file_is_read_line_by_line(models, small, tmp_path):
    suite, fresh = small
    evaluate_model(models[0], suite, Options(device="cpu", cache=tmp_path))
    (file,) = (tmp_path / "responses").iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    changed = lines[-1].replace(b"-", b"-1", 1)  # a log-probability with another digit
    file.write_bytes(lines[0] + lines[0] + b"\0\0\xff\n[1]\n" + b"".join(lines[1:-1]) + changed + changed[:40])
    again = evaluate_model(models[0], suite, Options(device="cpu", cache=tmp_path))
    last = len(json.loads(lines[-1])["responses"])
    assert again.num_requests == {"computed": last, "cached": 840 - last}
    assert again.samples == fresh.samples
    file.write_bytes(b"")
    assert evaluate_model(models[0], suite, Options(device="cpu", cache=tmp_path)).num_requests["cached"] == 0
    assert evaluate_model(models[0], suite, Options(device="cpu", cache=tmp_path)).num_requests["computed"] == 0


def test_a_model_that_is_replaced_while_it_is_loaded_leaves_no_responses(models, small, tmp_path, monkeypatch):
    digests = iter(["of the files", "of others"])
    monkeypatch.setattr(requests, "model_digest", lambda folder: next(digests))
    with pytest.raises(UserError, match="has changed while it was evaluated"):
        evaluate_model(models[0], small[0], Options(device="cpu", cache=tmp_path))


class Engine:
    """vLLM's engine: a part of a cycle, with its memory until `shutdown`."""

    def __init__(self, alive):
        self.alive = alive
        alive.append(self)

    def shutdown(self):
        self.alive.remove(self)


@pytest.fixture
def vllm(monkeypatch):
    """The arguments of vLLM's last model, and the engines that run.

    vLLM needs a GPU. Here lm-eval's class of it is replaced by one that notes its arguments and answers by HFLM.
    """
    arguments, engines = {}, []

    class Fake(HFLM):
        def __init__(self, pretrained, **settings):
            assert not engines, "the GPU's memory is still that of the model before"
            arguments.update(settings, pretrained=pretrained)
            tokenizer = AutoTokenizer.from_pretrained(pretrained)
            super().__init__(AutoModelForCausalLM.from_pretrained(pretrained), tokenizer=tokenizer, batch_size=8)
            self.model.llm_engine = types.SimpleNamespace(engine_core=Engine(engines))

    monkeypatch.setitem(sys.modules, "lm_eval.models.vllm_causallms", types.SimpleNamespace(VLLM=Fake))
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0" if name == "vllm" else real(name))
    return arguments, engines


def test_vllm_gets_the_folder_and_our_settings(models, small, vllm):
    found = evaluate_model(models[0], small[0], Options(backend="vllm", device="cpu"))
    assert vllm[0] == {"pretrained": str(models[0]), "dtype": "float32", "batch_size": 8, "seed": 1234}
    assert found.settings["backend"] == "vllm"
    assert resps(found) == resps(small[1])
    with pytest.raises(UserError, match="backend = hf"):
        compare([("a", found), ("b", small[1])], average=False)


@pytest.mark.rest
def test_an_engine_of_vllm_has_ended_before_the_next_model_is_loaded(models, small, vllm):
    for model in models[:2]:
        evaluate_model(model, small[0], Options(backend="vllm", device="cpu"))
    assert vllm[0]["pretrained"] == str(models[1])
    assert vllm[1] == []
