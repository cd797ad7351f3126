"""check_template: a template that cannot carry the training is refused on the first row."""

import pytest
from datasets import Dataset

from soren_align.data import check_template
from soren_align.recipe import UserError

from .conftest import CHATML, chat, pair_row

SFT = Dataset.from_list([{"messages": chat(1)}])
DPO = Dataset.from_list([{column: pair_row(1)[column] for column in ("chosen", "rejected")}])
PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def refused(tokenizer, task="sft", assistant_only_loss=True):
    with pytest.raises(UserError) as caught:
        check_template(tokenizer, task, assistant_only_loss, SFT if task == "sft" else DPO)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("trim", ["{% generation %}", "{%- generation -%}", "{%generation%}"])
def test_a_template_with_markers_passes(make_tokenizer, trim):
    template = CHATML.replace("{% generation %}", trim)
    check_template(make_tokenizer(template), "sft", True, SFT)
    check_template(make_tokenizer(template), "dpo", False, DPO)


def test_without_markers_only_the_whole_conversation_can_be_trained(make_tokenizer):
    check_template(make_tokenizer(PLAIN), "sft", False, SFT)
    check_template(make_tokenizer(PLAIN), "dpo", True, DPO)  # DPO needs no markers
    message = refused(make_tokenizer(PLAIN))
    assert "has no {% generation %}. Set model.chat_template" in message
    assert "or set trainer.assistant_only_loss to false" in message


def test_a_tokenizer_without_a_template_is_refused(make_tokenizer):
    assert "has no chat template; set model.chat_template" in refused(make_tokenizer(None))
    assert "has no chat template; set model.chat_template" in refused(make_tokenizer(None), "dpo")
    named = make_tokenizer({"tool_use": CHATML, "rag": CHATML})
    assert "has the chat templates tool_use, rag, and no default" in refused(named)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% generation %}{{ raise_exception('no users\nhere') }}{% endgeneration %}", "row: no users"),
        ("{% generation %}{{ messages", "(line 1 of the template)"),
        ("{% generation %}{{ 1 / 0 }}{% endgeneration %}", "division by zero"),
        ("{% generation %}{{ messages[0]['content'] + none }}{% endgeneration %}", "can only concatenate str"),
    ],
)
def test_a_template_that_fails_is_refused_in_one_line(make_tokenizer, template, reason):
    message = refused(make_tokenizer(template))
    assert "the chat template fails on the first row" in message
    assert reason in message


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_template_that_leaves_out_the_answer_is_refused(make_tokenizer, task):
    mute = CHATML.replace("m['content'] + '<|im_end|>'", "'<|im_end|>'")
    assert "leaves out what the assistant says: 'Animal number 1" in refused(make_tokenizer(mute), task)


def test_a_template_that_marks_nothing_is_refused(make_tokenizer):
    nothing = PLAIN + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    assert "marks no token of the first row" in refused(make_tokenizer(nothing))
