"""The shipped templates render what the originals render, and mark the assistant's words and stop token.

tests/data/originals has Qwen2.5's base models' template as published in their tokenizer_config.json (TRL 1.16 ships the
Instruct models', which differs in the system sentence), and Zephyr's as it stands in the alignment handbook's
recipes/zephyr-7b-beta/sft/config_full.yaml.
"""

from itertools import groupby, product
from operator import itemgetter
from pathlib import Path

import pytest
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.data import set_template
from tests.support import published_tokenizers as tokenizers_like

ORIGINALS = Path(__file__).parent / "originals"
MAKE = {"qwen2.5": tokenizers_like.qwen, "zephyr": tokenizers_like.mistral}
STOP = {"qwen2.5": "<|im_end|>", "zephyr": "</s>"}
U, U2 = ({"role": "user", "content": text} for text in ("What does the otter eat?  ", " And the häron 🦓?\n"))
A, A2 = ({"role": "assistant", "content": text} for text in ("Fish.\n\nAnd grass. ", "ü 12 <b>{{ it }}</b>"))
S = {"role": "system", "content": "You keep a zoo."}
CALL = {"type": "function", "function": {"name": "feed", "arguments": {"animal": "otter"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL["function"]]}
RESULT = {"role": "tool", "content": "fed"}
CHATS = [[U, A], [S, U, A], [U, A, U2, A2], [S, U, A, U2, A2], [U], [S, U], [U, A, U2]]
WITH_TOOLS = [[U, CALLS, RESULT, RESULT, A], [S, U, {**CALLS, "content": "Now."}, RESULT, A, U2, A2], [U, CALLS]]
TOOLS = [{"type": "function", "function": {"name": "feed", "description": "Feed an animal", "parameters": {}}}]


def original(name):
    return MAKE[name]((ORIGINALS / f"{name}.jinja").read_text(encoding="utf-8"))


def ours(name):
    tokenizer = MAKE[name]()
    set_template(tokenizer, name, STOP[name])
    return tokenizer


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_renders_are_the_originals_byte_for_byte(name, add_generation_prompt):
    theirs, mine = original(name), ours(name)
    chats = [*CHATS, *(WITH_TOOLS if name == "qwen2.5" else [])]
    for chat, tools in product(chats, [None, TOOLS] if name == "qwen2.5" else [None]):
        how = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "tools": tools}
        assert mine.apply_chat_template(chat, **how) == theirs.apply_chat_template(chat, **how)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("chat", [chat for chat in CHATS if chat[-1]["role"] == "assistant"])
def test_exactly_what_the_assistant_says_and_its_stop_token_are_trained(name, chat):
    tokenizer = ours(name)
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    tokens = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    spans = [[token for token, _ in run] for trained, run in groupby(tokens, key=itemgetter(1)) if trained]
    said = [turn["content"] + STOP[name] for turn in chat if turn["role"] == "assistant"]
    assert [tokenizer.decode(span) for span in spans] == said
    assert all(span[-1] == tokenizer.eos_token_id for span in spans)


def test_a_stop_token_is_one_token_of_the_vocabulary():
    message = r"model.eos_token: '<\|im_ends\|>' is not a single token .*mean '<\|im_end\|>'"
    with pytest.raises(UserError, match=message):
        set_template(tokenizers_like.qwen(), "qwen2.5", "<|im_ends|>")
    message = r"'the end' is not a single token of the tokenizer; remove this key to stop at '</s>'"
    with pytest.raises(UserError, match=message):
        set_template(tokenizers_like.mistral(), None, "the end")


def test_a_template_of_ones_own_is_a_file(tmp_path):
    file = tmp_path / "my.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = tokenizers_like.qwen()
    set_template(tokenizer, str(file), None)
    assert tokenizer.apply_chat_template([U], tokenize=False) == U["content"]
    assert tokenizer.eos_token == "<|endoftext|>"


RECIPE = """\
task: {task}
model: {{name_or_path: org/model, {model}}}
data: {{train: {{path: org/data}}}}
optimizer: {{name: adamw, lr: 1e-6}}
trainer: {{max_steps: 1, {trainer}}}
run: {{output_dir: runs/x}}
"""


@pytest.mark.parametrize(("model", "trainer", "message"), [
    ("chat_template: qwen2", "", r"my.yaml:2 model.chat_template: found 'qwen2'; write .*mean 'qwen2.5'"),
    ("chat_template: no.jinja", "", "my.yaml:2 model.chat_template: no file no.jinja"),
    ("chat_template: my.yaml", "", "model.chat_template: found 'my.yaml'; write qwen2.5, zephyr, or the path"),
    ("eos_token: ''", "", "model.eos_token: found ''; write a text that is not empty"),
    ("", "chat_template_path: x.jinja", "trainer.chat_template_path: .*; write model.chat_template"),
    ("", "eos_token: x", "trainer.eos_token: a recipe sets this elsewhere; write model.eos_token"),
    ("", "chat_template: x", "trainer.chat_template: .*write model.chat_template"),
])  # fmt: skip
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_template_that_a_recipe_cannot_name_is_told(tmp_path, monkeypatch, task, model, trainer, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(RECIPE.format(task=task, model=model, trainer=trainer))
    with pytest.raises(UserError, match=message):
        recipe.load("my.yaml")
