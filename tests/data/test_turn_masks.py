"""The trained tokens of conversations without {% generation %}, and with weights, against texts written by hand."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
from datasets import Dataset
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.data import dataset_stats
from soren_align.data.encode import encode
from soren_align.training import model as starting_model
from soren_align.training.notices import template_remedy
from tests.support.conversations import CHATML, chat

PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TRLS = Path(trl.__file__).parent / "chat_templates"


def reference(tokenizer, segments):
    """(ids, trained) of texts that are trained or not: by each token's characters, from the first to the last."""
    text = "".join(part for part, _ in segments)
    characters = [is_trained for part, is_trained in segments for _ in part]
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return tokens["input_ids"], [any(characters[start:end]) for start, end in tokens["offset_mapping"]]


def chatml(turns, assistant_only):
    """The segments of a conversation: by hand, without a template."""
    segments = []
    for turn in turns:
        weight, is_answer = turn.get("weight", 1), turn["role"] == "assistant"
        header, text = f"<|im_start|>{turn['role']}\n", f"{turn['content']}<|im_end|>"
        others = bool(weight) and not assistant_only
        segments += [(header, others), (text, bool(weight) and (is_answer or others)), ("\n", others)]
    return segments


def encoded(tokenizer, turns, assistant_only, **columns):
    (example,) = encode({"messages": [turns], **columns}, "sft", tokenizer, assistant_only)
    return example.sides[0]


def weighted(turns, *weights):
    return [turn if weight is None else {**turn, "weight": weight} for turn, weight in zip(turns, weights, strict=True)]


MANY = chat(1, turns=3, system=True)
CHATS = {
    "one answer": chat(2), "three answers": MANY, "the last alone": weighted(MANY, None, None, 0, None, 0, None, 1),
    "not the last": weighted(MANY, None, None, None, None, 1, None, 0),
    "not the second, nor two users": weighted(MANY, None, 0, None, 0, 0, None, None),
    "not the system": weighted(MANY, 0, *[None] * 6),
}  # fmt: skip


@pytest.mark.parametrize("template", [PLAIN, CHATML], ids=["without marks", "with marks"])
@pytest.mark.parametrize("assistant_only", [True, False])
@pytest.mark.parametrize("name", CHATS)
def test_exactly_the_tokens_of_the_trained_turns_are_trained(make_tokenizer, name, assistant_only, template):
    tokenizer = make_tokenizer(template)
    segments = chatml(CHATS[name], assistant_only)
    ours = encoded(tokenizer, CHATS[name], assistant_only)
    assert (ours.ids, ours.trained) == reference(tokenizer, segments)
    assert 0 < sum(ours.trained) <= len(ours.ids) - 3 * assistant_only


@pytest.mark.parametrize("name", sorted(shipped.templates()))
def test_the_shipped_templates_train_the_same_tokens_without_their_marks(make_tokenizer, name):
    template = shipped.templates()[name].read_text()
    bare = re.sub(r"(\{%-?) (end)?generation (-?%\})", r"\1 if true \3\1 endif \3", template)
    assert "generation %}" not in bare
    for turns in (chat(1), MANY):
        marked = encoded(make_tokenizer(template, eos="<|im_end|>"), turns, True)
        derived = encoded(make_tokenizer(bare, eos="<|im_end|>"), turns, True)
        assert marked.ids == derived.ids
        assert marked.trained == derived.trained


ANSWER = "Ho ho"
TWO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And?"},
       {"role": "assistant", "content": "Fine."}]  # fmt: skip
THINKS = "</think>"
PUBLISHED = {
    "smollm2": f"{ANSWER}<|im_end|>Fine.<|im_end|>",
    "qwen2_5": f"{ANSWER}<|im_end|>Fine.<|im_end|>",
    "qwen3_instruct_2507": f"{ANSWER}<|im_end|>Fine.<|im_end|>",
    "llama3_1": f"{ANSWER}<|eot_id|>Fine.<|eot_id|>",
    "gemma": f"{ANSWER}<end_of_turn>\nFine.<end_of_turn>\n",
    "cohere": f"{ANSWER}<|END_OF_TURN_TOKEN|>Fine.<|END_OF_TURN_TOKEN|>",
    "nemotron_3_nano": f"{THINKS}{ANSWER}<|im_end|>{THINKS}Fine.<|im_end|>",  # whose prompt opens <think>
    "qwen3": None,  # leaves out the think block of the first answer once the second follows
    "phi3": None,  # ends every conversation with eos
    "gptoss": None,  # the last answer has another stop token
}


SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2-Instruct's own, which TRL does not ship."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_of_published_templates_the_answers_are_trained_or_the_template_is_refused(make_tokenizer, name):
    tokenizer = make_tokenizer(SMOLLM2 if name == "smollm2" else (TRLS / f"{name}.jinja").read_text())
    if PUBLISHED[name] is None:
        message = r"renders earlier turns differently when later turns are added, .*'Fine.' cannot"
        with pytest.raises(UserError, match=message):
            encoded(tokenizer, TWO, True)
        return
    ids, trained = encoded(tokenizer, TWO, True)
    assert tokenizer.decode([i for i, is_trained in zip(ids, trained, strict=True) if is_trained]) == PUBLISHED[name]


@pytest.mark.parametrize("assistant_only", [True, False])
@pytest.mark.parametrize("max_length", [None, 40, 90])
def test_weights_are_counted_after_truncation(make_tokenizer, max_length, assistant_only):
    tokenizer, chats = make_tokenizer(PLAIN), list(CHATS.values())
    counted = dataset_stats(Dataset.from_list([{"messages": turns} for turns in chats]), "sft", tokenizer,
                            max_length=max_length, assistant_only_loss=assistant_only)  # fmt: skip
    expected = [reference(tokenizer, chatml(turns, assistant_only))[1][:max_length] for turns in chats]
    kept = [trained for trained in expected if any(trained)]
    assert (counted.num_kept, counted.num_tokens) == (len(kept), sum(map(len, kept)))
    assert counted.num_trained_tokens == sum(map(sum, kept))
    assert (len(kept) < len(chats)) == bool(max_length and assistant_only)


def test_of_a_completion_with_weights_the_rest_is_trained(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    turns = weighted(MANY, None, None, None, None, 0, None, None)
    (example,) = encode({"prompt": [turns[:2]], "completion": [turns[2:]]}, "sft", tokenizer, True)
    assert example.sides[0] == encoded(tokenizer, turns, True)
    (example,) = encode({"prompt": [turns[:3]], "completion": [turns[3:]]}, "sft", tokenizer, True)
    first = sum(reference(tokenizer, chatml(turns[:3], True))[1])
    assert sum(example.sides[0].trained) == sum(encoded(tokenizer, turns, True).trained) - first


def loaded(monkeypatch, tokenizer):
    """The tokenizer as training loads it."""
    monkeypatch.setattr(starting_model.weights, "load_tokenizer", lambda *_, **__: tokenizer)
    model = SimpleNamespace(name_or_path="lab/chat", revision=None, chat_template=None, eos_token=None, tokenizer=None)
    recipe = SimpleNamespace(model=model, trainer={"assistant_only_loss": True})
    return starting_model.load_tokenizer(recipe, "lab/chat")


@pytest.mark.parametrize(("name", "replaced"), [
    ("qwen2_5", False), ("llama3_1", False), ("qwen3", True),
    ("deepseek_r1_distill", True),  # leaves out reasoning
    ("glm4moe", True),  # ends answers by the next header
])  # fmt: skip
def test_only_a_template_whose_answers_cannot_be_derived_whole_is_replaced(make_tokenizer, monkeypatch, name, replaced):
    own = (TRLS / f"{name}.jinja").read_text()
    remedy = template_remedy(make_tokenizer(own))
    assert remedy.endswith(f"{name}_training.jinja" if name != "llama3_1" else "a stop token after it")
    tokenizer = loaded(monkeypatch, make_tokenizer(own))
    expected = (TRLS / f"{name}_training.jinja").read_text() if replaced else own
    assert tokenizer.chat_template == expected
    ids, trained = encoded(tokenizer, TWO, True)
    text = tokenizer.decode([i for i, is_trained in zip(ids, trained, strict=True) if is_trained])
    assert f"{ANSWER}<" in text
    assert "And?" not in text
