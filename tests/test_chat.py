"""A conversation: the model's own template, greedy answers as `generate` gives them, and a history that fits."""

import io
import shutil
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from soren_align.core.errors import UserError, printable
from soren_align.launch.chat import Conversation, _Printer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import command
from tests.support.edited_files import edit
from tests.support.run_folders import record_run
from tests.support.tiny_models import make_reader, nudge

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A random model that reads any text, with ChatML and a context of 96 tokens."""
    folder = make_reader(tmp_path_factory.mktemp("reader") / "model", chat_template=True)
    edit(folder / "config.json", max_position_embeddings=96)
    return folder


@pytest.fixture(scope="module")
def run(reader, tmp_path_factory):
    """A run that started from it."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    folder.mkdir()
    nudge(reader, folder / "model", scale=1.0)
    record_run(folder, reader)
    return folder


def greedy(folder, text, num_tokens, special=False):
    """The continuation by the highest logit, a whole forward pass for each token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text, add_special_tokens=special).input_ids
    start = len(tokens)
    while len(tokens) < start + num_tokens:
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(tokens[start:], skip_special_tokens=True)


def conversation(folder, max_new_tokens=8, system=None):
    return Conversation("SFT", folder, system=system, max_new_tokens=max_new_tokens)


def test_an_answer_is_the_greedy_one_after_the_models_own_template_and_is_streamed(reader, capsys):
    talk = conversation(reader, system="Be brief.")
    answer = talk.ask("hi there")
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    assert answer == greedy(reader, text, 8) != ""
    assert capsys.readouterr().out == printable(answer) + "\n"
    text += f"{answer}<|im_end|>\n<|im_start|>user\nand you<|im_end|>\n<|im_start|>assistant\n"
    assert talk.ask("and you") == greedy(reader, text, 8)


def test_a_base_without_template_completes_plain_text_without_history(reader, tmp_path):
    plain = shutil.copytree(reader, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    talk = conversation(plain)
    for question in ("once upon", "a time"):
        assert talk.ask(question) == greedy(plain, question, 8, special=True)


def test_an_adapter_answers_on_its_base_as_the_merged_model_would(reader, tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(reader),
                           LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))  # fmt: skip
    model.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(reader).save_pretrained(tmp_path / "adapter")
    merged = tmp_path / "merged"
    model.merge_and_unload().save_pretrained(merged)
    AutoTokenizer.from_pretrained(reader).save_pretrained(merged)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    answer = conversation(tmp_path / "adapter").ask("hi")
    assert answer == greedy(merged, text, 8) != greedy(reader, text, 8)


def test_the_oldest_turns_are_dropped_with_a_notice_when_the_context_is_full(reader, capsys):
    talk = conversation(reader, max_new_tokens=4, system="Be brief.")
    for number in range(6):
        talk.ask(f"question {number}")
    assert [turn["content"] for turn in talk.turns][-2] == "question 5"
    assert "question 0" not in [turn["content"] for turn in talk.turns]
    notice = "notice SFT: the context is full; the oldest question was dropped"
    assert notice in " ".join(capsys.readouterr().err.split())
    message = r"SFT: the question has \d+ tokens in the chat template, but the model's context is 96; shorten"
    with pytest.raises(UserError, match=message):
        talk.ask("word " * 200)
    assert talk.turns[-2]["content"] == "question 5"


def test_prompts_are_answered_on_standard_output_each_in_its_own_conversation(run, reader):
    prompts = ("--prompt", "hi", "--prompt", "hi", "--max-new-tokens", 8)
    done = command.run("chat", run, "--compare", "start", *prompts, code=0)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    one = printable(f"> hi\n\nSFT:\n{greedy(run / 'model', text, 8)}\n\nbase:\n{greedy(reader, text, 8)}\n")
    assert done.stdout == f"{one}\n{one}"
    assert f"model SFT: {run}/model, float32" in " ".join(done.stderr.split())
    alone = command.run("chat", run / "model", "--prompt", "hi", "--max-new-tokens", 8, "--dtype", "float32")
    assert alone.stdout == printable(greedy(run / "model", text, 8)) + "\n"


def test_blank_lines_are_one_and_code_keeps_its_indentation(capsys):
    printer = _Printer(None)
    for part in ("\n \n", "\n", "def f():\n", "\n\n\n    x = 1\n\n", "\n    return x", "\n" * 50):
        printer.on_finalized_text(part)
    printer.on_finalized_text("", stream_end=True)
    assert capsys.readouterr().out == "def f():\n\n    x = 1\n\n    return x\n"


def test_a_pipe_is_one_question(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    piped = command.run("chat", run, "--max-new-tokens", 8)
    assert piped.stdout == command.run("chat", run, "--prompt", "hi", "--max-new-tokens", 8).stdout
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    empty = command.run("chat", run, code=2).stderr
    assert empty.endswith(": the question is empty; write --prompt TEXT, or pipe a text into the command\n")


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere/model", "--prompt", "hi"], "nowhere/model: is no folder, and cannot be downloaded"),
    (["./nowhere", "--prompt", "hi"], "contains no run.json (a run), no config.json"),
    (["MODEL", "--compare", "start", "--prompt", "hi"], "--compare start: the checkpoint that "),
    (["MODEL", "--dtype", "int8", "--prompt", "hi"], "--dtype: found 'int8'; write float32, bfloat16, float16"),
    (["MODEL", "--prompt", ""], "the question is empty"),
    (["./odd", "--prompt", "hi"], "odd: the model cannot be loaded: "),
])  # fmt: skip
def test_a_mistake_is_one_sentence(reader, arguments, message, tmp_path, monkeypatch):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "of the future"}')
    monkeypatch.chdir(tmp_path)
    done = command.run("chat", *(reader if each == "MODEL" else each for each in arguments), code=2)
    assert message in done.stderr
