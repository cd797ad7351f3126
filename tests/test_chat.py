"""A conversation: the model's own template, greedy answers as `generate` gives them, and a history that fits."""

import io
import shutil
import sys
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from soren_align.core.errors import UserError, printable
from soren_align.core.text import Terminal
from soren_align.launch.chat import ChatModel, Conversation, _answer, answer_side_by_side, without_blank_lines
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
    return Conversation(ChatModel("SFT", folder), system, max_new_tokens, 0.0)


def test_an_answer_is_the_greedy_one_after_the_models_own_template_and_is_streamed(reader):
    talk, words = conversation(reader, system="Be brief."), []
    answer = talk.ask("hi there", words.append, pytest.fail)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    assert answer == greedy(reader, text, 8) != ""
    assert "".join(words) == answer
    assert len(words) > 1
    again = talk.ask("and you", words.append, pytest.fail)
    text += f"{answer}<|im_end|>\n<|im_start|>user\nand you<|im_end|>\n<|im_start|>assistant\n"
    assert again == greedy(reader, text, 8)


def test_a_base_without_template_completes_plain_text_without_history(reader, tmp_path):
    plain = shutil.copytree(reader, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    talk = conversation(plain)
    assert not talk.model.has_template
    for question in ("once upon", "a time"):
        assert talk.ask(question, lambda word: None, pytest.fail) == greedy(plain, question, 8, special=True)


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
    answer = conversation(tmp_path / "adapter").ask("hi", lambda word: None, pytest.fail)
    assert answer == greedy(merged, text, 8) != greedy(reader, text, 8)


def test_the_oldest_turns_are_dropped_with_a_notice_when_the_context_is_full(reader, monkeypatch):
    talk, notices, prompts = conversation(reader, max_new_tokens=4, system="Be brief."), [], []
    generate = ChatModel.generate

    def recorded(self, prompt, *settings):
        prompts.append(self.tokenizer.decode(prompt[0]))
        assert prompt.shape[1] + 4 <= 96
        generate(self, prompt, *settings)

    monkeypatch.setattr(ChatModel, "generate", recorded)
    for number in range(6):
        talk.ask(f"question {number}", lambda word: None, notices.append)
    assert all("Be brief." in prompt for prompt in prompts)
    assert "question 4" in prompts[5]
    assert "question 0" not in prompts[5]
    assert notices[0].startswith("SFT: the context of 96 tokens is full, so the oldest 1 of ")
    message = r"SFT: the question has \d+ tokens in the chat template, which leaves no room for an answer"
    with pytest.raises(UserError, match=message):
        talk.ask("word " * 200, lambda word: None, notices.append)
    assert talk.turns[-2]["content"] == "question 5"


def test_prompts_are_answered_on_standard_output_each_in_its_own_conversation(run, reader):
    prompts = ("--prompt", "hi", "--prompt", "hi", "--max-new-tokens", 8)
    done = command.run("chat", run, "--compare", "start", *prompts, code=0)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    one = printable(f"> hi\n\nSFT:\n{greedy(run / 'model', text, 8)}\n\nbase:\n{greedy(reader, text, 8)}\n")
    assert done.stdout == f"{one}\n{one}"
    assert f"model SFT: {run}/model, float32, context of 96 tokens, its chat template" in " ".join(done.stderr.split())
    alone = command.run("chat", run / "model", "--prompt", "hi", "--max-new-tokens", 8, "--dtype", "float32")
    assert alone.stdout == printable(greedy(run / "model", text, 8)) + "\n"


@pytest.mark.parametrize(("texts", "shown"), [
    (["one\n", "\n\n" * 200, "\ntwo\n", "three"], "one\n\n\ntwo\nthree"),
    (["def a():\n    pass\n", "\n\ndef b"], "def a():\n    pass\n\n\ndef b"),
    (["\n", " \n\n", "  one ", "two\n", "\n \n"], "  one two"), (["\n"] * 500, ""),
])  # fmt: skip
def test_blank_lines_around_an_answer_and_more_than_two_inside_are_left_out(texts, shown):
    written = []
    write = without_blank_lines(written.append)
    for text in texts:
        write(text)
    assert "".join(written) == shown


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_answer_of_empty_lines_alone_is_shown_as_empty(run, monkeypatch, is_terminal):
    def blank(self, prompt, stream, *settings):
        stream.put(prompt)
        for _ in range(100):
            stream.on_finalized_text("\n\n\n\n\n")
        stream.end()

    monkeypatch.setattr(ChatModel, "generate", blank)
    done = command.run("chat", run, "--prompt", "hi", is_terminal=is_terminal)
    assert done.stdout == "\n"
    assert "(empty answer)\n" in done.stderr


def test_two_answers_stand_side_by_side_on_a_wide_terminal(run, reader, monkeypatch):
    talks = [conversation(run / "model"), conversation(reader)]
    talks[1].model.name = "base"
    shown = io.StringIO()
    terminal = Terminal(file=shown, width=100, color_system=None)
    answer_side_by_side(talks, "hi", terminal)
    (names, *lines) = shown.getvalue().splitlines()
    assert names.split() == ["SFT", "base"]
    column = names.index("base")
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for part, folder in ((slice(column), run / "model"), (slice(column, None), reader)):
        found = "".join(line[part].strip() for line in lines)
        assert "".join(found.split()) == "".join(printable(greedy(folder, text, 8)).split())
    stdout = io.StringIO()
    stdout.isatty = lambda: True
    calls = []
    monkeypatch.setattr("soren_align.launch.chat.answer_side_by_side", lambda *a: calls.append(a))
    for width, num_calls in (("99", 0), ("100", 1)):
        calls.clear()
        monkeypatch.setenv("COLUMNS", width)
        monkeypatch.setattr(sys, "stdout", stdout)
        _answer(talks, "hi", terminal)
        assert len(calls) == num_calls


def test_an_empty_answer_is_shown_as_such(run, monkeypatch):
    def silent(self, prompt, stream, *settings):
        stream.put(prompt)
        stream.end()

    monkeypatch.setattr(ChatModel, "generate", silent)
    done = command.run("chat", run, "--prompt", "hi")
    assert done.stdout == "\n"
    assert done.stderr.endswith("(empty answer)\n")
    talks, shown = [conversation(run / "model")] * 2, io.StringIO()
    answer_side_by_side(talks, "hi", Terminal(file=shown, width=100))
    assert shown.getvalue().split("\n")[1].split("  ")[0] == "(empty answer)"


def test_a_pipe_is_one_question(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    piped = command.run("chat", run, "--max-new-tokens", 8)
    assert piped.stdout == command.run("chat", run, "--prompt", "hi", "--max-new-tokens", 8).stdout
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    empty = command.run("chat", run, code=2).stderr
    assert empty.endswith(": the question is empty; write --prompt TEXT, or pipe a text into the command\n")


@pytest.fixture
def terminal(monkeypatch):
    """terminal(*keys): a user types these lines; the exceptions are Ctrl-C and Ctrl-D."""

    def typing(*keys):
        typed = mock.Mock(side_effect=keys)
        monkeypatch.setattr(sys, "stdin", mock.Mock(isatty=lambda: True))
        monkeypatch.setattr("builtins.input", typed)
        return typed

    return typing


@pytest.mark.parametrize("key", [EOFError, KeyboardInterrupt])
def test_on_a_terminal_ctrl_c_stops_an_answer_and_both_keys_leave(run, terminal, monkeypatch, key):
    typed, generate = terminal("stopped", "", "hi", key), ChatModel.generate

    def interrupted(self, prompt, stream, *settings):
        if typed.call_count == 1:
            stream.put(prompt)
            stream.put(torch.tensor(self.tokenizer("\x1b[31mred wo").input_ids))
            raise KeyboardInterrupt
        generate(self, prompt, stream, *settings)

    monkeypatch.setattr(ChatModel, "generate", interrupted)
    done = command.run("chat", run, "--max-new-tokens", 8)
    turns = "<|im_start|>user\nstopped<|im_end|>\n<|im_start|>assistant\n\x1b[31mred wo<|im_end|>\n"
    turns += "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    answer = printable(greedy(run / "model", turns, 8))
    assert (done.returncode, done.stdout) == (0, f"\\x1b[31mred\n{answer}\n\n")
    assert "Traceback" not in done.stderr


def test_slash_new_forgets_the_earlier_questions(run, terminal):
    terminal("first", "/new", "hi", EOFError)
    done = command.run("chat", run, "--max-new-tokens", 8)
    answers = [
        printable(greedy(run / "model", f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", 8))
        for text in ("first", "hi")
    ]
    assert done.stdout == "".join(f"{answer}\n" for answer in answers) + "\n"


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
