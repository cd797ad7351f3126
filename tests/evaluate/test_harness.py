"""One model and one suite: the numbers are lm-eval's own, and a broken thing is said to be broken."""

import shutil
import socket

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.evaluate.run.backends import BackendSettings, ContextTooShort, load_lm, run_requests
from soren_align.evaluate.run.harness import Options, evaluate_model
from soren_align.evaluate.stats.scores import points_of
from soren_align.evaluate.suite.suites import load_suite
from soren_align.evaluate.suite.tasks import load_tasks
from tests.support.edited_files import edit
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.model

COLUMNS = {"zoo_mc": ("zoo_mc", "acc"), "zoo_gen": ("zoo_gen", "exact_match"), "preference": ("zoo_preference", "acc")}


@pytest.fixture(scope="module")
def suite():
    return load_suite("quickstart")


@pytest.fixture(scope="module")
def answers(models, suite):
    return [evaluate_model(model, suite, Options(device="cpu")) for model in models]


@pytest.fixture(scope="module")
def plain(models, tmp_path_factory):
    """lm-eval without us: the shipped YAML as text, with absolute data paths, in a folder of its own."""
    folder = tmp_path_factory.mktemp("plain")
    data = shipped.ROOT / "recipes/quickstart/data"
    for file in (shipped.ROOT / "eval/quickstart/tasks").glob("*.yaml"):
        (folder / file.name).write_text(file.read_text().replace("dataset_path: ", f"dataset_path: {data}/"))
    found = []
    for model in models:
        lm = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
                  tokenizer=AutoTokenizer.from_pretrained(model), batch_size=60)  # fmt: skip
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        tasks = [task for task, _ in COLUMNS.values()]
        found.append(simple_evaluate(lm, tasks=tasks, task_manager=manager, apply_chat_template=True))
    return found


@pytest.mark.parametrize("column", COLUMNS)
def test_scores_equal_those_of_plain_lm_eval(column, answers, plain):
    task, metric = COLUMNS[column]
    for ours, theirs in zip(answers, plain, strict=True):
        assert ours.scores[column]["value"] == pytest.approx(100 * theirs["results"][task][f"{metric},none"])
        assert ours.scores[column]["stderr"] == pytest.approx(100 * theirs["results"][task][f"{metric}_stderr,none"])
        assert ours.scores[column]["n"] == len(theirs["samples"][task]) == 120


@pytest.mark.parametrize("column", COLUMNS)
def test_every_answer_and_log_likelihood_equals_plain_lm_evals(column, answers, plain):
    for ours, theirs in zip(answers, plain, strict=True):
        theirs = theirs["samples"][COLUMNS[column][0]]
        assert [s["filtered_resps"] for s in ours.samples[column]] == [s["filtered_resps"] for s in theirs]
        assert [s["prompt_hash"] for s in ours.samples[column]] == [s["prompt_hash"] for s in theirs]


def test_the_batch_size_changes_no_score_in_float32(answers, models, suite):
    small = evaluate_model(models[0], suite.model_copy(update={"batch_size": 7}), Options(device="cpu"))
    assert small.settings["batch_size"] == 7
    assert small.scores == answers[0].scores


def test_nothing_is_printed_and_nothing_asks_the_network(models, suite, monkeypatch, capfd):
    def refuse(*args, **kwargs):
        raise AssertionError(f"network: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_tasks(suite)
    evaluate_model(models[0], suite, Options(device="cpu"))
    assert capfd.readouterr() == ("", "")


def test_a_model_of_nans_does_not_win(models, suite, tmp_path):
    """argmax of four NaNs is the first choice, which in zoo_preference is the right one."""
    model = AutoModelForCausalLM.from_pretrained(models[0])
    model.get_input_embeddings().weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(models[0]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="log-likelihoods of zoo_mc are not numbers"):
        evaluate_model(tmp_path, suite, Options(device="cpu"))


def test_missing_weights_are_an_error_and_not_drawn_at_random(models, suite, tmp_path):
    model = shutil.copytree(models[0], tmp_path / "deeper")
    edit(model / "config.json", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"weights are missing: model\.layers\.2"):
        evaluate_model(model, suite, Options(device="cpu"))


@pytest.mark.parametrize(("damage", "finding"), [
    ("gone", "contains no config.json \\(a model\\) and no adapter_config.json"),
    ("no weights", "the model cannot be loaded"),
    ("cut", "the model cannot be loaded"),
    ("beams", "generation_config.json: num_beams is 100000, but may be 64 at most; correct"),
])  # fmt: skip
def test_what_is_no_model_is_an_error(models, suite, tmp_path, damage, finding):
    model = tmp_path / "model"
    if damage != "gone":
        shutil.copytree(models[0], model)
        weights = model / "model.safetensors"
        if damage == "beams":
            (model / "generation_config.json").write_text('{"num_beams": 100000}')
        else:
            weights.unlink() if damage == "no weights" else weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=finding):
        evaluate_model(model, suite, Options(device="cpu"))


def test_an_answer_longer_than_the_context_is_one_sentence(models, tmp_path):
    """As PIQA's in a context of 512, where lm-eval asserts."""
    model = shutil.copytree(models[0], tmp_path / "short")
    edit(model / "config.json", max_position_embeddings=4)
    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = load_lm(model, tokenizer, BackendSettings("hf", "float32", "cpu", 8))
    word = tokenizer.decode(next(i for i in range(tokenizer.vocab_size) if tokenizer.decode(i).isalpha()))
    with pytest.raises(ContextTooShort, match=r"an answer choice of 9 tokens does not fit the model's context of 4"):
        run_requests(lm, "loglikelihood", [(word, f" {word}" * 9)])
    with pytest.raises(ContextTooShort, match="an answer choice has no tokens"):
        run_requests(lm, "loglikelihood", [(word, "")])


def test_a_score_that_is_no_number_is_broken_weights():
    """mc2 is exp(ll) over a sum of them: 0/0 where all are below -745, and its log-likelihoods are finite."""
    found = {"samples": {"mc2": [{"filter": "none", "filtered_resps": [(-800.0, False)], "acc": float("nan")}] * 3},
             "results": {"mc2": {"acc,none": float("nan")}}}  # fmt: skip
    with pytest.raises(UserError, match=r"3 of 3 scores \(acc\) of mc2 are not numbers; check the model.s weights"):
        points_of(found, "mc2", "acc,none", "model")
