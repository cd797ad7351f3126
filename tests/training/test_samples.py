"""Samples show a training's answers and do not change it."""

import json

import pytest
import torch
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.training.measure.samples import Prompt, SampleWriter
from tests.support.tiny_run import TinyRun, assert_trained_alike, stop_after
from tests.support.trainer_parity import logged
from tests.training.test_resume import stop_around
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.model

PROMPTS = ["What does the owl say?", "Is the owl green?", "Hello"]
EVALUATED = ("trainer.eval_strategy=steps", "trainer.eval_steps=2", "data.eval.limit=4", "trainer.max_steps=5")
EVALUATED += ("trainer.save_steps=2",)
# Dropout, so that a random number drawn by a sample would change the weights.
RANDOM = ("model.lora={r: 4, dropout: 0.3}", "optimizer.aux_lr=null")
SAMPLED = (f"run.samples.prompts={json.dumps(PROMPTS)}", "run.samples.max_new_tokens=6")


def samples(run):
    return [json.loads(line) for line in run.folder.samples.read_text().splitlines()]


def greedy(folder, prompt, num_tokens):
    """The answer computed without a cache: at each token the whole text again."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    start, reason = len(ids), "length"
    for _ in range(num_tokens):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        if ids[-1] == tokenizer.eos_token_id:
            reason = "stop"
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True), reason


@pytest.mark.rest
@pytest.mark.parametrize(
    "random_part", [pytest.param((), id="weights", marks=pytest.mark.slow), pytest.param(RANDOM, id="dropout")]
)
def test_samples_change_no_weight_and_no_loss(tiny_run, random_part):
    silent = tiny_run("sft", *EVALUATED, *random_part, name="silent")
    sampled = tiny_run("sft", *EVALUATED, *random_part, *SAMPLED, name="sampled")
    assert_trained_alike(silent, sampled)
    assert logged(silent.folder) == logged(sampled.folder)
    config = [(run.folder.model / "config.json") for run in (silent, sampled)]
    assert not config[0].exists() or config[0].read_text() == config[1].read_text()


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A run with samples; it is only read."""
    run = TinyRun(tmp_path_factory.mktemp("sampled") / "run", "sft", *EVALUATED, *SAMPLED)
    assert run.train()
    return run


def test_the_answers_are_those_of_greedy_decoding_without_a_cache(sampled):
    by_step = {0: sampled.folder.start, 5: sampled.folder.model}
    for record in samples(sampled):
        if folder := by_step.get(record["step"]):
            expected = greedy(folder, record["prompt"], 6)
            assert (record["completion"], record["finish_reason"]) == expected


def test_an_answer_that_ends_by_itself_is_marked(tiny_run):
    """The quickstart's 300 steps learn to stop; here the stop token is a frequent one."""
    run = tiny_run("sft", *SAMPLED, "trainer.max_steps=1", "trainer.save_strategy=no")
    trainer = run.trainer()
    tokenizer = trainer.processing_class
    ids = tokenizer("owl")["input_ids"]
    with torch.no_grad():
        following = int(trainer.model(torch.tensor([ids])).logits[0, -1].argmax())
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(following)
    writer = SampleWriter((Prompt("owl", ids, 6),), tokenizer, run.folder.samples, run.console)
    writer.sample(trainer.model, 3)
    assert samples(run) == [{"step": 3, "prompt": "owl", "completion": "", "finish_reason": "stop"}]


@pytest.mark.rest
def test_a_resumed_run_repeats_no_sample(tiny_run, sampled):
    stop_after(lambda: tiny_run("sft", *EVALUATED, *SAMPLED), 4)
    run = tiny_run("sft", *EVALUATED, *SAMPLED)
    assert run.train()
    assert samples(run) == samples(sampled)


@pytest.mark.rest
@pytest.mark.parametrize("best", [(), pytest.param(("trainer.load_best_model_at_end=true",), marks=pytest.mark.slow)])
def test_a_run_killed_at_its_end_repeats_no_sample(tiny_run, best):
    ends_with_evaluation = ("sft", *EVALUATED, *SAMPLED, "trainer.max_steps=4", *best)
    stop_around("_save_model", "before", tiny_run(*ends_with_evaluation))
    before, run = samples(tiny_run(*ends_with_evaluation)), tiny_run(*ends_with_evaluation)
    assert run.train()
    assert run.folder.read()["resumed_from_steps"] == [4]
    assert samples(run) == before
    assert [record["step"] for record in before if "at" in record] == [4] * len(PROMPTS) * bool(best)


def test_prompts_are_read_from_a_file(tiny_run, tmp_path):
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("One\n\n  Two \n")
    turns = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "1"}]
    turns += [{"role": "user", "content": "Two"}]
    lines.write_text(f'{{"prompt": "One"}}\n{json.dumps({"prompt": turns})}\n')
    for file, contents in ((text, ["One", "Two"]), (lines, ["One", turns])):
        setup = tiny_run("sft", f"run.samples.prompts={file}", name=file.suffix[1:]).prepare()
        assert [prompt.content for prompt in setup.prompts] == contents
        assert [prompt.text for prompt in setup.prompts] == ["One", "Two"]
        assert [len(prompt.ids) + prompt.max_new_tokens for prompt in setup.prompts] == [64, 64]  # the positions


@pytest.mark.parametrize(("name", "text", "message"), [
    ("a.jsonl", '{"prompts": "One"}\n', r'a.jsonl:1 has no prompt; write {"prompt": ...}'),
    ("a.jsonl", "One\n", r"a.jsonl:1:1 cannot be read as JSON"),
    ("a.txt", "\n", "0 prompts; write 1 to 100"),
    ("a.txt", "One\n" * 101, "101 prompts; write 1 to 100"),
    ("a.txt", "owl " * 300, "prompt 1 has .* tokens, but the model has only 64 positions"),
])  # fmt: skip
def test_prompts_that_cannot_be_answered_are_refused_before_training(tiny_run, tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        tiny_run("sft", f"run.samples.prompts={tmp_path / name}").prepare()


@pytest.mark.parametrize(("overrides", "message"), [
    (["run.samples.prompts=[1]"], r"prompts: found \[1\]; write a list of texts, or a .txt or .jsonl file"),
    (["run.samples.prompts=nowhere.txt"], "prompts: there is no file 'nowhere.txt'"),
    (["run.samples.prompts=owl.md"], r"prompts: found 'owl.md'; write a list of texts, or a file \(.txt or .jsonl"),
    (["run.samples.prompts=[Hi]", "run.parallel=zero3"], "run.samples: run.parallel zero3 shards the weights"),
])  # fmt: skip
def test_samples_that_no_process_could_make_are_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        recipe.load("quickstart/sft", [f"run.output_dir={tmp_path / 'run'}", *overrides])
